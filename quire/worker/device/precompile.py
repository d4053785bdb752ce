"""Compile what serving a model launches while its weights are loaded, and after that, in processes of their own."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe
from pathlib import Path
from threading import Condition, Thread
from typing import NamedTuple

import torch
import triton
from triton.runtime.cache import get_cache_manager

import quire
from quire.base.errors import WorkerError
from quire.base.logging import get_logger
from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import ModelSpec
from quire.kernels.triton.launching import BOUND, Launch
from quire.kernels.triton.precompile import variant_of
from quire.kernels.triton.tile_table import TileTable, using
from quire.kernels.triton.variant import Variant
from quire.model.checkpoint import open_parameters
from quire.quant.parameters import Parameter, StoredParameter
from quire.quant.policy import DEVICE_POLICIES
from quire.worker.device.launched_step import StepSizes
from quire.worker.device.variants import ServedHead, ServedModel, head_variants, serving_variants

logger = get_logger(__name__)

_DONE = "compiled"
_LONGEST = "attend_prompts"
"""The kernel that is compiled first: it takes twice as long as any other, and the start waits for it."""
_SOURCES = ("kernels/triton/*.py", "model/device_*.py", "model/heads/device_*.py", "worker/device/*.py", "quant/*.py")


class CompileJob(NamedTuple):
    """What is to be compiled.

    folder         where the checkpoint is
    quantization   a name of DEVICE_POLICIES, or None
    is_in_order    see DeviceDecoder
    arch           compute capability, e.g. 90
    table          of tiles, with which kernels are launched
    head           a draft head, which is compiled instead of the model
    shares         of tensor-parallel ranks: the part of rank 0 is compiled
    num_redundant  copies of experts in a layer, with expert parallelism; None: without
    has_homes      ranks attend to sequences of their own
    context_size   ranks that share the tokens of sequences
    """

    folder: Path
    spec: ModelSpec
    quantization: str | None
    is_in_order: bool
    kv: KvSpec
    sizes: StepSizes
    arch: int
    table: TileTable
    head: ServedHead | None = None
    shares: tuple[float, ...] = (1.0,)
    num_redundant: int | None = None
    has_homes: bool = False
    context_size: int = 1

    def model(self, parameters: Mapping[str, Parameter | StoredParameter]) -> ServedModel:
        """Return the model, whose parameters are these."""
        policy = None if self.quantization is None else DEVICE_POLICIES[self.quantization]
        of_ranks = self.shares, self.num_redundant, self.kv.layer_dtypes, self.has_homes, self.context_size
        return ServedModel(self.spec, parameters, policy, self.is_in_order, *of_ranks)

    def variants(self) -> list[Variant]:
        """Return what is to be compiled, without repetition."""
        with using(self.table):
            model = self.model(open_parameters(self.folder, self.spec))
            return serving_variants(model, self.kv, self.sizes) if self.head is None else head_variants(model, self.head)


class Precompilation:
    """Kernels that are compiled meanwhile, unless they were before, for the same model and sizes, from the same sources.

    A thread finds the variants and sends them to a compile server; another one receives its answers. A launch waits for its
    kernel, which is then compiled next. A process that ends meanwhile waits for the first thread only, as torch's functions
    must not be interrupted.

    parameters  of the model, as `open_parameters` returns them; not changed
    """

    def __init__(self, job: CompileJob, parameters: Mapping[str, Parameter | StoredParameter]) -> None:
        self._job, self._mark = job, get_cache_manager(_fingerprint(job, parameters))
        self._changed = Condition()
        self._indices: dict[Variant, int] | None = None  # None: they are not found yet
        self._left: set[int] = set()
        self._errors: list[str] = []
        self._waited_s, self._is_stopped = 0.0, False
        self._start_s, self._found_s = time.perf_counter(), 0.0
        self._finding: Thread | None = None
        self._collecting = Thread(target=self._collect, name="precompile", daemon=True)
        if self._mark.get_file(_DONE) is None:
            self._server = _Server(job.arch)
            self._finding = Thread(target=self._find, name="find kernels")
            BOUND.before_first.append(self.wait_for)
            try:
                self._finding.start()
            except RuntimeError as error:  # the system has no thread for it
                self._finding = None
                self._errors.append(str(error))
                self._finish()

    @property
    def is_needed(self) -> bool:
        """Whether there was anything to compile."""
        return self._finding is not None

    def wait_for(self, launch: Launch) -> None:
        """Wait until the code of a launch is compiled, if it will be."""
        if self._finding is None:
            return
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._indices is not None)
            index = (self._indices or {}).get(variant_of(launch))
            if index in self._left:
                with suppress(WorkerError):  # the thread is about to say so
                    self._server.send(index)
                self._changed.wait_for(lambda: index not in self._left)
        self._waited_s += time.perf_counter() - start

    def wait(self) -> bool:
        """Wait for the end, and return whether all is compiled; the rest is compiled at its first launch, which is logged."""
        if self._finding is not None:
            self._finding.join()
            if self._collecting.ident is not None:  # it was started
                self._collecting.join()
        return not self._errors

    def stop(self) -> None:
        """Give up what is not compiled yet, and end the server. For an engine that is closed."""
        if self._finding is not None:
            self._is_stopped = True
            self._server.stop()

    def _find(self) -> None:
        """Find the variants, and send them."""
        try:
            variants = sorted(self._job.variants(), key=lambda variant: variant.kernel != _LONGEST)
            self._found_s = time.perf_counter() - self._start_s
            with self._changed:
                self._server.send(variants)
                self._left = set(range(len(variants)))
                self._indices = {variant: index for index, variant in enumerate(variants)}
                self._changed.notify_all()
            self._collecting.start()
        except Exception as error:  # noqa: BLE001 - without variants or a server kernels are compiled when they are launched
            self._errors.append(f"{type(error).__name__}: {error}")
            self._finish()

    def _collect(self) -> None:
        """Take what the server says of each variant."""
        try:
            for index, error in self._server.results(len(self._left)):
                if error is not None:
                    self._errors.append(error)
                with self._changed:
                    self._left.discard(index)
                    self._changed.notify_all()
        except WorkerError as error:
            self._errors.append(str(error))
        self._finish()

    def _finish(self) -> None:
        """End the server, and note that all is compiled, if it is."""
        BOUND.before_first.remove(self.wait_for)
        with self._changed:
            self._indices = self._indices or {}
            self._left.clear()
            self._changed.notify_all()
        self._server.close()
        if self._is_stopped:
            return
        if self._errors:
            what = f"{len(self._errors)} failed, the first is {self._errors[0]}"
            logger.warning("kernels are compiled when they are launched first, not ahead: %s", what)
            return
        self._mark.put("", _DONE, binary=False)
        told = len(self._indices), self._found_s, time.perf_counter() - self._start_s, self._waited_s
        logger.info("%d kernels were found in %.1f s and compiled in %.1f s, of which %.1f s were waited for", *told)


class _Server:
    """A compile server; see quire/kernels/triton/compile_server.py. Closing the connection ends it."""

    def __init__(self, arch: int) -> None:
        self._connection, theirs = Pipe()
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        # The package may have been found by what the program put into sys.path.
        found = [str(Path(quire.__file__).parents[1]), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, found))
        command = [sys.executable, "-m", "quire.kernels.triton.compile_server", str(theirs.fileno()), str(arch)]
        # A terminal's interrupt is for this process, not for the compiler, which would report an error of its own.
        self._process = subprocess.Popen(
            command, env=environment, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, process_group=0
        )
        theirs.close()

    def send(self, order: Sequence[Variant] | int) -> None:
        """Send variants, or the number of one that is wanted next; by one thread at a time.

        Raises WorkerError if it has ended.
        """
        try:
            self._connection.send(order)
        except OSError as error:
            raise self._error(error) from None

    def results(self, count: int) -> Iterator[tuple[int, str | None]]:
        """Yield the numbers of so many variants as they are done, with what was wrong. Raises WorkerError if it ends before."""
        try:
            for _ in range(count):
                yield self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._error(error) from None

    def _error(self, error: Exception) -> WorkerError:
        return WorkerError(f"the compile server ended with {self._process.wait()} ({type(error).__name__})")

    def stop(self) -> None:
        """End the server at once, also while results are waited for, and wait for its end."""
        self._process.terminate()
        self._process.wait()

    def close(self) -> None:
        """End the server, and wait for its end."""
        self._connection.close()
        self._process.wait()


def compile_all(variants: Sequence[Variant], arch: int) -> list[str]:
    """Compile variants with a compile server, and return what is wrong with those that cannot be, the kernel's name first."""
    server = _Server(arch)
    try:
        server.send(variants)
        return [error for _, error in server.results(len(variants)) if error is not None]
    finally:
        server.close()


def arch_of(device: torch.device) -> int:
    """Return the compute capability of a CUDA device as orders have it."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _fingerprint(job: CompileJob, parameters: Mapping[str, Parameter | StoredParameter]) -> str:
    """Return what changes with what is to be compiled, the sources of the kernels, of what launches them, and Triton."""
    package = Path(quire.__file__).parent
    sources = [path.read_bytes() for pattern in _SOURCES for path in sorted(package.glob(pattern))]
    content = repr((job._replace(folder=Path()), job.model(parameters).kinds(), triton.__version__)).encode()
    return hashlib.sha256(b"\0".join([content, *sources])).hexdigest()
