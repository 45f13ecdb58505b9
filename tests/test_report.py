"""The report: exit codes, JSON that loads again, and a table whose numbers stand under a header with their size."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vecferry.errors import DataError, UsageError
from vecferry.gate import Gate, decide
from vecferry.measured import Cell, Curve, Evaluation, Loss, Point, Row, Slices
from vecferry.report import Report


def cell(metric: str, value: float | None = None, half: float = 0.02, queries: int = 250, **other: Any) -> Cell:
    if value is None:
        return Cell(metric, 10, **other)
    return Cell(metric, 10, value, value - half, value + half, 900, queries, **other)


def evaluation(translated: float = 0.05, status_quo: float | None = 0.24) -> Evaluation:
    """Rows as `evaluate` makes them, with nDCG to choose."""
    none = "no source queries: pass --source-queries"
    return Evaluation(
        (
            Row(
                "status quo",
                (cell("agreement", 0.2), cell("ndcg", status_quo, reason=none if status_quo is None else None)),
            ),
            Row("naive swap", (cell("agreement", reason="dimensions differ: 384 and 768"),)),
            Row(
                "translated",
                (
                    cell("agreement", 0.378),
                    cell("ndcg", translated, queries=88),
                    cell("retention.ndcg", 0.2, queries=88),
                    cell("identity", 0.97, queries=900),
                ),
            ),
            Row("as indexed", (cell("agreement", 0.371), cell("recall", reason="no labels: pass --qrels"))),
            Row("cascade (top-100 re-ranked with true vectors)", (cell("agreement", 0.745), cell("ndcg", 0.22))),
            Row("re-embedded", (cell("agreement", 1, 0), cell("ndcg", 0.245))),
        ),
        "cosine",
        10,
        ("3 of 903 held-out documents are not in the index",),
    )


FACTS = {
    "source": "faiss:old",
    "destination": "faiss:new",
    "written": 1_000_000,
    "skipped": 3,
    "skipped_ids": [4, 9, 11],
    "lossy": False,
    "verified_error": 1.23456e-7,
    "parameters": {"nprobe": 16},
    "backup": None,
}


def test_the_exit_code_is_that_of_the_gate():
    e = evaluation()
    assert (Report(FACTS, e).passed, Report(FACTS, e).exit_code) == (None, 0)
    for text, passed, code in (
        ("agreement@10>=.3", True, 0),
        ("agreement@10>=.5", False, 1),
        ("agreement@5>.1", False, 1),
    ):
        report = Report(FACTS, e, decide(Gate.parse(text), e))
        assert (report.passed, report.exit_code) == (passed, code)


def test_a_report_loads_again_and_is_the_same_each_time(tmp_path):
    e = evaluation()
    report = Report(FACTS, e, decide(Gate.parse("agreement@10>=.3"), e), ("a warning",), {"rewrite": 1.5})
    text = json.dumps(report.to_json(), allow_nan=False)
    assert text == json.dumps(report.to_json())
    (tmp_path / "report.json").write_text(text)
    again = Report.load(tmp_path / "report.json")
    assert again == report
    assert again.table() == report.table()
    other = replace(report, timing={"rewrite": 1.7}).to_json()
    assert {name for name, value in report.to_json().items() if value != other[name]} == {"timing"}


def test_a_report_of_an_earlier_version_loads_without_what_it_had_not(tmp_path):
    old = Report(FACTS, evaluation()).to_json()
    for part, names in ((old, ("curves", "attribution")), (old["evaluation"], ("slices", "per_query", "held_out"))):
        for name in names:
            del part[name]
    (tmp_path / "report.json").write_text(json.dumps(old))
    assert Report.load(tmp_path / "report.json") == Report(FACTS, evaluation())


def test_a_report_is_saved_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    Report(FACTS, evaluation()).save(path)
    assert Report.load(path) == Report(FACTS, evaluation())
    assert path.read_bytes().endswith(b"}\n")

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        Report({"other": 1}).save(path)
    assert Report.load(path) == Report(FACTS, evaluation())
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def full_report() -> Report:
    """A report with everything that a report can hold."""
    e = evaluation()
    hubs = (Cell("hub-skew", 10, 2.125, documents=900, queries=850), Cell("never-found", 10, 0.0625, documents=900))
    few = Cell("agreement", 10, reason="too few: 12 queries, 30 are needed")
    slices = Slices("lang", (Row("en", (cell("agreement", 0.5, queries=90),)), Row("de <b>", (few,))), 7)
    rows = tuple(replace(row, cells=row.cells + hubs) if row.name == "translated" else row for row in e.rows)
    points = (Point(500, 0.31, 0.29, 0.33), Point(4000, 0.42, 0.4, 0.44), Point(8000, 0.45, 0.4, 0.5, predicted=True))
    losses = (Loss("the map", "agreement@10", 0.55, 0.5, 0.6), Loss("source codes", "agreement@10", reason="unknown"))
    return Report(
        FACTS,
        replace(e, rows=rows, slices=slices),
        decide(Gate.parse("agreement@10>=.3 and ndcg@10>=.9"), e),
        ("the pairs are unlike <the index>",),
        curves=(Curve("agreement@10", "pairs", points),),
        attribution=losses,
    )


def test_slices_hubness_curves_and_losses_have_their_tables(tmp_path):
    report = full_report()
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == report
    lines = report.table().split("\n")
    at = lines.index("hubness@10 among 900 held-out documents, 850 documents as queries")
    assert lines[at + 1 : at + 3] == ["  translated  skew   2.12, 6.2% never found", ""]
    at = lines.index("agreement@10 by lang, as indexed, among 900 held-out documents; 95 % interval")
    assert lines[at + 1 : at + 5] == [
        "  en      0.500  [0.480, 0.520]  90 queries",
        "  de <b>  too few: 12 queries, 30 are needed",
        "",
        "7 more slices by lang are too few",
    ]
    at = lines.index("what is lost to what")
    assert lines[at + 1 : at + 3] == ["  the map       0.550  [0.500, 0.600]", "  source codes  unknown"]
    at = lines.index("agreement@10 against pairs")
    assert lines[at + 1 : at + 4] == [
        "           500  0.310  [0.290, 0.330]",
        "         4,000  0.420  [0.400, 0.440]",
        "         8,000  0.450  [0.400, 0.500]  predicted",
    ]


def test_facts_of_any_type_become_json():
    report = Report({"n": np.int64(3), "x": np.float32(0.5), "ids": [b"\x01\xff"], "bare": None})
    assert report.to_json()["facts"] == {"n": 3, "x": 0.5, "ids": ["01ff"], "bare": None}


def test_what_is_no_report_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        Report.load(tmp_path / "nothing")
    path = tmp_path / "report.json"
    for text in ("{", "[]", "{}", '{"format": 1}'):
        path.write_text(text)
        with pytest.raises(DataError, match=r"report\.json (is damaged|can't be read as a report)"):
            Report.load(path)
    path.write_text('{"format": 2}')
    with pytest.raises(DataError, match="format 2, this vecferry reads 1"):
        Report.load(path)


def test_the_table():
    e = evaluation()
    table = Report(FACTS, e, decide(Gate.parse("agreement@10>=.3"), e), ("the pairs are unlike the index",)).table()
    lines = table.split("\n")
    assert "written         1,000,000" in lines
    assert "skipped ids     4, 9, 11" in lines
    assert "lossy           no" in lines
    assert "parameters      nprobe 16" in lines
    assert not any(line.startswith("backup") for line in lines)
    assert "warning: the pairs are unlike the index" in lines
    start = lines.index("agreement@10 among 900 held-out documents, 250 queries; 95 % interval")
    assert lines[start + 1 : start + 8] == [
        "  status quo                                     0.200  [0.180, 0.220]",
        "  naive swap                                         -  (1)",
        "  translated                                     0.378  [0.358, 0.398]",
        "  as indexed                                     0.371  [0.351, 0.391]",
        "  cascade (top-100 re-ranked with true vectors)  0.745  [0.725, 0.765]",
        "  re-embedded                                    1.000  [1.000, 1.000]",
        "",
    ]
    assert any(line.endswith("0.050  [0.030, 0.070]    20 % [18, 22] of re-embedded") for line in lines)
    assert "(1) dimensions differ: 384 and 768" in lines
    assert "not measured: recall@10: no labels: pass --qrels" in lines
    assert "note: 3 of 903 held-out documents are not in the index" in lines
    assert "identity recall@10 is 0.970  [0.950, 0.990]; it saturates near 1 and proves little" in lines
    assert lines[-1] == "gate agreement@10>=0.3: PASS"
    assert "the lower end reaches 0.3" in lines[-2]


def test_an_inconclusive_gate_says_that_it_blocks():
    e = evaluation()
    lines = Report(FACTS, e, decide(Gate.parse("agreement@10>=.36"), e)).table().split("\n")
    assert lines[-1] == "gate agreement@10>=0.36: INCONCLUSIVE (counts as failed)"
    assert Report(FACTS).table().endswith("nothing was measured")
    assert Report(FACTS, e).table().endswith("no gate: nothing was decided")


def test_a_translation_that_loses_to_doing_nothing_is_told_so():
    worse = Report(FACTS, evaluation(0.05)).advice
    assert worse == (
        "Translation alone retrieves worse than doing nothing here (ndcg@10 0.050 against 0.240). "
        "With a cascade that re-ranks with true vectors 0.220 and re-embedding everything 0.245."
    )
    assert worse.split(". ")[0] in Report(FACTS, evaluation(0.05)).table().replace("\n", " ")
    assert "is not shown to retrieve better than doing nothing" in (Report(FACTS, evaluation(0.25)).advice or "")
    assert Report(FACTS, evaluation(0.30)).advice is None
    assert Report(FACTS, evaluation(0.05, None)).advice is None
    assert Report(FACTS).advice is None


def test_the_next_step_fits_the_outcome():
    e = evaluation()
    assert Report(FACTS, e).next_step() == "vecferry inspect faiss:new"
    assert "better map" in Report(FACTS, e, decide(Gate.parse("agreement@10>=.9"), e)).next_step()
    assert "more held-out" in Report(FACTS, e, decide(Gate.parse("agreement@10>=.36"), e)).next_step()
