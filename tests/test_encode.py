"""The verb `encode`: what is read, what is written, what is kept when it is stopped; and who takes its encoders."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from embedding_server import DIM, serving, status, true_vector

import vecferry
from vecferry import encoding
from vecferry.cli import cli
from vecferry.corpus import Corpus
from vecferry.encoders import Prompt, TextEncoder
from vecferry.errors import BadRowsError, DataError, IncompatibleError, StoppedError, UsageError
from vecferry.linear import Card, LinearMap, Side
from vecferry.store import open_reader


class Known:
    """A model whose vectors are `true_vector`; it may be interrupted before its n-th batch."""

    name, dim, pooling, revision, normalized = "known", DIM, "none", "1", True
    max_length: int | None = None
    prompt: Prompt | None = None

    def __init__(self, stop_before: int | None = None) -> None:
        self.seen: list[str] = []
        self.calls, self.stop_before = 0, stop_before

    def embed(self, template: str, texts: list[str]) -> Any:
        if self.calls == self.stop_before:
            raise KeyboardInterrupt
        self.calls += 1
        self.seen += texts
        return np.array([true_vector(template.replace("{text}", text)) for text in texts])


def encoder(**options: Any) -> TextEncoder:
    return TextEncoder(Known(**options), Prompt(("d: {text}",), ("q: {text}",)), True, "known")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serving() as made:
        yield made


def rows_of(store: Path) -> tuple[list[Any], np.ndarray, Any]:
    with open_reader(str(store)) as reader:
        batches = list(reader.read(1000))
        return (
            [i for b in batches for i in b.ids.to_pylist()],
            np.concatenate([b.vectors for b in batches]),
            reader.info,
        )


def expected(texts: list[str], side: str = "d") -> np.ndarray:
    return np.array([true_vector(f"{side}: {text}") for text in texts], np.float32)


def lines(path: Path, texts: list[str]) -> Path:
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_parquet_goes_in_and_a_store_that_knows_its_space_comes_out(tmp_path: Path) -> None:
    texts = [f"text number {i % 70}" for i in range(100)]
    table = pa.table({"role": ["fit"] * 100, "id": pa.array(np.arange(100) * 7), "text": texts})
    pq.write_table(table, tmp_path / "texts.parquet", row_group_size=30)
    made = encoder()
    result = vecferry.encode(tmp_path / "texts.parquet", made, tmp_path / "out", batch_size=8)
    ids, vectors, info = rows_of(tmp_path / "out")
    assert ids == list(range(0, 700, 7))
    np.testing.assert_allclose(vectors, expected(texts), atol=1e-6)
    assert (info.space, info.metric, info.id_type) == (made.identity, "cosine", pa.int64())
    assert info.provenance["encoder"]["side"] == "document"
    assert (result.rows, result.encoded, result.kept, result.dim, result.space) == (100, 70, 0, DIM, made.identity)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "texts.parquet"]
    vecferry.encode(tmp_path / "texts.parquet", made, tmp_path / "queries", side="query")
    _, vectors, of_queries = rows_of(tmp_path / "queries")
    np.testing.assert_allclose(vectors, expected(texts, "q"), atol=1e-6)
    assert of_queries.space == info.space


def test_json_lines_and_plain_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    entries = [{"_id": "b", "title": "t", "text": "one"}, {"_id": "ä", "text": ["two", "zwei"], "title": "x"}]
    path.write_text("\n".join(json.dumps(e) for e in entries), encoding="utf-8")
    vecferry.encode(path, encoder(), tmp_path / "a")
    ids, vectors, _ = rows_of(tmp_path / "a")
    assert ids == ["b", "ä"]
    mean = expected(["two", "zwei"]).mean(axis=0)
    np.testing.assert_allclose(vectors, [expected(["one"])[0], mean / np.linalg.norm(mean)], atol=1e-6)
    plain = tmp_path / "plain.txt"
    plain.write_bytes("\ufefferste\r\nzweite Zeile\nlast".encode())
    vecferry.encode(plain, encoder(), tmp_path / "c")
    ids, vectors, _ = rows_of(tmp_path / "c")
    assert ids == [0, 1, 2]
    np.testing.assert_allclose(vectors, expected(["erste", "zweite Zeile", "last"]), atol=1e-6)


def test_columns_are_named_where_their_names_are_unusual(tmp_path: Path) -> None:
    table = pa.table({"key": ["x", "y"], "words": ["one", "two"], "n": [1, 2]})
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(UsageError, match="which of key, words, n holds the texts can't be told: name it with --text"):
        vecferry.encode(tmp_path / "t.parquet", encoder(), tmp_path / "out")
    with pytest.raises(UsageError, match="no column of texts 'n'"):
        vecferry.encode(tmp_path / "t.parquet", encoder(), tmp_path / "out", text="n")
    with pytest.raises(UsageError, match="no column 'name' among key, words, n: name another with --id"):
        vecferry.encode(tmp_path / "t.parquet", encoder(), tmp_path / "out", text="words", id="name")
    vecferry.encode(tmp_path / "t.parquet", encoder(), tmp_path / "out", text="words", id="key")
    assert rows_of(tmp_path / "out")[0] == ["x", "y"]
    vecferry.encode(tmp_path / "t.parquet", encoder(), tmp_path / "numbered", text="words")
    assert rows_of(tmp_path / "numbered")[0] == [0, 1]
    (tmp_path / "parts").mkdir()
    for i in range(2):
        pq.write_table(table.slice(i, 1), tmp_path / "parts" / f"{i}.parquet")
    vecferry.encode(tmp_path / "parts", encoder(), tmp_path / "joined", text="words")
    ids, vectors, _ = rows_of(tmp_path / "joined")
    assert ids == [0, 1]
    np.testing.assert_allclose(vectors, expected(["one", "two"]), atol=1e-6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"id": 1, "text": "x"}\n{"id": "2", "text": "y"}', "line 2: the id '2' is no int64"),
        (b'{"id": 1, "text": "x"}\n{"text": "y"}', "line 2: the id None is no int64"),
        (b'{"id": true, "text": "x"}', "line 1: the id True"),
        (b'{"id": 9223372036854775808, "text": "x"}', "line 1: the id 9223372036854775808 is beyond 64 bits"),
        (b'{"id": 1, "text": "x"}\n{"id": 2, "text": 3}', "line 2, 'text' is '3': a text is a string"),
        (b'{"id": 1, "text": "x"}\n{"id": 2, ', "line 2: "),
        (b'{"id": 1, "text": "x"}\n\n', "line 2: "),
        (b"", "has no texts"),
    ],
)
def test_lines_that_are_no_entries_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t.jsonl").write_bytes(content)
    with pytest.raises(DataError) as error:
        vecferry.encode(tmp_path / "t.jsonl", encoder(), tmp_path / "out")
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


def test_what_is_no_text_is_refused_before_anything_is_encoded(tmp_path: Path) -> None:
    made = encoder()
    (tmp_path / "t.txt").write_bytes(b"good\nb\xe4d\n")
    with pytest.raises(DataError, match=r"t\.txt, line 2: no UTF-8 text"):
        vecferry.encode(tmp_path / "t.txt", made, tmp_path / "out")
    blank = lines(tmp_path / "blank.txt", ["one", "", "two", " \t"])
    with pytest.raises(BadRowsError, match=r"2 rows have no text, or a blank one: 1, 3\. Give them one, or leave them"):
        vecferry.encode(blank, made, tmp_path / "out")
    twice = pa.table({"id": [1, 2, 1, 3, 2, 1], "text": list("abcdef")})
    pq.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(BadRowsError, match="3 ids stand more than once: 1, 2, 1"):
        vecferry.encode(tmp_path / "twice.parquet", made, tmp_path / "out")
    assert made.backend.seen == []  # type: ignore[attr-defined]
    result = vecferry.encode(blank, made, tmp_path / "out", bad_rows="skip")
    assert (result.rows, result.skipped) == (2, 2)
    ids, vectors, _ = rows_of(tmp_path / "out")
    assert ids == [0, 2]
    np.testing.assert_allclose(vectors, expected(["one", "two"]), atol=1e-6)
    with pytest.raises(UsageError, match="out exists: choose another name"):
        vecferry.encode(blank, made, tmp_path / "out")
    with pytest.raises(UsageError, match="no such file or folder"):
        Corpus(tmp_path / "nothing")
    with pytest.raises(UsageError, match=r"tables of texts are read as Parquet or \.jsonl"):
        Corpus(lines(tmp_path / "queries.tsv", ["1\tone"]))
    with pytest.raises(UsageError, match="leave out --id and --text"):
        Corpus(blank, text="text")
    with pytest.raises(UsageError, match="encode writes a folder of Parquet files"):
        vecferry.encode(blank, made, tmp_path / "out.faiss")


def tree(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.suffix == ".parquet"}


def test_a_stopped_run_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "TEXTS", 10)
    texts = [f"a text, the {i}th, {'long ' * (i % 7)}" for i in range(47)]
    path = lines(tmp_path / "t.txt", texts)
    vecferry.encode(path, encoder(), tmp_path / "whole", batch_size=4)
    with pytest.raises(StoppedError, match=r"stopped; 20 texts are encoded and kept in .*\.out\.encoding") as error:
        vecferry.encode(path, encoder(stop_before=7), tmp_path / "out", batch_size=4)
    assert error.value.exit_code == 5
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="with another model, prompt or side"):
        vecferry.encode(path, encoder(), tmp_path / "out", side="query")
    second = encoder()
    result = vecferry.encode(path, second, tmp_path / "out", batch_size=4)
    assert (result.kept, result.encoded) == (20, 27)
    assert sorted(second.backend.seen) == sorted(texts[20:])  # type: ignore[attr-defined]
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "t.txt", "whole"]


def test_a_text_that_was_changed_meanwhile_is_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "TEXTS", 10)
    texts = [f"text {i}" for i in range(30)]
    path = lines(tmp_path / "t.txt", texts)
    with pytest.raises(StoppedError):
        vecferry.encode(path, encoder(stop_before=2), tmp_path / "out", batch_size=10)
    texts[3] = "another"
    lines(path, texts)
    assert vecferry.encode(path, encoder(), tmp_path / "out").encoded == 11
    np.testing.assert_allclose(rows_of(tmp_path / "out")[1], expected(texts), atol=1e-6)


def test_texts_that_change_between_two_looks_are_noticed(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.txt", ["one", "two"])

    class Changing(Known):
        def embed(self, template: str, texts: list[str]) -> Any:
            lines(path, ["one", "two", "three"])
            return super().embed(template, texts)

    made = TextEncoder(Changing(), Prompt(), True, "known")
    with pytest.raises(DataError, match="was changed while it was read"):
        vecferry.encode(path, made, tmp_path / "out")
    assert vecferry.encode(path, made, tmp_path / "out").rows == 3


def test_a_model_that_gives_nonsense_is_named_with_the_ids(tmp_path: Path) -> None:
    class Broken(Known):
        def embed(self, template: str, texts: list[str]) -> Any:
            return np.array([np.full(DIM, np.nan) if text == "b" else np.ones(DIM) for text in texts])

    path = lines(tmp_path / "t.txt", ["a", "b", "c"])
    with pytest.raises(
        BadRowsError, match=r"known: 1 texts got a vector that is zero, NaN or infinite; their ids: 1\."
    ):
        vecferry.encode(path, TextEncoder(Broken(), Prompt(), False, "known"), tmp_path / "out")


def test_the_command_says_all_in_json_and_speaks_to_a_server(server: Any, tmp_path: Path) -> None:
    path = lines(tmp_path / "t.txt", ["one", "two"])
    arguments = ["encode", str(path), "--model", "m", "--endpoint", server.url, "--prompt", "e5", "--name", "mine"]
    done = CliRunner().invoke(cli, [*arguments, "--side", "query", "-o", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["rows"], told["encoded"], told["side"], told["dim"]) == (2, 2, "query", DIM)
    assert told["space"].startswith("mine@")
    np.testing.assert_allclose(
        rows_of(tmp_path / "out")[1], [true_vector(f"query: {t}") for t in ("one", "two")], atol=1e-6
    )
    done = CliRunner().invoke(cli, [*arguments, "--side", "document", "-o", str(tmp_path / "documents")])
    assert done.exit_code == 0
    assert rows_of(tmp_path / "documents")[2].space == told["space"]
    server.script = [status(500), *[status(429, Retry_After="9999")]]
    done = CliRunner().invoke(cli, [*arguments, "-o", str(tmp_path / "third")])
    assert done.exit_code == 5
    assert "asks to wait 9,999 s" in done.stderr


CHILD = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell's background job ignores
sys.path[:0] = [{tests!r}]
import numpy as np, vecferry, vecferry.cli
from vecferry import encoding
from test_encode import Known, encoder
encoding.TEXTS = 5
plain = Known.embed
def slow(self, template, texts):
    time.sleep(0.05)
    return plain(self, template, texts)
Known.embed = slow
vecferry.load_encoder = lambda *a, **k: encoder()
vecferry.cli.cli()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_from_outside_goes_on(tmp_path: Path, number: int) -> None:
    texts = [f"text {i}" for i in range(200)]
    path = lines(tmp_path / "t.txt", texts)
    code = CHILD.format(tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", code, "encode", str(path), "--model", "x", "-o", str(tmp_path / "out")]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    work = tmp_path / ".out.encoding"
    until = time.monotonic() + 60
    while len(list(work.glob("part-*"))) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(child.pid, number)
    _, said = child.communicate(timeout=60)
    if number == signal.SIGINT:
        assert child.returncode == 5, said
        assert "the same command goes on from there" in said
    assert not (tmp_path / "out").exists()
    result = vecferry.encode(path, encoder(), tmp_path / "out")
    assert 15 <= result.kept < 200
    assert result.encoded == 200 - result.kept
    np.testing.assert_allclose(rows_of(tmp_path / "out")[1], expected(texts), atol=1e-6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "t.txt"]


def test_a_full_disk_is_a_stop_that_says_where_the_work_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lines(tmp_path / "t.txt", ["one", "two"])

    def full(self: Any, ids: Any, vectors: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(encoding.Cache, "add", full)
    with pytest.raises(StoppedError, match="No space left on device; 0 texts are encoded"):
        vecferry.encode(path, encoder(), tmp_path / "out")


@pytest.fixture
def translated(tmp_path: Path, rows: Any) -> tuple[Any, LinearMap, dict[int, str]]:
    """Return an index of wrong vectors, a map that leads to the space of `encoder()`, and the texts."""
    texts = {i: f"document {i}" for i in range(50)}
    wrong = np.random.default_rng(0).standard_normal((50, DIM)).astype(np.float32)
    card = Card(Side(3, "old"), Side(DIM, encoder().identity), "by hand", metric="cosine")
    return rows(None, wrong), LinearMap(np.ones((3, DIM), np.float32), card=card), texts


def test_a_cascade_takes_an_encoder_and_refuses_one_of_another_space(translated: Any, tmp_path: Path) -> None:
    index, m, texts = translated
    queries = encoder().encode(["one", "two"], side="query")
    with vecferry.Cascade(index, m, encoder(), texts, tmp_path / "cache") as cascade:
        ids, scores = cascade.search(queries, k=3, c=50)
    exact = queries @ expected(list(texts.values())).T
    np.testing.assert_array_equal(ids, np.argsort(-exact, axis=1)[:, :3])
    np.testing.assert_allclose(scores, -np.sort(-exact, axis=1)[:, :3], atol=1e-5)
    other = TextEncoder(Known(), Prompt(), True, "known")
    with pytest.raises(IncompatibleError, match=r"the encoder gives vectors of the space 'known@.*, the map leads to"):
        vecferry.Cascade(index, m, other, texts, tmp_path / "cache")
    named = LinearMap(m.weight, card=Card(Side(3, "old"), Side(DIM, "somebody's name"), "by hand"))
    vecferry.Cascade(index, named, other, texts, tmp_path / "named").close()
    backend = Known()
    backend.dim = 5
    with pytest.raises(IncompatibleError, match="known gives vectors of 5 dimensions, the map leads to 6"):
        vecferry.Cascade(index, m, TextEncoder(backend, Prompt(), True, "known"), texts, tmp_path / "cache")


def test_warm_takes_a_model_with_its_options(server: Any, tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(20)]
    pq.write_table(pa.table({"id": np.arange(20), "text": texts}), tmp_path / "texts.parquet")
    options = ["--endpoint", server.url, "--prompt", "e5"]
    made = vecferry.load_encoder("a:model", endpoint=server.url, prompt="e5")
    np.save(tmp_path / "index.npy", np.random.default_rng(0).standard_normal((20, DIM)).astype(np.float32))
    np.save(tmp_path / "log.npy", made.encode(["x", "y"], side="query"))
    card = Card(Side(3, "old"), Side(DIM, made.identity), "by hand")
    LinearMap(np.ones((3, DIM), np.float32), card=card).save(tmp_path / "map")
    command = ["warm", str(tmp_path / "index.npy"), "--map", str(tmp_path / "map"), "--queries"]
    command += [str(tmp_path / "log.npy"), "--budget", "5", "--texts", str(tmp_path / "texts.parquet")]
    command += ["--cache", str(tmp_path / "cache"), "--encode", "a:model"]
    done = CliRunner().invoke(cli, [*command, *options, "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["encoded"] == 5
    done = CliRunner().invoke(cli, [*command, *options[:2]])
    assert done.exit_code == 4
    assert "prompts (both sides')" in done.stderr
    done = CliRunner().invoke(cli, [*command, *options[2:]])
    assert (done.exit_code, "--prompt is for a model, --encode a:model is a function" in done.stderr) == (2, True)
