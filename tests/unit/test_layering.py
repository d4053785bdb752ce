"""The layering table of docs/structure.md, enforced: lazy and TYPE_CHECKING imports count like any other. And sizes."""

import ast
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "quire"

MAY_IMPORT = {
    "base": set(),
    "contracts": {"base"},
    "kernels": {"base", "contracts"},
    "text": {"base", "contracts"},
    "sampling": {"base", "contracts", "kernels"},
    "grammar": {"base", "contracts"},
    "kv": {"base", "contracts", "kernels"},
    "quant": {"base", "contracts", "kernels"},
    "parallel": {"base", "contracts", "kernels"},
    "model": {"base", "contracts", "kernels", "kv", "quant", "parallel"},
    "speculate": {"base", "contracts", "kernels", "sampling", "kv", "quant", "model"},
    "worker": {"base", "contracts", "kernels", "sampling", "grammar", "kv", "quant", "parallel", "model", "speculate"},
    "transfer": {"base", "contracts"},
    "engine": {"base", "contracts", "text", "grammar", "kv", "speculate", "worker", "transfer"},
    "engine/scheduling": {"base", "contracts"},
    "planner": {"base", "contracts"},
    "training": {"base", "contracts", "kernels", "text", "kv", "model", "engine"},
    "api": {"base", "contracts"},
    "serving": {"base", "contracts", "text", "api", "engine"},
    "router": {"base", "serving"},
    "fleet": {"base", "contracts", "serving", "router"},
    "cluster": {"base", "serving", "router", "fleet", "cli"},
    "bench": {
        *("base", "contracts", "kernels", "text", "grammar", "quant", "parallel", "model", "speculate", "engine", "planner"),
    },
    "simulate": {"base", "contracts", "engine", "engine/scheduling", "planner", "bench", "router"},
    "cli": {
        *("base", "contracts", "kv", "model", "training", "engine", "serving", "router", "planner", "bench", "simulate"),
        "fleet",
    },
}
SERVING_BASE = {
    *("answers", "body_room", "config", "database", "errors", "hosts", "ignored", "log_format", "public_error", "resume_wire"),
    "store_thread",
}
SERVING_MAY_IMPORT = {  # in addition to SERVING_BASE, whose modules may import each other
    "engine_client": set(),
    "interfaces": {"engine_client"},
    "auth": {"interfaces"},
    "admission": {"engine_client", "interfaces"},
    "metrics": {"engine_client", "interfaces"},
    "request_queue": {"engine_client", "interfaces", "admission", "metrics"},
    "core": {"engine_client", "interfaces", "admission"},
    "context": {"interfaces", "core"},
    "endpoint": {"interfaces"},
    "paging": {"endpoint"},
    "openai": {"engine_client", "interfaces", "core", "context", "endpoint"},
    "anthropic": {"core", "context", "endpoint", "openai"},
    "ollama": {"core", "context", "endpoint", "openai"},
    "responses": {"interfaces", "core", "context", "endpoint", "paging", "openai"},
    "batch": {"auth", "admission", "core", "context", "endpoint", "paging", "openai", "anthropic", "responses"},
    "page": {"engine_client", "metrics", "request_queue", "context", "endpoint"},
    "http": {
        *("engine_client", "interfaces", "auth", "admission", "metrics", "request_queue", "core", "context", "endpoint"),
        *("openai", "anthropic", "ollama", "responses", "batch", "page"),
    },
}
WITHOUT_TORCH = {
    *("base", "contracts", "text", "grammar", "transfer", "engine/scheduling", "api"),
    *("serving", "router", "planner", "simulate", "cli", "fleet", "cluster"),
}
DATA_FOLDERS = {"demo_models"}
OF_EXTRAS = {"quire.cluster.ray_router": "ray"}
"""Modules that can be imported only with a package of an extra: their classes inherit from its classes."""


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "engine/scheduling" if parts[:2] == ("engine", "scheduling") else parts[0]


@cache
def imports_and_lengths(path: Path) -> tuple[set[str], dict[str, int]]:
    """Return what a module imports, and the lines of each of its functions."""
    found, lengths = set(), {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "quire" else {node.module}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lengths[node.name] = max(lengths.get(node.name, 0), node.end_lineno - node.lineno + 1)
    return found, lengths


def imports_of(path: Path) -> set[str]:
    return imports_and_lengths(path)[0]


@cache
def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT)


def test_every_package_has_a_row():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - DATA_FOLDERS == {name for name in MAY_IMPORT if "/" not in name}


def packages_imported_by(path: Path) -> set[str]:
    """Return the packages other than its own that a module imports."""
    names = (name.split(".")[1:3] for name in imports_of(path) if name.startswith("quire.") and not name.startswith("quire.__"))
    found = {"engine/scheduling" if parts == ["engine", "scheduling"] else parts[0] for parts in names}
    return found - {package_of(path)} - ({"engine/scheduling"} if package_of(path) == "engine" else set())


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_every_package_of_a_row_is_imported(package):
    used = set[str]().union(*(packages_imported_by(path) for path in modules() if package_of(path) == package))
    assert MAY_IMPORT[package] <= used


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_modules_import_only_what_their_package_may(package):
    paths = [path for path in modules() if package_of(path) == package]
    assert paths
    for path in paths:
        for name in imports_of(path):
            top = name.split(".")[0]
            if top == "torch":
                assert package not in WITHOUT_TORCH, f"{path} imports torch"
            if top == "transformers":
                is_backend = path == ROOT / "model/transformers_backend/library.py"
                assert is_backend, f"{path} imports transformers, which only the transformers backend may"
        assert packages_imported_by(path) <= MAY_IMPORT[package], f"{path} imports {sorted(imports_of(path))}"


def test_functions_have_at_most_60_lines_unless_they_are_gpu_kernels():
    paths = [path for path in modules() if ROOT / "kernels/triton" not in path.parents]
    assert [(path.name, name) for path in paths for name, lines in imports_and_lengths(path)[1].items() if lines > 60] == []


def test_modules_and_those_of_tests_have_fewer_than_600_lines():
    paths = [*modules(), *(ROOT.parent / "tests").rglob("*.py")]
    assert [path.name for path in paths if path.read_bytes().count(b"\n") >= 600] == []


def test_every_module_is_of_a_package_with_a_row():
    assert {package_of(path) for path in modules()} == set(MAY_IMPORT)


def serving_part_of(path: Path) -> str:
    """Return the folder of a module of quire/serving, or its own name where it is in none."""
    name = path.relative_to(ROOT / "serving").parts[0].removesuffix(".py")
    return "base" if name in SERVING_BASE else name


def serving_parts_imported_by(path: Path) -> set[str]:
    names = (name.split(".")[2] for name in imports_of(path) if name.startswith("quire.serving."))
    return {"base" if name in SERVING_BASE else name for name in names} - {serving_part_of(path), "base"}


def test_folders_of_serving_import_one_way():
    before = set[str]()
    for part, others in SERVING_MAY_IMPORT.items():
        assert others <= before, f"{part} stands before {others - before}"
        before.add(part)
    imported: dict[str, set[str]] = {part: set() for part in SERVING_MAY_IMPORT}
    for path in sorted((ROOT / "serving").rglob("*.py")):
        part = serving_part_of(path)
        if part != "__init__":
            imported.setdefault(part, set()).update(serving_parts_imported_by(path))
    assert imported.pop("base") == set()
    assert imported == SERVING_MAY_IMPORT


def test_import_of_quire_loads_neither_torch_nor_its_own_packages():
    import subprocess

    code = "import quire, sys; print(sorted(n for n in sys.modules if n in ('torch', 'numpy') or n.startswith('quire.')))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_transformers_is_imported_only_when_it_is_asked_for():
    import subprocess

    code = "import quire.worker.build, sys; print('transformers' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_packages_without_torch_load_without_it():
    import subprocess

    names = [
        ".".join(("quire", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for path in modules()
        if package_of(path) in WITHOUT_TORCH
    ]
    names = [name for name in names if name not in OF_EXTRAS or find_spec(OF_EXTRAS[name]) is not None]
    assert len(names) > 40
    code = f"import importlib, sys; [importlib.import_module(n) for n in {names!r}]; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_public_names_exist_and_are_sorted():
    import quire

    assert quire.__all__ == sorted(quire.__all__, key=lambda name: (not name.isupper(), name))
    for name in quire.__all__:
        assert getattr(quire, name).__name__ == name
