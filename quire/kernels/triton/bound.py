"""Bound launches: a compiled kernel is launched with its packed arguments by one call of the CUDA driver.

Triton finds out at every launch which compiled code its arguments need, in about 50 us of Python. Here Triton is asked once for
each kind of launch; a launch compares the kind, packs its arguments and calls cuLaunchKernelEx.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor

from quire.base.logging import get_logger
from quire.kernels.triton.cache_keys import hash_callees
from quire.kernels.triton.tma_tensor import with_descriptors

if TYPE_CHECKING:
    from quire.kernels.triton.launching import Launch

logger = get_logger(__name__)

_FORMATS = {"i32": "i", "i64": "q", "u64": "Q", "fp32": "f"}
"""Of `struct`, by Triton's names of types; pointers have a star in front of that of their elements."""
_SCRATCH = "QQ"
"""What Triton appends to a kernel's arguments: two pointers, null for kernels without working memory."""
_WIDE, _UNSIGNED = 1 << 31, 1 << 63
_ALIGNMENT = 16
_PDL, _PARAM_BUFFER, _PARAM_SIZE, _INVALID_CONTEXT = 6, 1, 2, 201
"""Numbers of cuda.h."""

Values = Mapping[str, Tensor | int | float | None]


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a union of 64 bytes, of which one number is used."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Driver(Protocol):
    """What launching needs of the CUDA driver's library, by its names there."""

    cuLaunchKernelEx: Callable[..., int]
    cuFuncGetParamInfo: Callable[..., int]
    cuGetErrorString: Callable[..., int]


def cuda_driver() -> Driver:
    """Return the driver's library. Raises OSError or AttributeError where there is none, or an old one."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchKernelEx.argtypes = (ctypes.c_void_p,) * 4
    library.cuFuncGetParamInfo.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
    library.cuGetErrorString.argtypes = (ctypes.c_int, ctypes.c_void_p)
    return library  # type: ignore[return-value]


class _Code:
    """Compiled code on one device, and the memory in which its launch is described.

    formats  of its arguments, without those that were compiled in
    order    of its arguments, as indices into the pointers and then the numbers of a launch
    """

    def __init__(self, driver: Driver, device: int, function: int, metadata: Any, formats: str, order: Sequence[int]) -> None:
        self._driver, self._device, self._function, self._lock = driver, device, ctypes.c_void_p(function), Lock()
        _check_layout(driver, self._function, formats + _SCRATCH)
        self._size, self._attribute = ctypes.c_size_t(struct.calcsize("@" + formats + _SCRATCH)), _Attribute(id=_PDL, value=1)
        self._pack, self._buffer = struct.Struct("@" + formats).pack_into, ctypes.create_string_buffer(self._size.value)
        where, size = ctypes.addressof(self._buffer), ctypes.addressof(self._size)
        self._extra = (ctypes.c_void_p * 5)(_PARAM_BUFFER, where, _PARAM_SIZE, size, 0)
        self._config = _Config(1, 1, 1, 32 * metadata.num_warps, 1, 1, metadata.shared, None, ctypes.pointer(self._attribute))
        self._config.num_attributes = int(metadata.launch_pdl)
        self._call = ctypes.addressof(self._config), self._function, None, ctypes.addressof(self._extra)
        self._order, self._start = _getter(order), driver.cuLaunchKernelEx
        self._grid: tuple[int, ...] = ()
        self._stream: int | None = None

    def launch(self, grid: tuple[int, ...], values: Sequence[int | float], stream: int) -> None:
        """Launch with these pointers and numbers.

        Raises RuntimeError with what the driver says, and struct.error for numbers that the code does not take.
        """
        with self._lock:  # threads share the description
            self._pack(self._buffer, 0, *self._order(values))
            if grid != self._grid:
                self._grid, config = grid, self._config
                config.grid_x, config.grid_y, config.grid_z = (*grid, 1, 1)[:3]
            if stream != self._stream:
                self._stream = self._config.stream = stream
            status = self._start(*self._call)
            if status == _INVALID_CONTEXT:  # nothing has used the device in this thread yet
                torch.cuda.set_device(self._device)
                status = self._start(*self._call)
        if status != 0:
            raise RuntimeError(f"CUDA error at a launch: {_error_text(self._driver, status)}")


def _check_layout(driver: Driver, function: ctypes.c_void_p, formats: str) -> None:
    """Raise ValueError unless a function has these arguments, at their natural places."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    found: list[tuple[int, int]] = []
    for index in range(len(formats) + 1):
        if driver.cuFuncGetParamInfo(function, index, ctypes.addressof(offset), ctypes.addressof(size)) != 0:
            break
        found.append((offset.value, size.value))
    sizes = [struct.calcsize(each) for each in formats]
    ends = [struct.calcsize("@" + formats[: index + 1]) for index in range(len(formats))]
    if found != [(end - own, own) for end, own in zip(ends, sizes, strict=True)]:
        raise ValueError(f"the compiled kernel has arguments at {found}, not those of {formats!r}")


def _error_text(driver: Driver, status: int) -> str:
    text = ctypes.c_char_p()
    driver.cuGetErrorString(status, ctypes.addressof(text))
    return (text.value or b"unknown error").decode() + f" ({status})"


class _Kind(NamedTuple):
    """What launches have in common whose kernel, constants, options and names and types of arguments are equal.

    tensors, numbers  take the pointers and the numbers out of the arguments
    specialized       indices of the numbers for which code is specialised: 1, multiples of 16 and others
    names             of the tensors, then of the numbers
    codes             by what else code is compiled for; None: Triton launches it
    """

    tensors: Callable[[Values], tuple[Tensor, ...]]
    numbers: Callable[[Values], tuple[int | float, ...]]
    specialized: tuple[int, ...]
    names: tuple[str, ...]
    codes: dict[tuple[object, ...], _Code | None]


class BoundLauncher:
    """Launches kernels, whose code it finds with Triton when a kind of launch comes first.

    Triton launches what it cannot: other kinds of arguments or kernels, another version's conventions, and what fails at first.
    driver        None: the system's, which is looked for at the first launch
    before_first  called, from any thread, before Triton compiles the code of a launch, or finds it in its cache
    """

    def __init__(self, driver: Driver | None = None) -> None:
        self._driver = driver
        self._kinds: dict[tuple[object, ...], _Kind | None] = {}
        self._told: set[str] = set()
        self.before_first: list[Callable[[Launch], None]] = []

    def run(self, launch: Launch) -> None:
        """Launch on the current stream of the current device."""
        kernel, grid, arguments, constants, warps, stages, fuses, begins = launch
        kinds = map(type, arguments.values())
        key = (kernel.fn, warps, stages, fuses, begins, *constants, *constants.values(), *arguments, *kinds)
        try:
            kind = self._kinds[key]
        except KeyError:
            kind = self._kinds[key] = _kind_of(launch)
            if kind is None:
                self._prepare(launch)
        if kind is None:
            run_by_triton(launch)
            return
        active = triton.runtime.driver.active
        device = active.get_current_device()
        tensors, numbers = kind.tensors(arguments), kind.numbers(arguments)
        addresses = tuple(map(_address_of, tensors))
        own = (device, *map(_dtype_of, tensors), *_classes(addresses, numbers, kind.specialized))
        values, stream = addresses + numbers, active.get_current_stream(device)
        code = kind.codes.get(own)
        if code is not None:
            try:
                code.launch(grid, values, stream)
                return
            except struct.error:  # a number is too wide: there is other code for it
                pass
        self._run_rare(launch, kind, (*own, *_widths(numbers)), values, device, stream)

    def _warn(self, launch: Launch, reason: str) -> None:
        """Say once for each reason that a launch goes through Triton: an old driver is one for all kernels."""
        if reason not in self._told:
            self._told.add(reason)
            name = launch.kernel.fn.__name__
            told = "%s, and any other kernel for the same reason, is launched by Triton, which takes longer: %s"
            logger.warning(told, name, reason)

    def _prepare(self, launch: Launch) -> None:
        for prepare in tuple(self.before_first):
            prepare(launch)

    def _run_rare(
        self, launch: Launch, kind: _Kind, own: tuple[object, ...], values: Sequence[int | float], device: int, stream: int
    ) -> None:
        """Launch what comes first, has wide numbers, or is left to Triton."""
        code = kind.codes.get(own)
        if code is not None:
            code.launch(launch.grid, values, stream)
        elif own in kind.codes:
            run_by_triton(launch)
        else:
            kind.codes[own] = self._run_first(launch, kind, values, device, stream)

    def _run_first(self, launch: Launch, kind: _Kind, values: Sequence[int | float], device: int, stream: int) -> _Code | None:
        """Launch what came first, and return its code; None: Triton has launched it, and is to."""
        self._prepare(launch)
        try:
            if self._driver is None:
                self._driver = cuda_driver()
            code = _load(self._driver, compiled_of(launch), kind, device)
            code.launch(launch.grid, values, stream)
        except (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            # Another version of Triton or of the driver, most likely. What else is wrong Triton raises again.
            self._warn(launch, str(error))
            run_by_triton(launch)
            return None
        return code


def run_by_triton(launch: Launch) -> None:
    """Launch as Triton does."""
    hash_callees(launch.kernel)
    launch.kernel[launch.grid](**with_descriptors(launch.arguments), **launch.constants, **launch.options)


def compiled_of(launch: Launch) -> Any:
    """Return the CompiledKernel that Triton would launch."""
    hash_callees(launch.kernel)
    return launch.kernel.warmup(grid=(1,), **with_descriptors(launch.arguments), **launch.constants, **launch.options)


_dtype_of, _address_of = attrgetter("dtype"), Tensor.data_ptr


def _kind_of(launch: Launch) -> _Kind | None:
    """Return the kind of a launch; None: it has arguments that only Triton can pass."""
    arguments = launch.arguments
    tensors = tuple(name for name, value in arguments.items() if isinstance(value, Tensor))
    numbers = tuple(name for name, value in arguments.items() if type(value) in (int, float))
    if len(tensors) + len(numbers) + sum(value is None for value in arguments.values()) < len(arguments):
        return None
    is_plain = {param.name: bool(param.do_not_specialize) for param in launch.kernel.params}
    specialized = tuple(index for index, name in enumerate(numbers) if isinstance(arguments[name], int) and not is_plain[name])
    return _Kind(_getter(tensors), _getter(numbers), specialized, (*tensors, *numbers), {})


def _getter(keys: Sequence[Any]) -> Callable[[Any], Any]:
    """Return what takes the values of these keys out of a mapping or a sequence, as a tuple; fast for many."""
    if len(keys) > 1:
        return itemgetter(*keys)
    return lambda values: tuple([values[key] for key in keys])


def _classes(addresses: Sequence[int], numbers: Sequence[int | float], specialized: tuple[int, ...]) -> tuple[object, ...]:
    """Return what else of the values code is compiled for but `_widths`, at least as finely as Triton tells them apart."""
    found: tuple[object, ...] = ()
    for address in addresses:
        if address % _ALIGNMENT:
            found = tuple([each % _ALIGNMENT == 0 for each in addresses])
            break
    for index in specialized:
        number = numbers[index]
        found += (1 if number == 1 else number % _ALIGNMENT == 0 and _ALIGNMENT,)
    return found


def _widths(numbers: Sequence[int | float]) -> list[tuple[int, bool]]:
    """Return which numbers do not fit into 32 bits, and whether they fit into 63."""
    return [(index, number >= _UNSIGNED) for index, number in enumerate(numbers) if not -_WIDE <= number < _WIDE]


def _load(driver: Driver, compiled: Any, kind: _Kind, device: int) -> _Code:
    """Return compiled code on a device. Raises ValueError where it takes more than its arguments."""
    metadata = compiled.metadata
    takes = metadata.num_ctas, metadata.launch_cooperative_grid, metadata.global_scratch_size, metadata.profile_scratch_size
    if takes != (1, False, 0, 0):
        raise ValueError(f"it needs clusters or working memory: {takes}")
    signature: Mapping[str, str] = compiled.src.signature
    formats, order = "", list[int]()
    for name, type_name in signature.items():
        if type_name == "constexpr":
            continue
        formats += "Q" if type_name.startswith("*") else _FORMATS[type_name]
        order.append(kind.names.index(name))
    _, function, _, _, max_threads = triton.runtime.driver.active.utils.load_binary(
        compiled.name, compiled.kernel, metadata.shared, device
    )
    if 32 * metadata.num_warps > max_threads:
        raise ValueError(f"it takes too many registers for {metadata.num_warps} warps")
    return _Code(driver, device, function, metadata, formats, order)
