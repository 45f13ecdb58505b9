"""Files that somebody made to do harm: nothing in them runs, touches what is outside, or fills memory or stack."""

from __future__ import annotations

import ast
import hashlib
import json
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from vecferry import store
from vecferry.batch import concat
from vecferry.cli import cli
from vecferry.errors import DataError
from vecferry.jsonfile import DEPTH, MOST, parse_json, read_json, typed
from vecferry.linear import Card, LinearMap, Side
from vecferry.mapfile import CARD, HEADER, TENSORS
from vecferry.report import Report

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "migrate").rglob("*.py"), *(ROOT / "adapters").rglob("*.py")])
RUNS_CODE = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "jsonpickle"}
LOADERS = {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_no_source_can_run_what_a_file_says(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name.split(".")[0] for alias in node.names} | {
                (getattr(node, "module", "") or "").split(".")[0]
            }
            assert not names & RUNS_CODE, f"{path.name}:{node.lineno}"
        if not isinstance(node, ast.Call):
            continue
        given_ = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
        called = ast.unparse(node.func)
        assert called not in LOADERS, f"{path.name}:{node.lineno} calls {called}"
        assert called not in ("os.system", "os.popen", "pd.read_pickle"), f"{path.name}:{node.lineno}"
        assert given_.get("shell") in (None, False), f"{path.name}:{node.lineno}"
        assert given_.get("allow_pickle") in (None, False), f"{path.name}:{node.lineno}"
        if called in ("np.load", "numpy.load", "np.fromregex"):
            assert given_.get("allow_pickle") is False, f"{path.name}:{node.lineno}"
        if called == "torch.load":
            assert given_.get("weights_only") is True, f"{path.name}:{node.lineno}"


class Trap:
    """Leave a trace when unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    return result.exit_code, result.stderr


def test_no_pickle_is_loaded_from_what_is_called_npy(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    (tmp_path / "renamed.npy").write_bytes(pickle.dumps(Trap(trace)))
    np.save(tmp_path / "objects.npy", np.array([[Trap(trace), 1.0]], object), allow_pickle=True)
    np.savez(tmp_path / "archive.npz", a=np.array([Trap(trace)], object))
    np.save(tmp_path / "vectors.npy", np.ones((1, 2), np.float32))
    for uri in ("npy:{}/renamed.npy", "{}/objects.npy", "{}/archive.npz", "npy:{0}/vectors.npy?ids={0}/objects.npy"):
        code, err = run("inspect", uri.format(tmp_path))
        assert code in (2, 3), err
        assert len(err.splitlines()) == 1
    assert not trace.exists()
    with pytest.raises(ValueError, match=r"unpickled|object|allow_pickle"):  # the trap is set: numpy would step into it
        np.load(tmp_path / "objects.npy", allow_pickle=False)
    np.load(tmp_path / "objects.npy", allow_pickle=True)
    assert trace.exists()


def a_map(folder: Path) -> Path:
    weight = np.random.default_rng(0).standard_normal((5, 3), dtype=np.float32)
    return LinearMap(weight, card=Card(Side(5, "old"), Side(3, "new"), "by hand")).save(folder)


def forge(folder: Path, header: bytes | None, length: int | None = None, body: bytes | None = None) -> None:
    """Put another header into the tensors, or another length of it, and their new hash into the card."""
    data = (folder / TENSORS).read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + n] if header is None else header
    length = len(header) if length is None else length
    data = length.to_bytes(8, "little") + header + (data[8 + n :] if body is None else body)
    (folder / TENSORS).write_bytes(data)
    card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    card["sha256"] = hashlib.sha256(data).hexdigest()
    (folder / CARD).write_text(json.dumps(card), encoding="utf-8")


def shape(*dims: int) -> bytes:
    return json.dumps({"weight": {"dtype": "F32", "shape": dims, "data_offsets": [0, 60]}}).encode()


DEEP = b'{"a":' * 50_000 + b"1" + b"}" * 50_000
FORGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a header of 2**63 bytes": (lambda f: forge(f, None, 2**63), "a header of 9,223,372,036,854,775,808"),
    "a header beyond the file": (lambda f: forge(f, None, 5000), "a header of 5,000"),
    "a header beyond the bound": (lambda f: forge(f, b" " * (HEADER + 1)), "a map 5 -> 3 has at most"),
    "a deep header": (lambda f: forge(f, DEEP), "nested deeper than 32"),
    "a header that is no JSON": (lambda f: forge(f, pickle.dumps(1)), "can't be read as a map"),
    "a key twice": (lambda f: forge(f, shape(5, 3)[:-1] + b',"weight":1}'), "a key occurs twice"),
    "a negative dimension": (lambda f: forge(f, shape(-5, -3)), "can't be read as a map"),
    "dimensions that overflow": (lambda f: forge(f, shape(2**62, 4)), "can't be read as a map"),
    "more bytes than dimensions": (lambda f: forge(f, None, body=bytes(2 * HEADER)), "at most"),
    "doubles": (
        lambda f: forge(f, shape(5, 3).replace(b"F32", b"F64"), body=bytes(120)),
        "can't be read as a map|float32",
    ),
    "a file without bytes": (lambda f: (f / TENSORS).write_bytes(b"") and None, "damaged or swapped"),
}


@pytest.mark.parametrize("fault", FORGED)
def test_forged_tensors_are_refused(fault: str, tmp_path: Path) -> None:
    damage, message = FORGED[fault]
    folder = a_map(tmp_path / "map")
    damage(folder)
    with pytest.raises(DataError, match=message):
        LinearMap.load(folder)
    code, err = run("inspect", folder)
    assert (code, len(err.splitlines())) == (3, 1)


BAD_JSON = {
    "deep lists": (b'{"a": ' + b"[" * 100_000, f"nested deeper than {DEPTH}"),
    "deep objects": (DEEP, f"nested deeper than {DEPTH}"),
    "a string without an end": (b'{"a": "' + b'\\"' * 500_000, "Unterminated string"),
    "a long number": (b'{"a": ' + b"9" * 100_000 + b"}", "beyond 64 bits"),
    "a number of 65 bits": (b'{"a": 18446744073709551616}', "beyond 64 bits"),
    "infinity": (b'{"a": 1e999}', "not a finite number"),
    "NaN": (b'{"a": NaN}', "not a finite number"),
    "minus infinity": (b'{"a": -Infinity}', "not a finite number"),
    "a key twice": (b'{"a": 1, "b": 2, "a": 3}', "a key occurs twice among a, a, b"),
    "half a surrogate pair": (b'{"a": "\\ud800"}', "surrogates not allowed"),
    "a list": (b"[1]", "no JSON object"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "can't decode"),
    "nothing": (b"", "Expecting value"),
}


@pytest.mark.parametrize("fault", BAD_JSON)
def test_json_is_bounded_before_it_is_parsed(fault: str, tmp_path: Path) -> None:
    data, message = BAD_JSON[fault]
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"x\.json is damaged: .*{message}"):
        read_json(path)
    with pytest.raises(DataError, match=r"x\.json"):
        Report.load(path)


def test_a_large_json_file_is_not_even_read(tmp_path: Path) -> None:
    with (tmp_path / "x.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(DataError, match=f"more than {MOST:,} bytes"):
        read_json(tmp_path / "x.json")


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), values, max_size=4), st.booleans())
def test_whatever_is_sound_is_parsed_as_json_does(value: dict[str, Any], ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse_json(text.encode()) == json.loads(text)


def test_the_deepest_value_that_is_parsed() -> None:
    inside = "[" * (DEPTH - 1) + "]" * (DEPTH - 1)
    assert parse_json(f'{{"a": {inside}, "b": "{"[" * 99}"}}'.encode())["b"] == "[" * 99
    with pytest.raises(ValueError, match="deeper"):
        parse_json(f'{{"a": [{inside}]}}'.encode())


@dataclass(frozen=True)
class Inner:
    n: int
    name: str | None = None


@dataclass(frozen=True)
class Outer:
    rows: tuple[Inner, ...]
    by: dict[str, float]
    kind: Literal["a", "b"] = "a"


class Loose(TypedDict):
    count: int
    space: NotRequired[str | None]


def test_values_become_what_is_annotated() -> None:
    made = typed(Outer, {"rows": [{"n": 1}, {"n": 2, "name": "x"}], "by": {"y": 1}}, "it")
    assert made == Outer((Inner(1), Inner(2, "x")), {"y": 1})
    assert typed(Loose, {"count": 1, "more": [1]}, "it") == {"count": 1, "more": [1]}
    for kind, value, message in [
        (Outer, {"by": {}}, "in it, rows is missing"),
        (Outer, {"rows": [], "by": {}, "z": 1}, "in it, z is unknown"),
        (Outer, {"rows": [{"n": "1"}], "by": {}}, r"it\.rows\[0\]\.n is '1', not int"),
        (Outer, {"rows": [{"n": True}], "by": {}}, r"it\.rows\[0\]\.n is 'True', not int"),
        (Outer, {"rows": [{"n": 1.0}], "by": {}}, "not int"),
        (Outer, {"rows": [{"n": 1, "name": 3}], "by": {}}, r"name is '3', not str"),
        (Outer, {"rows": {}, "by": {}}, "it.rows is '{}', not tuple"),
        (Outer, {"rows": [], "by": {"x": "1"}}, r"it\.by\.x is '1', not float"),
        (Outer, {"rows": [], "by": [], "kind": "a"}, "it.by is .*, not dict"),
        (Outer, {"rows": [], "by": {}, "kind": "c"}, "it.kind is 'c', not one of a, b"),
        (Outer, [], "it is '\\[\\]', not Outer"),
        (Loose, {"space": "x"}, "count is missing"),
        (Loose, {"count": 1, "space": 1}, "space is '1', not str"),
        (Loose, None, "it is 'None', not Loose"),
    ]:
        with pytest.raises(ValueError, match=message):
            typed(kind, value, "it")


def test_no_name_in_a_card_or_manifest_is_a_path(tmp_path: Path) -> None:
    """Names that would lead out of the folder are only shown; nothing appears or is opened outside of it."""
    names = "../../outside"
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    card = Card(Side(2, names), Side(2, names), names, version=names)
    LinearMap(np.eye(2), card=card).save(inside / "map")
    np.save(inside / "x.npy", np.eye(2, dtype=np.float32))
    assert run("migrate", inside / "x.npy", inside / "new.parquet", "--map", inside / "map")[0] == 0
    path = inside / "new.parquet" / "_vecferry.json"
    held = json.loads(path.read_text(encoding="utf-8"))
    for change in ({"vector": names}, {"id": names}, {"space": names}, {"parts": [names]}, {"files": {names: names}}):
        path.write_text(json.dumps(held | change), encoding="utf-8")
        assert run("inspect", inside / "new.parquet")[0] in (0, 2, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["b"]


def test_no_name_steers_the_terminal(tmp_path: Path) -> None:
    evil = "model\x1b[2J\x07\x9b"
    LinearMap(np.eye(2), card=Card(Side(2, evil), Side(2, evil), "by hand")).save(tmp_path / "map")
    result = CliRunner().invoke(cli, ["inspect", str(tmp_path / "map")])
    assert result.exit_code == 0
    assert "model\ufffd[2J" in result.stdout
    assert not set("\x1b\x07\x9b") & set(result.stdout)
    code, err = run("inspect", tmp_path / "no\x1b[2J\nsuch")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "\x1b" not in err


def invalid(kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, 3, pa.array([b"a", b"\xff\xfe", b"c"], pa.binary()).buffers())


def test_ids_that_are_no_text_are_refused(tmp_path: Path) -> None:
    x = pa.array([[1.0, 2.0]] * 3, pa.list_(pa.float32(), 2))
    for ids in (invalid(pa.string()), invalid(pa.string()).dictionary_encode()):
        pq.write_table(pa.table({"id": ids, "emb": x}), tmp_path / "x.parquet")
        code, err = run("inspect", tmp_path / "x.parquet", "--scan")
        assert (code, len(err.splitlines())) == (3, 1)
        assert "UTF8" in err
    np.save(tmp_path / "vectors.npy", np.ones((2, 2), np.float32))
    np.save(tmp_path / "ids.npy", np.array([0x110000, 0xD800], "<u4").view("<U1"))
    with (
        store.open_reader(f"npy:{tmp_path}") as reader,
        pytest.raises(DataError, match=r"ids\.npy.*no text in Unicode"),
    ):
        concat(reader.read(9))


def test_a_footer_that_lies_about_rows_is_found_out(tmp_path: Path) -> None:
    """The count of rows stands in the footer once for the file and once for each group; the pages hold 300."""
    path = tmp_path / "x.parquet"
    x = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(600, np.float32)), 2)
    pq.write_table(pa.table({"id": np.arange(300), "emb": x}), path)
    sound = path.read_bytes()
    start = len(sound) - 8 - int.from_bytes(sound[-8:-4], "little")
    zigzag = struct.pack("<BB", (600 & 127) | 128, 600 >> 7)
    places = [i for i in range(start, len(sound)) if sound[i : i + 2] == zigzag]
    assert len(places) >= 2
    found = set()
    for several in ([p] for p in places), [places]:
        for chosen in several:
            data = bytearray(sound)
            for place in chosen:
                data[place : place + 2] = struct.pack("<BB", (602 & 127) | 128, 602 >> 7)
            path.write_bytes(data)
            try:
                with store.open_reader(str(path)) as reader:
                    assert len(concat(reader.read(64))) == reader.info.count == 300
            except DataError as error:
                found.add(str(error).partition("damaged")[1])
    assert found == {"damaged"}


def test_a_changed_page_of_ours_is_found_out(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((50, 4), np.float32))
    LinearMap(np.eye(4), card=Card(Side(4), Side(4), "none")).save(tmp_path / "map")
    assert run("migrate", tmp_path / "x.npy", tmp_path / "new.parquet", "--map", tmp_path / "map")[0] == 0
    (part,) = (tmp_path / "new.parquet").glob("part-*.parquet")
    data = bytearray(part.read_bytes())
    at = data.index(np.ones(8, np.float32).tobytes()) + 40
    data[at] ^= 1
    part.write_bytes(data)
    with store.open_reader(f"parquet:{part}") as reader, pytest.raises(DataError, match=r"CRC|checksum"):
        concat(reader.read(64))


def test_a_stage_whose_state_was_edited_is_refused(tmp_path: Path) -> None:
    from vecferry_adapters._staging import Stage

    stage = Stage(tmp_path / "t", "plan", resume=False, overwrite=False)
    stage.save(rows=7)
    stage.close()
    path = tmp_path / ".t.vecferry" / "state.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(state | {"rows": 6}), encoding="utf-8")
    with pytest.raises(DataError, match=r"state\.json is damaged: delete .*vecferry and start again"):
        Stage(tmp_path / "t", "plan", resume=True, overwrite=False)
    path.write_text(json.dumps(state), encoding="utf-8")
    Stage(tmp_path / "t", "plan", resume=True, overwrite=False).close()


def test_a_shortened_stage_is_refused(tmp_path: Path) -> None:
    """A state that speaks of more rows than the files hold: zeros would stand in for them."""
    from vecferry.batch import VectorBatch
    from vecferry.testing import cut
    from vecferry.testing.rows import sample_ids
    from vecferry_adapters import _numpy_writer

    rows = VectorBatch(sample_ids(40, pa.int64()), np.ones((40, 2), np.float32))
    info = store.StoreInfo("npy", "t", 40, 2, id_type=pa.int64(), provenance={"plan": "p"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_numpy_writer, "SYNC_BYTES", 1)
        with store.open_writer(f"npy:{tmp_path / 't.npy'}", info) as writer:
            for batch in cut(rows.take(np.arange(30)), 10):
                writer.write(batch)
    (vectors,) = tmp_path.rglob("vectors.npy")
    with vectors.open("r+b") as file:
        file.truncate(vectors.stat().st_size - 8)
    with pytest.raises(DataError, match=r"vectors\.npy has .* bytes, .* are on record"):
        store.open_writer(f"npy:{tmp_path / 't.npy'}", info, resume=True)


def test_loading_a_map_imports_no_pickle_reader() -> None:
    """A process that loads a map and applies it never gets as far as unpickling anything."""
    check = (
        "import pickle, sys\n"
        "def refuse(*a, **k): raise SystemExit('unpickled')\n"
        "pickle.load = pickle.loads = pickle.Unpickler = refuse\n"
        "import numpy as np, vecferry\n"
        "from vecferry.linear import LinearMap\n"
        f"print(LinearMap.load({str(ROOT / 'tests' / 'data' / 'map-v1')!r}).card.source.dim)\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
