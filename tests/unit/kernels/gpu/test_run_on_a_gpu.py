"""What the tests of this folder must do where there is a GPU, told from their sources and without one."""

import ast
from pathlib import Path

import pytest
import torch

from quire.worker.device import build, drafters
from tests.unit.kernels.gpu.conftest import HAS_GPU, compile_when_launched, share_cache

SOURCES = sorted(Path(__file__).parent.glob("test_*.py"))
LAUNCHING = {
    "activate",
    "add_and_normalize",
    "attend",
    "mixture_of_experts",
    "multiply",
    "multiply_float8",
    "multiply_in_order",
}
LAUNCHING |= {"normalize", "place_heads", "quantize", "sample_rows", "dequantize"}
"""Functions that launch kernels on the tensors that they get."""


def functions_of(source):
    return [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def calls_of(function):
    """Return the names of what a test calls, but for what it expects to raise."""
    raising = {
        id(inner)
        for node in ast.walk(function)
        if isinstance(node, ast.With) and "raises" in ast.unparse(node.items[0].context_expr)
        for inner in ast.walk(node)
    }
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call) and id(node) not in raising)
    return {node.func.id for node in calls if isinstance(node.func, ast.Name)}


def left_on_the_host(source):
    """Return the tests that launch kernels on tensors that no device was named for."""
    return [
        function.name
        for function in functions_of(source)
        if LAUNCHING & calls_of(function)
        and "device" not in {argument.arg for argument in function.args.args}
        and 'device="meta"' not in ast.unparse(function).replace("'", '"')
    ]


def unmarked_constraints(source):
    found = [function for function in functions_of(source) if "StructuredOutputsParams" in ast.unparse(function)]
    return [function.name for function in found if "needs_llguidance" not in map(ast.unparse, function.decorator_list)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_kernels_get_tensors_of_the_device_and_constraints_are_skipped_without_llguidance(path):
    source = path.read_text()
    assert left_on_the_host(source) == []
    if path != Path(__file__):
        assert unmarked_constraints(source) == []


def test_such_tests_are_found():
    assert left_on_the_host("def test_a(install):\n    attend(q, cache)\n") == ["test_a"]
    assert left_on_the_host("def test_a(device):\n    attend(q.to(device), cache)\n") == []
    assert left_on_the_host("def test_a():\n    with pytest.raises(E):\n        attend(q)\n") == []
    assert unmarked_constraints("def test_a():\n    StructuredOutputsParams(regex='a')\n") == ["test_a"]
    assert unmarked_constraints("@needs_llguidance\ndef test_a():\n    StructuredOutputsParams()\n") == []


def test_engines_of_tests_compile_nothing_ahead_and_share_what_they_compile(monkeypatch):
    device, started = torch.device("cuda"), []
    for module in (build, drafters):
        monkeypatch.setattr(module, "Precompilation", lambda *_: started.append(_))
        monkeypatch.setattr(module, "arch_of", lambda device: 90)
    if not HAS_GPU:  # else it is so already
        drafters.compile_ahead(device, drafters.CompileJob(*[None] * 10), {})
        assert len(started) == 1
        started.clear()
    compile_when_launched(monkeypatch)
    assert drafters.compile_ahead(device, drafters.CompileJob(*[None] * 10), {}) is None
    assert build.compile_ahead(device, None, None, None, {}) is None
    assert started == []
    environment = {}
    share_cache(environment, "/tmp/mine")
    share_cache(environment, "/tmp/other")
    assert environment == {"TRITON_CACHE_DIR": "/tmp/mine"}
