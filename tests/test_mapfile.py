"""The map folder: round trips, a frozen folder of version 1, what is refused, and what loading needs."""

import dataclasses
import hashlib
import json
import pickle
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import load_file, save

from vecferry.errors import DataError, UsageError
from vecferry.holdout import Holdout, Qrels, holdout_of
from vecferry.linear import Card, LinearMap, Side
from vecferry.mapfile import CARD, HOLDOUT, TENSORS, seal

FROZEN = Path(__file__).parent / "data" / "map-v1"
SHA256 = hashlib.sha256((FROZEN / TENSORS).read_bytes()).hexdigest()


def frozen_map() -> LinearMap:
    """Return the map that `data/map-v1` holds, from numbers that any float holds exactly."""
    i, j = np.indices((6, 4), np.float32)
    documents = np.arange(5)[:, None]
    return LinearMap(
        weight=((3 * i + 5 * j) % 7 - 3) / 4,
        bias=np.arange(4, dtype=np.float32) / 8 - 0.25,
        pre="center_l2",
        post="l2",
        mean=np.arange(6, dtype=np.float32) / 16,
        card=Card(
            source=Side(6, "old-model", "passage: "),
            target=Side(4, "new-model"),
            solver="ridge",
            parameters={"lambda": 0.5, "loo_rows": 40},
            metric="cosine",
            pairs=40,
            seed=7,
            measured={"mean_cosine": 0.75},
            warnings=("pairs ≠ corpus",),
            version="0.1.0",
        ),
        holdout=Holdout(
            ids=pa.array(["a", "b", "ç", "d", ""]),
            source=(documents + np.arange(6)).astype(np.float32) / 4,
            target=(documents - np.arange(4)).astype(np.float32) / 2,
            query_ids=pa.array(["q1", "q2"]),
            queries=np.eye(2, 4, dtype=np.float32),
            source_queries=np.eye(2, 6, dtype=np.float32),
            qrels=Qrels(np.array([0, 1, 1]), np.array([4, 0, 2]), np.array([1, 3, 1])),
            fit_keys=np.array([1, 2**64 - 1], np.uint64),
            fingerprint={"uri": "parquet:old.parquet", "count": 45},
        ),
    )


def assert_same(a: LinearMap, b: LinearMap) -> None:
    for name in ("weight", "bias", "mean"):
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None)
        assert left is None or left.tobytes() == right.tobytes()
    assert (a.pre, a.post) == (b.pre, b.post)
    assert seal(a).card == seal(b).card
    x = np.random.default_rng(0).standard_normal((9, a.d_in), dtype=np.float32)
    assert a.apply(x).tobytes() == b.apply(x).tobytes()


def assert_same_holdout(a: Holdout, b: Holdout) -> None:
    assert a.ids.equals(b.ids)
    assert a.query_ids.equals(b.query_ids)
    for held in (a, b):  # the sha256 of the map is added when a map is saved
        assert held.fingerprint.get("map") in (None, SHA256)
    left, right = ({k: v for k, v in held.fingerprint.items() if k != "map"} for held in (a, b))
    assert left == right
    for name in ("source", "target", "queries", "source_queries", "fit_keys"):
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None), name
        assert left is None or (left.dtype == right.dtype and (left == right).all()), name
    assert (a.qrels is None) == (b.qrels is None)
    if a.qrels is not None and b.qrels is not None:
        for name in ("query", "document", "grade"):
            assert getattr(a.qrels, name).tolist() == getattr(b.qrels, name).tolist()


def simple_map(**fields: Any) -> LinearMap:
    rng = np.random.default_rng(1)
    whole = {"weight": rng.standard_normal((5, 3)), "card": Card(Side(5), Side(3), "pinv")} | fields
    return LinearMap(**whole)


def test_the_frozen_map_of_version_1_still_loads() -> None:
    m, expected = LinearMap.load(FROZEN), frozen_map()
    assert_same(m, expected)
    assert m.path == FROZEN
    assert m.card is not None
    assert m.card.space == "new-model"
    assert expected.holdout is not None
    assert_same_holdout(holdout_of(m), expected.holdout)
    # and maps as the formula says, computed here from the numbers above
    x = np.array([[1, 2, 3, 4, 5, 6], [0, 0, 1, 0, 0, 0]], np.float64)
    rows = x - np.arange(6) / 16
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    i, j = np.indices((6, 4))
    y = rows @ (((3 * i + 5 * j) % 7 - 3) / 4) + np.arange(4) / 8 - 0.25
    assert m.apply(x.astype(np.float32)) == pytest.approx(y / np.linalg.norm(y, axis=1, keepdims=True), abs=1e-6)


def test_what_is_written_today_is_version_1_byte_for_byte(tmp_path: Path) -> None:
    frozen_map().save(tmp_path / "map")
    for name in (TENSORS, CARD):  # the hold-out's bytes are the affair of pyarrow, the page is for people
        assert (tmp_path / "map" / name).read_bytes() == (FROZEN / name).read_bytes(), name


@pytest.mark.parametrize("pre", ["none", "l2", "center_l2"])
@pytest.mark.parametrize("post", ["none", "l2"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_map_comes_back_bit_for_bit(tmp_path: Path, pre: str, post: str, biased: bool) -> None:
    rng = np.random.default_rng(0)
    m = simple_map(
        bias=rng.standard_normal(3) if biased else None,
        pre=pre,
        post=post,
        mean=rng.standard_normal(5) if pre == "center_l2" else None,
    )
    assert m.save(tmp_path / "deep" / "map") == tmp_path / "deep" / "map"
    back = LinearMap.load(str(tmp_path / "deep" / "map"))
    assert_same(back, m)
    assert back.holdout is None
    with pytest.raises(UsageError, match="has no hold-out"):
        holdout_of(back)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["map"]  # and no stage is left


def test_saving_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    folders = [frozen_map().save(tmp_path / name) for name in ("one", "two")]
    contents = [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders]
    assert contents[0] == contents[1]
    assert sorted(contents[0]) == ["README.md", CARD, HOLDOUT, TENSORS]


def test_a_transposed_weight_is_stored_as_it_is(tmp_path: Path) -> None:
    weight = np.arange(15, dtype=np.float32).reshape(3, 5).T
    assert not weight.flags.c_contiguous
    simple_map(weight=weight).save(tmp_path / "map")
    assert LinearMap.load(tmp_path / "map").weight.tolist() == weight.tolist()
    assert load_file(tmp_path / "map" / TENSORS)["weight"].tolist() == weight.tolist()


def test_a_loaded_map_saved_elsewhere_takes_its_holdout_along(tmp_path: Path) -> None:
    copy = LinearMap.load(LinearMap.load(FROZEN).save(tmp_path / "copy"))
    expected = frozen_map().holdout
    assert expected is not None
    assert_same_holdout(holdout_of(copy), expected)


def test_the_holdout_of_another_map_is_refused(tmp_path: Path) -> None:
    """It may hold what this map was fitted on (field case p6); equal shapes and ids are no proof."""
    m = frozen_map()
    m.save(tmp_path / "map")
    dataclasses.replace(m, weight=m.weight + 1).save(tmp_path / "other")
    shutil.copy(tmp_path / "other" / HOLDOUT, tmp_path / "map" / HOLDOUT)
    with pytest.raises(DataError, match="was held out of another map"):
        holdout_of(LinearMap.load(tmp_path / "map"))


def test_the_card_identifies_the_space(tmp_path: Path) -> None:
    m = LinearMap.load(simple_map().save(tmp_path / "map"))
    assert m.card is not None
    assert m.card.sha256 == hashlib.sha256((tmp_path / "map" / TENSORS).read_bytes()).hexdigest()
    assert m.card.space == f"unnamed-{m.card.sha256[:16]}"
    prompted = dataclasses.replace(m.card, target=Side(3, "new", "query: "))
    assert prompted.space == "new [query: ]"


def test_an_existing_target_is_refused(tmp_path: Path) -> None:
    simple_map().save(tmp_path / "map")
    with pytest.raises(UsageError, match="map exists: choose another name"):
        simple_map().save(tmp_path / "map")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="file exists"):
        simple_map().save(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_map_without_a_fitting_card_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="without a card"):
        simple_map(card=None).save(tmp_path / "map")
    with pytest.raises(UsageError, match="leads 5 -> 3, its card says 5 -> 4"):
        simple_map(card=Card(Side(5), Side(4), "pinv")).save(tmp_path / "map")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    unspeakable = Card(Side(5), Side(3), "pinv", parameters={"grid": object()})
    with pytest.raises(TypeError):
        simple_map(card=unspeakable).save(tmp_path / "map")
    assert list(tmp_path.iterdir()) == []


def edit_card(folder: Path, **fields: Any) -> None:
    card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    (folder / CARD).write_text(json.dumps(card | fields), encoding="utf-8")


def put_tensors(folder: Path, data: bytes) -> None:
    """Replace the tensors, and make the hash fit."""
    (folder / TENSORS).write_bytes(data)
    edit_card(folder, sha256=hashlib.sha256(data).hexdigest())


def flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / TENSORS).read_bytes())
    data[-1] ^= 1
    (folder / TENSORS).write_bytes(data)


def cut_the_card(folder: Path) -> None:
    text = (folder / CARD).read_text(encoding="utf-8")
    (folder / CARD).write_text(text[: len(text) // 2], encoding="utf-8")


class Trap:
    """Run when unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('unpickled')",)


ONES = {"weight": np.ones((5, 3), np.float32)}
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a newer format": (lambda f: edit_card(f, format=2), "is of format 2, this vecferry reads format 1"),
    "no format": (lambda f: (f / CARD).write_text("{}"), "can't be read as a map: 'format'"),
    "a card cut short": (cut_the_card, r"card\.json is damaged: Unterminated string"),
    "a card that is a list": (lambda f: (f / CARD).write_text("[]"), r"card\.json is damaged: it is no JSON object"),
    "a card in Latin-1": (lambda f: (f / CARD).write_bytes(b'{"format": "\xe9"}'), r"card\.json is damaged: 'utf-8'"),
    "an unknown field": (lambda f: edit_card(f, trust=1), "trust"),
    "an unknown normalisation": (lambda f: edit_card(f, post="softmax"), "post is 'softmax', not one of none, l2"),
    "other dimensions": (
        lambda f: edit_card(f, target={"dim": 4, "model": None, "prompt": None}),
        "the card says 5 -> 4",
    ),
    "another normalisation": (lambda f: edit_card(f, post="l2"), "says other things of the map"),
    "another metric": (lambda f: edit_card(f, metric="l2"), "says other things of the map"),
    "another direction": (lambda f: edit_card(f, direction="sideways"), "is 'sideways', not one of document"),
    "another model": (
        lambda f: edit_card(f, target={"dim": 3, "model": "third", "prompt": None}),
        "says other things of the map",
    ),
    "a flipped bit": (flip_a_bit, "damaged or swapped"),
    "no tensors": (lambda f: (f / TENSORS).unlink(), "can't be read as a map"),
    "a pickle": (lambda f: (f / TENSORS).write_bytes(pickle.dumps(Trap())), "damaged or swapped"),
    "a pickle with its hash": (lambda f: put_tensors(f, pickle.dumps(Trap())), "header of .* damaged"),
    "no weight": (lambda f: put_tensors(f, save({"w": ONES["weight"]})), "can't be read as a map: 'weight'"),
    "NaN": (lambda f: put_tensors(f, save({"weight": ONES["weight"] * np.float32("nan")})), "NaN or infinite"),
    "a stray bias": (lambda f: put_tensors(f, save(ONES | {"bias": np.ones(4, np.float32)})), r"bias has shape \[4\]"),
}


@pytest.mark.parametrize("fault", list(DAMAGE))
def test_a_damaged_map_is_refused(tmp_path: Path, fault: str) -> None:
    damage, message = DAMAGE[fault]
    folder = simple_map().save(tmp_path / "map")
    damage(folder)
    with pytest.raises(DataError, match=message):
        LinearMap.load(folder)


def test_what_is_no_map_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a map folder: it has no card\.json"):
        LinearMap.load(tmp_path)
    with pytest.raises(UsageError, match="is not a map folder"):
        LinearMap.load(tmp_path / "nowhere")


ALONE = """
    import sys

    class Only:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] not in {"numpy", "safetensors", "vecferry"} | set(sys.stdlib_module_names):
                raise ImportError(f"{name} is not allowed")

    sys.meta_path.insert(0, Only())
    from vecferry import LinearMap

    m = LinearMap.load(sys.argv[1])
    import numpy as np
    print(m.apply(np.eye(6, dtype=np.float32)).tobytes().hex())
"""


def test_applying_a_saved_map_needs_numpy_and_safetensors_only() -> None:
    command = [sys.executable, "-c", textwrap.dedent(ALONE), str(FROZEN)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert bytes.fromhex(done.stdout.strip()) == frozen_map().apply(np.eye(6, dtype=np.float32)).tobytes()
