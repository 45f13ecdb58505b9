"""What `vecferry doctor` found: findings, each with its fault and its cure, and what they amount to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vecferry.errors import UsageError


@dataclass(frozen=True, slots=True)
class Finding:
    """Hold one thing that was looked at.

    fault   what is wrong with it, "" where nothing is
    cure    a command, or a thing to do
    stops   a migration would be refused or fail because of it
    """

    name: str
    value: str
    fault: str = ""
    cure: str = ""
    stops: bool = False

    @property
    def level(self) -> str:
        """Return "ok", "note" for what a migration works in spite of, or "stop"."""
        return "stop" if self.stops else "note" if self.fault else "ok"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Hold all findings about this machine and the packages on it."""

    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """Return 0 where a migration can work, or else the code that one would exit with here."""
        return UsageError.exit_code if any(f.stops for f in self.findings) else 0

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"works": self.exit_code == 0, "findings": [asdict(f) | {"level": f.level} for f in self.findings]}

    def table(self) -> str:
        """Write the findings for people: a line each, its fault and its cure below."""
        width = max(len(f.name) for f in self.findings)
        lines = []
        for f in self.findings:
            mark = "" if f.level == "ok" else f.level
            lines.append(f"{mark:<4}  {f.name:<{width}}  {f.value}".rstrip())
            lines += [f"{'':<{width + 8}}{text}" for text in (f.fault, f.cure and f"cure: {f.cure}") if text]
        stops, notes = ([f.name for f in self.findings if f.level == level] for level in ("stop", "note"))
        if stops:
            lines.append(f"stops a migration: {', '.join(stops)}")
        else:
            lines.append("a migration can work here" + (f"; to be noted: {', '.join(notes)}" if notes else ""))
        return "\n".join(lines)
