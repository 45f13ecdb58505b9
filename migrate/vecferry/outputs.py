"""The files that a verdict is written to: JUnit XML and a page."""

from __future__ import annotations

from pathlib import Path

from vecferry.errors import UsageError
from vecferry.junit import junit as write_junit
from vecferry.page import page, require_jinja2
from vecferry.report import Report, publish

STARTS = {"JUnit XML": b"<testsuites", "HTML": b"<!doctype html"}
"""What stands near the beginning of a file of each kind, in lower case."""


def prepare_outputs(junit: Path | None, html: Path | None) -> None:
    """Delete what an earlier run wrote there, so that no old verdict outlives a run that stops early.

    Raises UsageError now, not after hours of work, for a folder that isn't there, for jinja2 missing, and for a file
    that is no such verdict: a mistyped name isn't to cost an index.
    """
    if html is not None:
        require_jinja2()
    if junit is not None and html is not None and junit.resolve() == html.resolve():
        raise UsageError(f"--junit and --html both name {junit}: name two files")
    for kind, path in (("JUnit XML", junit), ("HTML", html)):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.parent}")
        if path.is_dir():
            raise UsageError(f"{path} is a folder: name a file")
        if path.exists() or path.is_symlink():
            _require_verdict(path, kind)
            path.unlink()


def _require_verdict(path: Path, kind: str) -> None:
    """Refuse what can't be an earlier verdict: links, devices, and files that are neither empty nor of this kind."""
    head = b""
    if path.is_file() and not path.is_symlink():
        with path.open("rb") as file:
            head = file.read(1024).lower()
        if not head or STARTS[kind] in head:
            return
    raise UsageError(f"{path} exists and is no {kind} of an earlier run, so it is left alone: name another file")


def write_outputs(report: Report, junit: Path | None, html: Path | None) -> None:
    """Write the files that were asked for, each in one step."""
    if junit is not None:
        publish(junit, write_junit(report))
    if html is not None:
        publish(html, page(report))
