"""Kernels run on the GPU where there is one, else in Triton's interpreter, which must be chosen before triton is imported."""

import importlib.util
import os
import sys
from importlib.metadata import version

import pytest
import torch

HAS_GPU = torch.cuda.is_available()


def release(package):
    return tuple(int(part) for part in version(package).split(".")[:2])


def reason_to_skip():
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'quire[gpu]'"
    if HAS_GPU:
        return None
    if release("triton") < (3, 7) and release("numpy") >= (2, 4):
        return "the interpreter of Triton 3.6 needs numpy<2.4"
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        return "triton was imported before its interpreter could be chosen: run with TRITON_INTERPRET=1"
    os.environ["TRITON_INTERPRET"] = "1"
    return None


REASON = reason_to_skip()


class Skipped(pytest.Module):
    """A module of tests that cannot be imported here."""

    def collect(self):
        pytest.skip(f"GPU kernels: {REASON}")


def pytest_pycollect_makemodule(module_path, parent):
    return None if REASON is None else Skipped.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def device():
    """The device of the tensors that kernels get."""
    return torch.device("cuda" if HAS_GPU else "cpu")
