"""The process of a rank of an engine that a test starts: its kernels are interpreted, and checked, as those of the test are."""

import sys

import pytest

from quire.parallel.launch import run_worker
from quire.worker.device import gpu_worker
from tests.unit.kernels.gpu import address_check, quick_interpreter


def install():
    """Check all launches of this process."""
    patch = pytest.MonkeyPatch()
    quick_interpreter.install(patch)
    address_check.AddressCheck().install(patch)
    address_check.install_unset_memory(patch)


if __name__ == "__main__":
    install()
    sys.exit(run_worker(gpu_worker.main))
