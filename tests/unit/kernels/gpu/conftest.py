"""Kernels run on the GPU where there is one, else in Triton's interpreter, which must be chosen before triton is imported.

QUIRE_GPU_TESTS=required makes every skip here a failure: a run that is there to test the kernels must not be green without.
QUIRE_TEST_COMBINATIONS=all runs all slow combinations of parameters, which takes hours in the interpreter. QUIRE_TEST_ARCH=86
launches kernels as on GPUs of compute capability 8.6: with their tiles, without what they lack.
"""

import importlib.util
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.kernels.triton.device_traits import DeviceTraits, choose_traits
from tests.covering import part_of, redundant_slow_combinations

HAS_GPU = torch.cuda.is_available()
needs_llguidance = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="constraints need llguidance, which is not installed"
)
MAY_SKIP = os.environ.get("QUIRE_GPU_TESTS") != "required"
if "QUIRE_TEST_ARCH" in os.environ:
    choose_traits(DeviceTraits.of_arch(int(os.environ["QUIRE_TEST_ARCH"])))
ALL_COMBINATIONS = os.environ.get("QUIRE_TEST_COMBINATIONS") == "all"
READ_OR_COMPILED = {"test_kernel_sources.py", "test_triton_compiling.py"}
"""Modules whose tests run no kernel in their own process."""


def draw(*shape, dtype=torch.float32, seed=0, device="cpu"):
    """Return a normally distributed tensor."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def release(package):
    return tuple(int(part) for part in version(package).split(".")[:2])


def has_triton():
    return importlib.util.find_spec("triton") is not None


def reason_not_to_interpret():
    """Return why Triton's interpreter cannot be used by this installation, None where it can."""
    if not has_triton():
        return "triton is not installed: pip install 'quire[gpu]'"
    if release("triton") < (3, 7) and release("numpy") >= (2, 4):
        return "the interpreter of Triton 3.6 needs numpy<2.4"
    return None


def reason_to_skip():
    if HAS_GPU and has_triton():
        return None
    reason = reason_not_to_interpret()
    if reason is None and "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        reason = "triton was imported before its interpreter could be chosen: run with TRITON_INTERPRET=1"
    if reason is None:
        os.environ["TRITON_INTERPRET"] = "1"
    return reason


REASON = reason_to_skip()


class Skipped(pytest.Module):
    """A module of tests that cannot be imported here."""

    def collect(self):
        pytest.skip(f"GPU kernels: {REASON}")


def pytest_pycollect_makemodule(module_path, parent):
    is_there = REASON is None or (module_path.name in READ_OR_COMPILED and has_triton())
    return None if is_there else Skipped.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(config, items):
    """Run as many of the slow combinations of parameters as have each value once, or all if they are asked for.

    QUIRE_TEST_PART=i/n takes a part of them: bench/gpu_tests.py runs long files in several processes.
    """
    left_out = set()
    if not ALL_COMBINATIONS:
        left_out |= set(redundant_slow_combinations([item for item in items if item.path.parent == Path(__file__).parent]))
    if part := os.environ.get("QUIRE_TEST_PART"):
        left_out |= set(items) - set(part_of(items, part))
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def fail_where_skipped(report):
    if report.skipped and not MAY_SKIP and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped although QUIRE_GPU_TESTS=required: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return fail_where_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return fail_where_skipped((yield))


def exact_dot(original, make_handle):
    """Return a product of tiles for the interpreter that is summed in float64.

    In float32 NumPy sums a row in another order where it stands elsewhere in a tile, on some processors; a GPU does not.
    """

    def create_dot(builder, a, b, d, *options):
        if a.data.dtype != np.float32 or b.data.dtype != np.float32 or d.data.dtype != np.float32:
            return original(builder, a, b, d, *options)
        total = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return make_handle(total.astype(np.float32), d.dtype.scalar)

    return create_dot


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter():
    """Spare the interpreter to make the same types, shapes and patches again and again."""
    if HAS_GPU or REASON is not None:
        yield
        return
    from tests.unit.kernels.gpu.quick_interpreter import install

    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def sums_of_any_order():
    """Have rows the same bits wherever they stand in a tile that is interpreted."""
    if HAS_GPU or REASON is not None:
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", exact_dot(InterpreterBuilder.create_dot, TensorHandle))
        yield


def compile_when_launched(patch):
    """Have engines compile kernels when they are launched first: not ahead, in a process for every engine of a test."""
    from quire.worker.device import build, drafters

    patch.setattr(build, "compile_ahead", lambda *_: None)
    patch.setattr(drafters, "compile_ahead", lambda *_: None)


def share_cache(environment, folder):
    """Have all tests on a machine, in whatever processes, find what any of them has compiled; a cache that is given stays."""
    environment.setdefault("TRITON_CACHE_DIR", str(folder))


@pytest.fixture(scope="session", autouse=True)
def quick_starts():
    """Start engines on a GPU as fast as can be: what they compile is shared by all tests."""
    if not HAS_GPU or REASON is not None:
        yield
        return
    share_cache(os.environ, Path(tempfile.gettempdir()) / f"quire-tests-triton-{os.getuid()}")
    with pytest.MonkeyPatch.context() as patch:
        compile_when_launched(patch)
        yield


@pytest.fixture(scope="session")
def address_check():
    """The check of every address that interpreted kernels touch; None where none is interpreted."""
    if HAS_GPU or REASON is not None:
        yield None
        return
    from tests.unit.kernels.gpu.address_check import AddressCheck

    check = AddressCheck()
    with pytest.MonkeyPatch.context() as patch:
        check.install(patch)
        yield check


@pytest.fixture(autouse=True)
def memory_as_on_a_gpu(address_check):
    """Fail where a kernel left its tensors, whatever became of the error that it raised; new memory holds nothing of use."""
    if address_check is None:
        yield
        return
    from tests.unit.kernels.gpu.address_check import install_unset_memory

    with pytest.MonkeyPatch.context() as patch:
        install_unset_memory(patch)
        yield
    errors = address_check.take_errors()
    if errors:
        pytest.fail(errors[0])


@pytest.fixture(scope="session")
def device():
    """The device of the tensors that kernels get."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture
def few_programs(monkeypatch):
    """Have the interpreter run few programs, which it does one after the other: several heads in each."""
    from quire.kernels.triton import qk_rope_store

    if not HAS_GPU:
        monkeypatch.setattr(qk_rope_store, "_FEW_TOKENS", 0)
