"""Compile what serving a model launches while its weights are loaded, in processes of their own.

`python -m quire.worker.device.precompile` reads a pickled Order from its standard input, finds the variants and compiles them.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.runtime.cache import get_cache_manager

import quire
from quire.base.errors import InvariantError
from quire.base.logging import get_logger
from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import ModelSpec
from quire.kernels.triton.device_traits import DeviceTraits, choose_traits
from quire.kernels.triton.precompile import Variant, compile_variant
from quire.kernels.triton.tile_table import TileTable, using
from quire.model.checkpoint import open_parameters
from quire.quant.parameters import Parameter, StoredParameter
from quire.quant.policy import DEVICE_POLICIES
from quire.worker.device.launched_step import StepSizes
from quire.worker.device.variants import ServedHead, ServedModel, head_variants, serving_variants

logger = get_logger(__name__)

_DONE = "compiled"
_SOURCES = ("kernels/triton/*.py", "model/device_*.py", "model/heads/device_*.py", "worker/device/*.py", "quant/*.py")


class Order(NamedTuple):
    """What is to be compiled.

    folder         where the checkpoint is
    quantization   a name of DEVICE_POLICIES, or None
    is_in_order    see DeviceDecoder
    arch           compute capability, e.g. 90
    table          of tiles, with which kernels are launched
    has_launchers  whether what Triton calls kernels through is built, too: that needs the driver's library, and a C compiler
    head           what is compiled instead of the model: a head beside it
    shares         of tensor-parallel ranks: the part of rank 0 is compiled
    has_expert_ranks  each of them has whole experts
    """

    folder: Path
    spec: ModelSpec
    quantization: str | None
    is_in_order: bool
    kv: KvSpec
    sizes: StepSizes
    arch: int
    table: TileTable
    has_launchers: bool = True
    head: ServedHead | None = None
    shares: tuple[float, ...] = (1.0,)
    has_expert_ranks: bool = False

    def model(self, parameters: Mapping[str, Parameter | StoredParameter]) -> ServedModel:
        """Return the model, whose parameters are these."""
        policy = None if self.quantization is None else DEVICE_POLICIES[self.quantization]
        return ServedModel(self.spec, parameters, policy, self.is_in_order, self.shares, self.has_expert_ranks)

    def variants(self) -> list[Variant]:
        """Return what is to be compiled, without repetition."""
        with using(self.table):
            model = self.model(open_parameters(self.folder, self.spec))
            return serving_variants(model, self.kv, self.sizes) if self.head is None else head_variants(model, self.head)


class Precompilation:
    """Kernels that are compiled meanwhile, unless they were before, for the same model and sizes, from the same sources.

    parameters  of the model, as `open_parameters` returns them; not changed
    """

    def __init__(self, order: Order, parameters: Mapping[str, Parameter | StoredParameter]) -> None:
        self._mark = get_cache_manager(_fingerprint(order, parameters))
        self._process: subprocess.Popen[bytes] | None = None
        if self._mark.get_file(_DONE) is None:
            environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
            # The package may have been found by what the program put into sys.path.
            found = [str(Path(quire.__file__).parents[1]), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, found))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "quire.worker.device.precompile"],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
            )
            if self._process.stdin is None:
                raise InvariantError("a process that was started with a pipe has none")
            with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:  # one that died is told of by `wait`
                pipe.write(pickle.dumps(order))

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


def arch_of(device: torch.device) -> int:
    """Return the compute capability of a CUDA device as orders have it."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _fingerprint(order: Order, parameters: Mapping[str, Parameter | StoredParameter]) -> str:
    """Return what changes with what is to be compiled, the sources of the kernels, of what launches them, and Triton."""
    package = Path(quire.__file__).parent
    sources = [path.read_bytes() for pattern in _SOURCES for path in sorted(package.glob(pattern))]
    content = repr((order._replace(folder=Path()), order.model(parameters).kinds(), triton.__version__)).encode()
    return hashlib.sha256(b"\0".join([content, *sources])).hexdigest()


def compile_all(variants: Sequence[Variant], arch: int, has_launchers: bool) -> list[str]:
    """Compile variants in processes, and return what is wrong with those that cannot be, the kernel's name first."""
    count = len(variants)
    # The children only compile: they touch neither the GPU nor a thread of this process.
    with ProcessPoolExecutor(min(count, os.cpu_count() or 1), multiprocessing.get_context("fork")) as pool:
        found = pool.map(_error_of, variants, [arch] * count, [has_launchers] * count)
        return [error for error in found if error is not None]


def _error_of(variant: Variant, arch: int, has_launchers: bool) -> str | None:
    try:
        compile_variant(variant, arch, has_launchers)
    except Exception as error:  # noqa: BLE001 - one that fails must not take the others with it, whatever a compiler raises
        return f"{variant.kernel}: {type(error).__name__}: {error}"
    return None


def main() -> None:
    """Compile the order that stands in the standard input. Exits with 1 where a variant cannot be, after all others are."""
    order: Order = pickle.load(sys.stdin.buffer)
    choose_traits(DeviceTraits.of_arch(order.arch))
    variants = order.variants()
    failed = compile_all(variants, order.arch, order.has_launchers)
    if failed:
        sys.exit(f"{len(failed)} of {len(variants)} variants cannot be compiled, the first is {failed[0]}")


if __name__ == "__main__":
    main()
