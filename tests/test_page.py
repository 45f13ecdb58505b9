"""The report as a page: what stands in it, and how a real browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from vecferry.errors import MissingDependencyError
from vecferry.gate import Decision, Gate, Judgement, decide
from vecferry.measured import Cell, Curve, Evaluation, Loss, Point, Row, Slices
from vecferry.page import page
from vecferry.report import Report

HOSTILE = "<script>alert('x')</script> & \"quoted\" {{ 7 * 7 }}"
VALUES = {"status quo": 0.2, "translated": 0.378, "as indexed": 0.371, "re-embedded": 1.0}


def cell(metric: str, value: float, half: float = 0.02, queries: int = 250) -> Cell:
    return Cell(metric, 10, value, value - half, min(1.0, value + half), 900, queries)


def report(name: str = "lang") -> Report:
    """A report with everything that one can hold; `name` stands wherever a name can come from outside."""
    hubs = (Cell("hub-skew", 10, 2.125, documents=900, queries=850), Cell("never-found", 10, 0.0625, documents=900))
    rows = [Row(row, (cell("agreement", value), *hubs)) for row, value in VALUES.items()]
    rows.insert(1, Row("naive swap", (Cell("agreement", 10, reason=f"dimensions differ {name}"),)))
    labelled = (cell("ndcg", 0.31), cell("retention.ndcg", 0.72), Cell("recall", 10, reason=f"no labels {name}"))
    rows[2] = replace(rows[2], cells=rows[2].cells + labelled)
    few = Cell("agreement", 10, reason="too few: 12 queries, 30 are needed")
    slices = Slices(name, (Row("en", (cell("agreement", 0.5, queries=90),)), Row(name, (few,))), 7)
    points = (Point(500, 0.31, 0.29, 0.33), Point(4000, 0.42, 0.4, 0.44), Point(8000, 0.45, 0.4, 0.5, predicted=True))
    evaluation = Evaluation(tuple(rows), "cosine", 10, (f"a note {name}",), slices)
    decision = decide(Gate.parse("agreement@10>=.3"), evaluation)
    drop = Judgement(f"drop.agreement@10<=0.01 {name}", "fail", f"a drop {name}")
    return Report(
        {"destination": f"faiss:new {name}", "rows": 1_000_000, "vacant": None},
        evaluation,
        Decision("both", (*decision.judgements, drop)),
        (f"a warning {name}",),
        {"rewrite": 1.5},
        curves=(Curve("agreement@10", f"pairs {name}", points),),
        attribution=(
            Loss(f"the map {name}", "agreement@10", 0.55, 0.5, 0.6),
            Loss("codes", "agreement@10", reason=name),
        ),
    )


class Outline(HTMLParser):
    """Read a page: its text, its attributes, and whether every element is closed in order."""

    VOID = ("meta", "link", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("href", "src", "xlink:href", "action", "data")]
        if tag not in self.VOID and not self.get_starttag_text().endswith("/>"):  # type: ignore[union-attr]
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.get_starttag_text() is not None and self.open and self.open[-1] == tag:
            self.open.pop()
        elif tag in ("line", "circle", "rect", "polyline", "polygon"):
            pass  # handle_startendtag calls both
        else:
            raise AssertionError(f"</{tag}> closes {self.open[-1:]}")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(" ".join(data.split()))

    @property
    def words(self) -> str:
        return " ".join(part for part in self.text if part)


def test_everything_that_a_report_holds_is_on_the_page() -> None:
    outline = Outline(page(report()))
    assert outline.open == []
    for text in (
        "faiss:new lang",
        "Failed",
        "✓ agreement@10>=0.3",
        "✗ drop.agreement@10<=0.01 lang",
        "agreement@10 is 0.371 [0.351, 0.391] among 900 held-out documents, 250 queries: the lower end reaches 0.3",
        "Measured among 900 held-out documents, 250 queries.",
        "naive swap dimensions differ lang",
        "0.378 [0.358, 0.398]",
        "0.310 [0.290, 0.330] 72 % [70, 74]",
        "By lang",
        "0.500 [0.480, 0.520] 90",
        "lang too few: 12 queries, 30 are needed",
        "7 more are too few.",
        "agreement@10 against pairs lang",
        "Hollow points are predicted, not measured.",
        "the map lang 0.550 of agreement@10 [0.500, 0.600] codes lang",
        "skew never found",
        "as indexed 2.12 6.2 %",
        "rows 1,000,000",
        "ranked by cosine rewrite 1.5 s",
        "recall@10 was not measured: no labels lang",
        "Warning: a warning lang",
        "a note lang",
    ):
        assert text in outline.words, text
    assert "vacant" not in outline.words


def test_the_page_needs_and_reaches_nothing_outside_itself() -> None:
    text = page(report())
    assert "script" not in Outline(text).tags
    assert Outline(text).links == ["data:,"]
    assert not re.search(r"https?:|//[a-z]|url\(|@import", text)
    assert "default-src 'none'" in text


def test_names_from_outside_stay_text() -> None:
    outline = Outline(page(report(HOSTILE)))
    assert "script" not in outline.tags
    assert outline.words.count(HOSTILE) == Outline(page(report("lang_x"))).words.count("lang_x") > 10


def test_the_line_that_the_gate_asks_for_stands_where_it_acts() -> None:
    measured = report().evaluation
    assert measured is not None
    for gate, titles in (("agreement@10>=.3", ["0.3"]), ("worst-slice.agreement@10>=.2", ["0.2"]), ("ndcg@10>=.1", [])):
        text = page(Report({}, measured, decide(Gate.parse(gate), measured)))
        assert re.findall(r"the gate asks for ([0-9.]+)", text) == titles


def test_what_was_not_measured_has_no_place() -> None:
    bare = Outline(page(Report({"destination": "faiss:new"})))
    assert "nothing was measured" in bare.words
    assert "svg" not in bare.tags
    measured = report().evaluation
    assert measured is not None
    plain = Outline(page(Report({}, replace(measured, slices=None))))
    assert "no gate: nothing was decided" in plain.words
    for heading in ("Curves", "What is lost to what", "By lang"):
        assert heading not in plain.words


def test_the_page_is_the_same_each_time() -> None:
    assert page(report()) == page(report())


def test_without_jinja2_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'vecferry\[report\]'"):
        page(report())


@pytest.mark.parametrize(
    ("points", "ticks"),
    [
        ([(1000, 0.5)], ["0.49", "0.495", "0.5", "0.505", "0.51"]),
        ([(0, 0.1), (10, 0.9)], ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ([(1, 0.301), (2, 0.349)], ["0.3", "0.31", "0.32", "0.33", "0.34", "0.35"]),
    ],
)
def test_a_curve_of_any_range_has_round_ticks_around_it(points: Any, ticks: list[str]) -> None:
    curve = Curve("agreement@10", "documents", tuple(Point(x, y) for x, y in points))
    outline = Outline(page(Report({}, curves=(curve,))))
    shown = re.findall(r"[0-9.]+", outline.words.split("documents")[1])[: len(ticks)]
    assert shown == ticks


BROWSER = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--enable-logging=stderr",
    "--log-level=0",
]
PROBE = """<script>
const box = e => e.getBoundingClientRect();
const rows = [...document.querySelectorAll("tr")].filter(r => r.querySelector("circle")).map(r => {
  const track = box(r.querySelector(".track")), dot = box(r.querySelector("circle"));
  const bar = r.querySelector(".whisker") && box(r.querySelector(".whisker"));
  const at = x => (x - track.left) / track.width;
  return [r.cells[0].innerText, at((dot.left + dot.right) / 2), at(bar.left), at(bar.right)];
});
const texts = [...document.querySelectorAll("svg text")].filter(t => box(t).width == 0).length;
console.log("PROBE" + JSON.stringify({rows, texts, page: document.documentElement.scrollWidth, window: innerWidth}));
</script>"""


def console(text: str, folder: Path, width: int = 1000) -> list[str]:
    """Show a page in the browser; return what went to its console."""
    assert BROWSER is not None
    file = folder / "page.html"
    file.write_text(text, encoding="utf-8")
    flags = [
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},2000",
        f"--screenshot={folder / 'page.png'}",
    ]
    done = subprocess.run(
        [BROWSER, *FLAGS, *flags, file.as_uri()], capture_output=True, text=True, check=True, timeout=120
    )
    assert (folder / "page.png").stat().st_size > 1000
    return [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


in_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium here: make browser-deps installs it on Debian as root"
)


@pytest.mark.browser
@in_browser
@pytest.mark.parametrize("width", [1000, 400])
def test_a_browser_shows_the_page_without_complaint(width: int, tmp_path: Path) -> None:
    assert console(page(report(HOSTILE)), tmp_path, width) == []


@pytest.mark.browser
@in_browser
def test_the_console_is_heard(tmp_path: Path) -> None:
    """The control of the test above: a script or a picture from the network is refused, and that is complained of."""
    for bad in ("<script>alert(1)</script>", "<img src='https://example.org/x.png' alt=''>"):
        lines = console(page(report()).replace("<main>", f"<main>{bad}"), tmp_path)
        assert any("Content Security Policy" in line for line in lines), lines


@pytest.mark.browser
@in_browser
@pytest.mark.parametrize("width", [1000, 500])
def test_dots_and_bars_stand_where_their_numbers_are(width: int, tmp_path: Path) -> None:
    text = re.sub("<meta http-equiv[^>]*>", "", page(report())).replace("</body>", f"{PROBE}</body>")
    (line,) = console(text, tmp_path, width)
    seen = json.loads(line[line.index("PROBE") + 5 : line.rindex("}") + 1].replace('\\"', '"'))
    assert seen["page"] <= seen["window"]
    assert seen["texts"] == 0
    drawn = {name: (dot, low, high) for name, dot, low, high in seen["rows"][: len(VALUES)]}
    assert drawn.keys() == VALUES.keys()
    for name, value in VALUES.items():
        expected = (value, value - 0.02, min(1.0, value + 0.02))
        assert drawn[name] == pytest.approx(expected, abs=0.006), name  # one pixel of a track
