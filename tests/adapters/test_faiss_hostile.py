"""FAISS: files that lie about sizes, point elsewhere, or lead a search out of memory."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from vecferry import store
from vecferry.batch import concat
from vecferry.errors import DataError, UnsupportedError
from vecferry_adapters import _faiss_file, _faiss_probe
from vecferry_adapters._faiss_layout import measure

faiss = pytest.importorskip("faiss")

D, N = 8, 120
X = np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)

KNOWN = ["Flat", "IDMap2,Flat", "SQ8", "SQfp16", "PQ4x4", "PQ4x4fs", "LSHrt", "RaBitQ", "HNSW4,Flat", "HNSW4,SQ8"]
KNOWN += ["HNSW4,PQ4x4", "NSG4,Flat", "IVF4,Flat", "IVF4,SQ8", "IVF4,PQ4x4", "IVF4,PQ4x4fs", "IVF4,RaBitQ", "PCA4,Flat"]
KNOWN += ["OPQ4,PQ4x4", "RR,IVF4,Flat", "L2norm,Flat", "Pad10,Flat", "IVF4,PQ4x4,RFlat", "IVF4_HNSW4,Flat", "ITQ8,SQ8"]
"""Types of which our own parser vouches for every size."""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let FAISS work on one thread, here and in other processes: on more it waits for them longer than it works."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(before)


def saved(factory: str, path: Path) -> bytes:
    """Write an index of X; return its bytes."""
    index = faiss.index_factory(D, factory)
    index.train(np.random.default_rng(1).standard_normal((300, D)).astype(np.float32))
    index.add_with_ids(X, np.arange(N)[::-1].copy()) if "IDMap" in factory else index.add(X)
    faiss.write_index(index, str(path))
    return path.read_bytes()


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise AssertionError(f"{path} was read in a child process")

    monkeypatch.setattr(_faiss_file, "probe", fail)


@pytest.mark.usefixtures("no_child")
@pytest.mark.parametrize("factory", KNOWN)
def test_our_own_parser_vouches_for_usual_types(factory: str, tmp_path: Path) -> None:
    good = saved(factory, tmp_path / "a")
    measured = measure(np.frombuffer(good, np.uint8), 0, "here")
    assert measured is not None
    assert measured.end == len(good)
    if "ITQ" not in factory:
        with store.open_reader(f"faiss:{tmp_path / 'a'}") as reader:
            assert reader.info.count == N


LIE = """if True:
    import resource, struct, sys
    from pathlib import Path
    from vecferry.errors import DataError, UnsupportedError
    from vecferry_adapters import _faiss_file
    from vecferry_adapters._faiss_walk import walk
    def never(path):
        raise UnsupportedError(f"{path} would be read in a child")
    _faiss_file.probe = never
    step = int(sys.argv[1])
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
    lies = [struct.pack("<Q", v) for v in (0, 1, 2**31 - 1, 2**32, 2**40, 2**61 + 1, 2**63, 2**64 - 1)]
    lies += [struct.pack("<i", v) for v in (-1, 0, 1, 2**24, 2**31 - 1)]
    for path in map(Path, sys.argv[2:]):
        good = path.read_bytes()
        places = [*range(4, min(len(good), 700)), *range(max(700, len(good) - 300), len(good))][::step]
        read = refused = 0
        for place in places:
            for lie in lies:
                bad = bytearray(good)
                bad[place : place + len(lie)] = lie
                if bad == good or len(bad) > len(good):
                    continue
                path.write_bytes(bad)
                try:
                    opened = _faiss_file.open_index(path)
                    rows = walk(opened.index, str(path))
                    for start in range(0, min(rows.count, 4096), 50):
                        rows.vectors(slice(start, min(start + 50, rows.count)))
                    read += 1
                except (DataError, UnsupportedError) as error:
                    assert str(path) in str(error), error
                    refused += 1
                except RuntimeError as error:
                    assert "Error in" in str(error), error  # while decoding: the reader makes a DataError of it
                    refused += 1
        print(read, refused, flush=True)
"""


def lie(types: list[str], folder: Path, step: int) -> list[tuple[int, int]]:
    """Put wrong numbers at places of files; return how often each was read all the same, and how often refused."""
    for number, factory in enumerate(types):
        saved(factory, folder / str(number))
    command = [sys.executable, "-c", LIE, str(step), *(str(folder / str(number)) for number in range(len(types)))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    counts = done.stdout.splitlines()
    assert done.returncode == 0, f"{done.returncode} after {len(counts)} of {types}: {done.stderr[-2000:]}"
    return [(int(read), int(refused)) for read, refused in map(str.split, counts)]


def test_wrong_numbers_never_end_the_process(tmp_path: Path) -> None:
    for read, refused in lie(KNOWN, tmp_path, 61):
        assert read + refused > 60
        assert refused > read / 50


@pytest.mark.slow
@pytest.mark.parametrize("factory", KNOWN)
def test_many_wrong_numbers_never_end_the_process(factory: str, tmp_path: Path) -> None:
    lie([factory], tmp_path, 7)


def patched(path: Path, good: bytes, old: bytes, new: bytes) -> str:
    """Write a file in which one value, which stands there once, is another."""
    assert good.count(old) == 1
    path.write_bytes(good.replace(old, new))
    return f"faiss:{path}"


@pytest.mark.usefixtures("no_child")
def test_errors_name_the_file_and_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a"
    good = saved("IVF4,SQ8", path)
    uri = patched(path, good, b"ilar" + struct.pack("<QQ", 4, 8), b"ilar" + struct.pack("<QQ", 2**40, 8))
    with pytest.raises(DataError, match=rf"{path} is damaged.*number of inverted lists is {2**40}, 4 would fit"):
        store.open_reader(uri)
    good = saved("Flat", path)
    uri = patched(path, good, struct.pack("<Q", N * D), struct.pack("<Q", 2**62 + N * D))  # times 4 it overflows
    with pytest.raises(DataError, match=rf"{path} is damaged.*{4 * (2**62 + N * D)}, {4 * N * D} would fit"):
        store.open_reader(uri)
    path.write_bytes(good + b"junk")
    with pytest.raises(DataError, match=f"ends after {len(good)} bytes, the file has {len(good) + 4}"):
        store.open_reader(uri)


def test_indexes_in_indexes_without_end(tmp_path: Path) -> None:
    index = faiss.index_factory(D, "Flat")
    index.add(X)
    layers = []
    for _ in range(60):
        layers.append(index)
        index = faiss.IndexPreTransform(index)
    faiss.write_index(index, str(tmp_path / "a"))
    with pytest.raises(DataError, match="depth of indexes"):
        store.open_reader(f"faiss:{tmp_path / 'a'}")


@pytest.mark.usefixtures("no_child")
def test_a_graph_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    graph = faiss.index_factory(D, "HNSW4,Flat")
    graph.add(X)
    links = faiss.vector_to_array(graph.hnsw.neighbors)
    levels, starts = (faiss.vector_to_array(getattr(graph.hnsw, name)) for name in ("levels", "offsets"))
    low, high = int(np.flatnonzero(levels == 1)[0]), int(np.flatnonzero(levels > 1)[0])
    above = int(starts[high]) + graph.hnsw.cum_nneighbor_per_level.at(1)
    for place, to, fault in [(0, N, "exist|range"), (5, -7, "exist|range"), (above, low, "aren't in level 1")]:
        wrong = links.copy()
        wrong[place] = to
        faiss.copy_array_to_vector(wrong, graph.hnsw.neighbors)
        faiss.write_index(graph, str(tmp_path / "a"))
        with pytest.raises(DataError, match=fault):
            store.open_reader(f"faiss:{tmp_path / 'a'}")
        with pytest.raises(DataError, match=fault):
            store.open_reader(graph)


@pytest.mark.usefixtures("no_child")
@pytest.mark.parametrize(
    "factory", ["IVF4,PQ4x4,RFlat", "PCA8,IDMap,IVF4,Flat", "IDMap,IVF4,Flat", "IDMap2,RR,IVF4,Flat"]
)
def test_labels_of_no_row_are_refused(factory: str, tmp_path: Path) -> None:
    """FAISS would compute an address from such a label while it searches."""
    index = faiss.index_factory(D, factory)
    index.train(np.random.default_rng(1).standard_normal((300, D)).astype(np.float32))
    index.add_with_ids(X, np.arange(N) + 5) if "IDMap" in factory else index.add(X)
    inner = index.base_index if "RFlat" in factory else index.index
    lists = faiss.extract_index_ivf(inner).invlists
    faiss.rev_swig_ptr(lists.get_ids(0), lists.list_size(0))[0] = N
    faiss.write_index(index, str(tmp_path / "a"))
    with pytest.raises(DataError, match=r"labels that are no rows|beyond its 120 ids"):
        store.open_reader(f"faiss:{tmp_path / 'a'}")


@pytest.mark.usefixtures("no_child")
def test_a_remapping_to_no_dimension_is_refused(tmp_path: Path) -> None:
    """FAISS would write beyond a vector's end while it undoes it."""
    good = saved("Pad10,Flat", tmp_path / "a")
    table = struct.pack("<10i", *range(8), -1, -1)
    for wrong in (8, 2**30, -2):
        uri = patched(tmp_path / "a", good, table, struct.pack("<10i", *range(7), wrong, -1, -1))
        with pytest.raises(DataError, match="remapped dimensions that don't exist is 1, 0 would fit"):
            store.open_reader(uri)


@pytest.mark.usefixtures("no_child")
def test_parameters_that_would_fill_all_memory_are_refused(tmp_path: Path) -> None:
    index = faiss.index_factory(D, "SQ8,RFlat")
    index.train(X)
    index.add(X)
    for factor in (0.0, float("nan"), float("inf"), 1e30):
        index.k_factor = factor
        faiss.write_index(index, str(tmp_path / "a"))
        with pytest.raises(DataError, match=r"k_factor|factors of refinement"):
            store.open_reader(f"faiss:{tmp_path / 'a'}")
    for factory, change in [
        ("HNSW4,Flat", lambda i: setattr(i.hnsw, "efSearch", 2**30)),
        ("NSG4,Flat", lambda i: setattr(i.nsg, "search_L", 2**30)),
    ]:
        index = faiss.index_factory(D, factory)
        index.add(X)
        change(index)
        faiss.write_index(index, str(tmp_path / "a"))
        with pytest.raises(DataError, match=r"keeps? in mind"):
            store.open_reader(f"faiss:{tmp_path / 'a'}")


def test_an_index_that_faiss_will_not_search_says_so(tmp_path: Path) -> None:
    index = faiss.index_factory(D, "PQ4x4")
    index.train(np.random.default_rng(1).standard_normal((300, D)).astype(np.float32))
    index.add(X)
    index.search_type = faiss.IndexPQ.ST_polysemous  # which needs codes of whole 8 bytes
    faiss.write_index(index, str(tmp_path / "a"))
    with (
        store.open_reader(f"faiss:{tmp_path / 'a'}") as reader,
        pytest.raises(UnsupportedError, match="can't search this IndexPQ"),
    ):
        reader.search(X[:2], 3)


# Lists in another file


def on_disk(folder: Path, name: str = "lists") -> tuple[Path, pa.Array, bytes]:
    """Write an index with its lists in a file beside it; return its path, its ids, and its bytes."""
    folder.mkdir(exist_ok=True)
    index = faiss.index_factory(D, "IVF4,Flat")
    index.train(X)
    index.add(X)
    lists = faiss.OnDiskInvertedLists(4, index.code_size, str(folder / name))
    for number in range(4):
        size = index.invlists.list_size(number)
        lists.add_entries(number, size, index.invlists.get_ids(number), index.invlists.get_codes(number))
    index.replace_invlists(lists)
    path = folder / "index"
    faiss.write_index(index, str(path))
    with store.open_reader(f"faiss:{path}") as reader:
        return path, concat(reader.read(50)).ids, path.read_bytes()


def renamed(good: bytes, old: Path, new: str) -> bytes:
    """Write another file's name into an index."""
    before = struct.pack("<Q", len(str(old))) + str(old).encode()
    assert good.count(before) == 1
    return good.replace(before, struct.pack("<Q", len(new)) + new.encode())


def test_lists_are_taken_from_beside_the_index_only(tmp_path: Path) -> None:
    path, ids, good = on_disk(tmp_path / "here")
    (tmp_path / "secret").mkdir()
    secret = tmp_path / "secret" / "else"
    (tmp_path / "here" / "lists").rename(secret)
    for name in (str(secret), "../secret/else", f"{path.parent}/../secret/else"):
        path.write_bytes(renamed(good, tmp_path / "here" / "lists", name))
        with pytest.raises(DataError, match=r"in another file, .*secret/else.*beside the index; it is looked"):
            store.open_reader(f"faiss:{path}")
    (path.parent / "else").symlink_to(secret)  # whoever owns the folder may say so
    with store.open_reader(f"faiss:{path}") as reader:
        assert concat(reader.read(50)).ids.equals(ids)


def test_lists_that_are_too_short_or_no_file_are_refused(tmp_path: Path) -> None:
    path, _, good = on_disk(tmp_path / "here")
    lists = tmp_path / "here" / "lists"
    size = lists.stat().st_size
    os.truncate(lists, size // 2)  # a map beyond its file's end ends the process when it is read
    with pytest.raises(DataError, match=f"lists was cut short: {size // 2} bytes, {size} are needed"):
        store.open_reader(f"faiss:{path}")
    lists.unlink()
    os.mkfifo(lists)  # opening it would wait for a writer for ever
    with pytest.raises(DataError, match="there is no"):
        store.open_reader(f"faiss:{path}")
    for name in ("/dev/zero", "/", "..", "", "a\0b"):
        path.write_bytes(renamed(good, lists, name))
        with pytest.raises(DataError):
            store.open_reader(f"faiss:{path}")


def test_a_list_beyond_the_end_of_its_file_is_refused(tmp_path: Path) -> None:
    path, _, good = on_disk(tmp_path / "here")
    total = (tmp_path / "here" / "lists").stat().st_size
    at = good.index(b"ilod") + 4 + 16 + 8 + 16  # the table: size, capacity, offset of the first list
    path.write_bytes(good[:at] + struct.pack("<Q", total - 8) + good[at + 8 :])
    with pytest.raises(DataError, match=rf"end of a list.*not from 0 to {total}"):
        store.open_reader(f"faiss:{path}")


# The child process


def exotic(path: Path) -> Path:
    """Write an index of a type whose layout only FAISS knows."""
    saved("RQ2x4", path)
    return path


def children() -> int:
    return len(Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split())


def test_other_types_are_read_in_a_child_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed, real = [], _faiss_probe.probe
    monkeypatch.setattr(_faiss_file, "probe", lambda path: (probed.append(path), real(path)))
    path = exotic(tmp_path / "a")
    before, began = children(), time.monotonic()
    with store.open_reader(f"faiss:{path}") as reader:
        assert reader.info.count == N
    assert probed == [path]
    assert children() == before
    assert time.monotonic() - began < 20
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_damage_of_other_types_is_reported_by_the_child(tmp_path: Path) -> None:
    path = exotic(tmp_path / "a")
    good = path.read_bytes()
    path.write_bytes(good[:-9])
    with pytest.raises(DataError, match=f"{path} "):
        store.open_reader(f"faiss:{path}")
    path.write_bytes(good + b"x")
    with pytest.raises(DataError, match=f"ends after {len(good)} bytes"):
        store.open_reader(f"faiss:{path}")


OTHERS = [
    "RQ2x4",
    "LSQ2x4",
    "PRQ2x2x4",
    "RaBitQ4",
    "EDEN4",
    "Residual4,PQ4x4",
    "IVF4,RQ2x4",
    "IMI2x2,Flat",
    "HNSW4,RaBitQ",
]


@pytest.mark.slow
@pytest.mark.parametrize("factory", OTHERS)
def test_damage_of_other_types_never_ends_the_process(factory: str, tmp_path: Path) -> None:
    code = """if True:
        import sys
        import numpy as np
        from vecferry import store
        from vecferry.errors import VecferryError
        path = sys.argv[1]
        good, rng = open(path, "rb").read(), np.random.default_rng(0)
        for _ in range(20):
            bad = bytearray(good)
            for _ in range(rng.integers(1, 4)):
                bad[rng.integers(4, min(len(good), 600))] = rng.choice([0, 1, 127, 128, 255, rng.integers(256)])
            open(path, "wb").write(bad)
            try:
                with store.open_reader("faiss:" + path) as reader:
                    for _ in reader.read(17):
                        pass
            except VecferryError:
                pass
    """
    saved(factory, tmp_path / "a")
    command = [sys.executable, "-c", code, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_threads_may_read_in_children(tmp_path: Path) -> None:
    path, failures = exotic(tmp_path / "a"), []

    def work() -> None:
        try:
            with store.open_reader(f"faiss:{path}") as reader:
                assert reader.info.count == N
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def stand_in(folder: Path, body: str) -> str:
    """Make a program that stands in for Python in the child."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("kill -SEGV $$", "ended by SIGSEGV"),
        ("echo terminate called >&2; kill -ABRT $$", "ended by SIGABRT: terminate called"),
        ("echo no JSON; exit 9", "ended with exit code 9"),
        ("exec sleep 30", "didn't finish reading it in 1 seconds"),
    ],
)
def test_a_child_that_does_not_survive_is_an_error(
    body: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = exotic(tmp_path / "a")
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path, body))
    monkeypatch.setattr(_faiss_probe, "SECONDS", 1)
    before = children()
    with pytest.raises(DataError, match=rf"{path} is damaged: .*{fault}"):
        store.open_reader(f"faiss:{path}")
    assert children() == before


def test_a_child_has_little_memory_and_ends_with_its_parent() -> None:
    code = """if True:
        import os, resource, sys
        from vecferry_adapters import _faiss_probe
        _faiss_probe._die_with(os.getppid())
        _faiss_probe._limit_memory(1000)
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
        bytearray(900 << 20)
        try:
            bytearray(1100 << 20)
        except MemoryError:
            print("refused", flush=True)
        sys.stdin.read()
    """
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"refused\n"
        process.kill()
        assert process.stdout.read() == b""  # the end of it comes when nobody can write any more: the child is gone


def test_a_hostile_folder_is_not_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faiss.py").write_text("raise SystemExit('imported')")
    (tmp_path / "numpy.py").write_text("raise SystemExit('imported')")
    path = exotic(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    with store.open_reader(f"faiss:{path}") as reader:
        assert reader.info.count == N
