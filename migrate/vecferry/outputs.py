"""The files that a verdict is written to: JUnit XML and a page."""

from __future__ import annotations

from pathlib import Path

from vecferry.errors import UsageError
from vecferry.junit import junit as write_junit
from vecferry.page import page, require_jinja2
from vecferry.report import Report, publish


def prepare_outputs(junit: Path | None, html: Path | None) -> None:
    """Delete what an earlier run wrote there, so that no old verdict outlives a run that stops early.

    Raises UsageError now, not after hours of work, for a folder that isn't there and for jinja2 missing.
    """
    if html is not None:
        require_jinja2()
    for path in (junit, html):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.parent}")
        if path.is_dir():
            raise UsageError(f"{path} is a folder: name a file")
        path.unlink(missing_ok=True)


def write_outputs(report: Report, junit: Path | None, html: Path | None) -> None:
    """Write the files that were asked for, each in one step."""
    if junit is not None:
        publish(junit, write_junit(report))
    if html is not None:
        publish(html, page(report))
