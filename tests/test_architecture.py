"""The rules of the layout, checked on the source itself: imports go one way, and heavy packages load when needed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "migrate" / "vecferry"
ADAPTERS = ROOT / "adapters" / "vecferry_adapters"
ORDER = [
    ["errors", "options", "signals"],
    ["diagnosis"],
    ["machine"],
    ["doctor"],
    ["jsonfile"],
    ["batch", "linear"],
    ["encoders", "spectrum"],
    ["vocabulary"],
    ["heads"],
    ["mapcard"],
    ["store", "mapfile"],
    ["kernel", "lookup"],
    ["corpus"],
    ["cache"],
    ["holdout", "solvers", "sgd", "qrels", "recall", "hubness"],
    ["extrapolation"],
    ["measured", "filters"],
    ["fullsize", "gate", "split", "pairs", "slices", "norms"],
    ["encoded", "sizes"],
    ["bench", "evaluate", "rewrite", "sampling"],
    ["compressing"],
    ["family", "learning"],
    ["rank"],
    ["auto"],
    ["heldout"],
    ["likeness", "crossfit", "verdict", "attribution", "mixing"],
    ["fitting", "tables", "ways"],
    ["filtering"],
    ["gains", "assessment"],
    ["report", "assessing"],
    ["baseline"],
    ["junit", "page"],
    ["plan", "verify", "measuring", "inspection"],
    ["prechecks", "aside"],
    ["estimating"],
    ["asking", "truthcheck", "checking"],
    ["migration", "transforming", "testing", "cascade", "encoding"],
    ["warming"],
    ["outputs"],
    ["lens", "spectroscopy"],
    ["demo", "cli", "cli_encode", "cli_filters"],
]
LEVEL = {name: i for i, names in enumerate(ORDER) for name in names}
HEAVY = ("faiss", "torch", "transformers", "scipy")


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports anywhere, also inside functions, but not for typing only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} if node.module != "vecferry" else {f"vecferry.{a.name}" for a in node.names}
    return found


def core_files() -> list[Path]:
    return sorted(
        p for p in [*CORE.glob("*.py"), *CORE.glob("encoders/*.py")] if p.parent != CORE or p.stem != "__init__"
    )


@pytest.mark.parametrize("path", core_files(), ids=lambda p: p.stem)
def test_core_imports_go_one_way(path: Path) -> None:
    own = path.stem if path.parent == CORE else path.parent.name
    assert own in LEVEL, f"{path.name} is not in the order of imports: say where it belongs"
    for module in imports(path):
        if module.startswith("vecferry_adapters"):
            pytest.fail(f"{path.name} imports {module}: the core finds adapters by entry point only")
        name = module.removeprefix("vecferry.").split(".")[0]
        if module.startswith("vecferry.") and name in LEVEL:
            backwards = LEVEL[name] > LEVEL[own]
            lazily = path.stem in ("linear", "store")  # LinearMap.save and load name mapfile inside the method
            assert not backwards or lazily, f"{path.name} imports {name}, which comes after it"


@pytest.mark.parametrize("path", sorted(ADAPTERS.rglob("*.py")), ids=lambda p: p.stem)
def test_adapters_import_the_contract_and_no_other_store(path: Path) -> None:
    allowed = {"vecferry.batch", "vecferry.store", "vecferry.errors", "vecferry.jsonfile"}
    for module in imports(path):
        if module == "vecferry" or module.startswith("vecferry."):
            assert module in allowed, f"{path.name} imports {module}"
        if module.startswith("vecferry_adapters."):
            assert module.split(".")[1].startswith("_"), f"{path.name} imports the store {module}"


@pytest.mark.parametrize("code", ["import vecferry", "import vecferry.cli; vecferry.cli.cli(['--help'])"])
def test_heavy_packages_are_not_loaded_before_they_are_needed(code: str) -> None:
    check = f"""
import sys
try:
    {code}
except SystemExit:
    pass
print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_a_saved_map_is_applied_with_numpy_and_safetensors_only(tmp_path: Path) -> None:
    import numpy as np

    from vecferry.linear import Card, LinearMap, Side

    weight = np.random.default_rng(0).standard_normal((6, 4), dtype=np.float32)
    LinearMap(weight, post="l2", card=Card(Side(6), Side(4), "by hand")).save(tmp_path / "map")
    check = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pyarrow", "click", "tqdm", "threadpoolctl", "faiss", "torch", "scipy"):
            raise ImportError(name + " must not be needed")
sys.meta_path.insert(0, Refuse())
import numpy as np
import vecferry
y = vecferry.transform(np.eye(6), {str(tmp_path / "map")!r})
print(repr(y.tolist()))
"""
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    expected = weight / np.linalg.norm(weight, axis=1, keepdims=True)
    np.testing.assert_allclose(eval(done.stdout), expected, atol=1e-7)  # rows of length 1, rounded to float32


def test_no_file_names_a_path_of_a_machine() -> None:
    for path in [*CORE.rglob("*.py"), *ADAPTERS.rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"), ROOT / "README.md"]:
        text = path.read_text(encoding="utf-8")
        assert "/work/" not in text, path
        assert "/root/" not in text, path
