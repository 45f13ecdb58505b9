from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from vecferry.errors import DataError, UsageError
from vecferry.qrels import as_ids, as_strings, read_qrels

WANT = [("q1", "d1", 1), ("q1", "d2", 3), ("q2", "d1", 2)]


def rows_of(path: Path) -> list[tuple[str, str, int]]:
    labels = read_qrels(path)
    return list(zip(labels.queries.to_pylist(), labels.documents.to_pylist(), labels.grades.tolist(), strict=True))


@pytest.mark.parametrize(
    "text",
    [
        "q1 0 d1 1\nq1 0 d2 3\nq2 0 d1 2\n",
        "q1\t0\td1\t1\nq1\t0\td2\t3\nq2\t0\td1\t2",
        "q1\td1\t1\n\nq1\td2\t3\r\nq2\td1\t2\n",
        "q1  d1 1\nq1 d2   3\nq2 d1 2\nq2 d9 0\nq2 d8 -1\nq1 d1 1\n",
    ],
    ids=["trec spaces", "trec tabs", "three tabs", "three spaces, irrelevant and repeated"],
)
def test_reads_both_formats(tmp_path: Path, text: str) -> None:
    path = tmp_path / "qrels"
    path.write_bytes(text.encode())
    assert rows_of(path) == WANT


def test_ids_with_spaces_between_tabs(tmp_path: Path) -> None:
    path = tmp_path / "qrels"
    path.write_text("what is a cat\tFelis catus\t1\n")
    assert rows_of(path) == [("what is a cat", "Felis catus", 1)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("query-id\tcorpus-id\tscore\nq\td\t1\n", "line 1: the grade 'score' .* header"),
        ("q d 1\nq d2\n", "line 2: 2 columns, the lines above have 3"),
        ("q d\n", "line 1: 2 columns, qrels have 3, or 4"),
        ("q 0 d 1 x\n", "line 1: 5 columns"),
        ("q d 1\nq e 1.5\n", "line 2: the grade '1.5'"),
        ("q d 1\nq d 2\n", "line 2: q d has grade 2, and 1 above"),
        ("q d 0\n", "none of its 1 labels"),
        ("", "none of its 0 labels"),
    ],
)
def test_faults_name_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "labels.tsv"
    path.write_text(text)
    with pytest.raises(DataError, match=f"labels.tsv.*{said}"):
        read_qrels(path)


def test_no_file_and_no_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="absent"):
        read_qrels(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="binary"):
        read_qrels(tmp_path / "binary")


def test_matches_what_a_double_loop_matches(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pairs = {(f"q{rng.integers(9)}", int(rng.integers(30))) for _ in range(80)}
    path = tmp_path / "qrels"
    path.write_text("".join(f"{q} 0 {d} {d % 3}\n" for q, d in sorted(pairs)))
    queries, ids = ["q3", "q0", "q7"], rng.permutation(40)[:20].tolist()
    found = read_qrels(path).match(pa.array(queries), pa.array(ids, pa.int32()))
    assert found is not None
    got = {(int(q), int(d), int(g)) for q, d, g in zip(found.query, found.document, found.grade, strict=True)}
    want = {(i, j, d % 3) for i, q in enumerate(queries) for j, d in enumerate(ids) if (q, d) in pairs and d % 3 > 0}
    assert got == want
    assert read_qrels(path).match(pa.array(["unknown"]), pa.array(ids)) is None


def test_ids_from_text_and_back() -> None:
    names = pa.array(["5", "007", "-3", "x", "5", str(2**40), str(2**70), "1.0"])
    assert as_ids(names, pa.int64()).to_pylist() == [5, -3, 2**40]
    assert as_ids(names, pa.int32()).to_pylist() == [5, -3]
    assert as_ids(names, pa.uint64()).to_pylist() == [5, 2**40]
    assert as_ids(names, pa.large_string()).type == pa.large_string()
    assert as_ids(names, pa.binary()).to_pylist()[:2] == [b"5", b"007"]
    assert as_strings(pa.array([5, -3])).to_pylist() == ["5", "-3"]
    with pytest.raises(DataError, match="binary"):
        as_strings(pa.array([b"\xff"]))
