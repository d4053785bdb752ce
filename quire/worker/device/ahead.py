"""Compile what serving a model launches while its weights are loaded, in processes of their own.

`python -m quire.worker.device.ahead` reads a pickled _Order from its standard input, finds the variants and compiles them.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import triton
from triton.runtime.cache import get_cache_manager

import quire
from quire.base.errors import InvariantError
from quire.base.logging import get_logger
from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import ModelSpec
from quire.kernels.triton.ahead import compile_variant
from quire.worker.device.stepper import StepSizes
from quire.worker.device.variants import serving_variants

logger = get_logger(__name__)

_DONE = "compiled"
_SOURCES = ("kernels/triton/*.py", "model/device_*.py", "worker/device/*.py")


class _Order(NamedTuple):
    spec: ModelSpec
    kv: KvSpec
    sizes: StepSizes
    is_in_order: bool
    arch: int
    has_launchers: bool


class CompilationAhead:
    """Kernels that are compiled meanwhile, unless they were before, for the same model and sizes, from the same sources.

    is_in_order    see DeviceDecoder. The kernels of narrow weights are not among them: they are compiled when launched first
    arch           compute capability, e.g. 90
    has_launchers  whether what Triton calls kernels through is built, too: that needs the driver's library, and a C compiler
    """

    def __init__(
        self, spec: ModelSpec, kv: KvSpec, sizes: StepSizes, is_in_order: bool, arch: int, has_launchers: bool = True
    ) -> None:
        order = _Order(spec, kv, sizes, is_in_order, arch, has_launchers)
        self._mark = get_cache_manager(_fingerprint(order))
        self._process: subprocess.Popen[bytes] | None = None
        if self._mark.get_file(_DONE) is None:
            environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "quire.worker.device.ahead"],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
            )
            if self._process.stdin is None:
                raise InvariantError("a process that was started with a pipe has none")
            self._process.stdin.write(pickle.dumps(order))
            self._process.stdin.close()

    @property
    def is_needed(self) -> bool:
        """Whether there was anything to compile."""
        return self._process is not None

    def wait(self) -> bool:
        """Wait for the end, and return whether all is compiled; what is not will be when it is launched first, and is said."""
        if self._process is None:
            return True
        start = time.perf_counter()
        with self._process as process:
            errors = b"" if process.stderr is None else process.stderr.read()
        if process.returncode != 0:
            logger.warning("kernels are compiled when they are launched first, not ahead: %s", errors.decode(errors="replace"))
            return False
        self._mark.put("", _DONE, binary=False)
        logger.info("kernels were compiled ahead, of which %.1f s were waited for", time.perf_counter() - start)
        return True


def _fingerprint(order: _Order) -> str:
    """Return what changes with what is to be compiled, the sources of the kernels, of what launches them, and Triton."""
    package = Path(quire.__file__).parent
    sources = [path.read_bytes() for pattern in _SOURCES for path in sorted(package.glob(pattern))]
    content = repr((tuple(order), triton.__version__)).encode()
    return hashlib.sha256(b"\0".join([content, *sources])).hexdigest()


def main() -> None:
    """Compile the order that stands in the standard input."""
    order: _Order = pickle.load(sys.stdin.buffer)
    variants = serving_variants(order.spec, order.kv, order.sizes, order.is_in_order)
    count = len(variants)
    # The children only compile: they touch neither the GPU nor a thread of this process.
    with ProcessPoolExecutor(min(count, os.cpu_count() or 1), multiprocessing.get_context("fork")) as pool:
        list(pool.map(compile_variant, variants, [order.arch] * count, [order.has_launchers] * count))


if __name__ == "__main__":
    main()
