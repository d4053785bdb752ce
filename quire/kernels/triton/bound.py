"""Bound launches: a compiled kernel is launched with its packed arguments by one call of the CUDA driver.

Triton's own path finds out at every launch which compiled code its arguments need, in about 50 us of Python. Here the code is
found with Triton once for each kind of launch; a launch compares the kind, packs its arguments and calls cuLaunchKernelEx.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from threading import Lock
from typing import Any, NamedTuple, Protocol

import triton
from torch import Tensor

from quire.base.logging import get_logger
from quire.kernels.triton.settled_key import settle_key

logger = get_logger(__name__)

_FORMATS = {"i32": "i", "i64": "q", "u64": "Q", "fp32": "f"}
"""Of `struct`, by Triton's names of types; pointers have a star in front of that of their elements."""
_SCRATCH = "QQ"
"""What Triton appends to the arguments of a kernel: two pointers, which are null for kernels without working memory."""
_WIDE, _UNSIGNED = 1 << 31, 1 << 63
_ALIGNMENT = 16
_PDL, _PARAM_BUFFER, _PARAM_SIZE = 6, 1, 2

Values = Mapping[str, Tensor | int | float | None]


class Launchable(Protocol):
    """What a launch says of itself; see launching.Launch."""

    kernel: triton.JITFunction
    grid: tuple[int, ...]
    arguments: Values
    constants: Mapping[str, object]
    num_warps: int
    num_stages: int
    is_fused: bool
    is_pdl: bool

    @property
    def options(self) -> dict[str, int | bool]:
        """The compiler options."""
        ...


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

    def __init__(self, driver: Driver, function: int, metadata: Any, formats: str, order: Sequence[int]) -> None:
        packer = struct.Struct("@" + formats + _SCRATCH)
        self._driver, self._function, self._lock = driver, ctypes.c_void_p(function), Lock()
        self._pack, self._buffer = packer.pack_into, ctypes.create_string_buffer(packer.size)
        _check_layout(driver, self._function, formats + _SCRATCH)
        self._size = ctypes.c_size_t(packer.size)
        self._extra = (ctypes.c_void_p * 5)(
            _PARAM_BUFFER, ctypes.addressof(self._buffer), _PARAM_SIZE, ctypes.addressof(self._size), 0
        )
        self._attribute = _Attribute(id=_PDL, value=1)
        self._config = _Config(1, 1, 1, 32 * metadata.num_warps, 1, 1, metadata.shared, None, ctypes.pointer(self._attribute))
        self._config.num_attributes = int(metadata.launch_pdl)
        self._addresses = ctypes.addressof(self._config), self._function, None, ctypes.addressof(self._extra)
        self._order: Callable[[Sequence[int | float]], Sequence[int | float]]
        if len(order) == 1:
            (first,) = order
            self._order = lambda values: (values[first],)
        else:
            self._order = itemgetter(*order) if order else lambda values: ()

    def launch(self, grid: tuple[int, ...], values: Sequence[int | float], stream: int) -> None:
        """Launch with these pointers and numbers. Raises RuntimeError with what the driver says."""
        config, (x, y, z) = self._config, (*grid, 1, 1)[:3]
        with self._lock:
            self._pack(self._buffer, 0, *self._order(values), 0, 0)
            config.grid_x, config.grid_y, config.grid_z, config.stream = x, y, z, stream
            status = self._driver.cuLaunchKernelEx(*self._addresses)
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
    plain_tensors     whether there are pointers for whose alignment code is not specialised
    """

    tensors: Callable[[Values], Sequence[Tensor]]
    numbers: Callable[[Values], Sequence[int | float]]
    specialized: tuple[int, ...]
    codes: dict[tuple[object, ...], _Code | None]
    names: tuple[str, ...]


class BoundLauncher:
    """Launches kernels, whose code it finds with Triton when a kind of launch comes first.

    What it cannot launch by itself goes the way of Triton: other kinds of arguments or of kernels, or another ABI.
    driver  None: that of the system, looked for at the first launch
    before_first  what is called, from any thread, before Triton compiles the code of a launch, or finds it in its cache
    """

    def __init__(self, driver: Driver | None = None) -> None:
        self._driver, self._is_usable = driver, True
        self._kinds: dict[tuple[object, ...], _Kind | None] = {}
        self.before_first: list[Callable[[Launchable], None]] = []

    def run(self, launch: Launchable) -> None:
        """Launch on the current stream of the current device."""
        arguments, constants = launch.arguments, launch.constants
        options = launch.num_warps, launch.num_stages, launch.is_fused, launch.is_pdl
        values = arguments.values()
        key = (launch.kernel.fn, *options, *constants, *constants.values(), *arguments, *map(type, values))
        try:
            kind = self._kinds[key]
        except KeyError:
            kind = self._kinds[key] = _kind_of(launch)
        if kind is None or not self._is_usable:
            self._run_by_triton(launch)
            return
        active = triton.runtime.driver.active
        device = active.get_current_device()
        tensors, numbers = kind.tensors(arguments), kind.numbers(arguments)
        addresses = [tensor.data_ptr() for tensor in tensors]
        own = (device, *map(_dtype_of, tensors), *_classes(addresses, numbers, kind.specialized))
        try:
            code = kind.codes[own]
        except KeyError:
            code = kind.codes[own] = self._bind(launch, kind, device)
        if code is None:
            self._run_by_triton(launch)
        else:
            code.launch(launch.grid, (*addresses, *numbers), active.get_current_stream(device))

    def _run_by_triton(self, launch: Launchable) -> None:
        settle_key(launch.kernel)
        launch.kernel[launch.grid](**launch.arguments, **launch.constants, **launch.options)

    def _bind(self, launch: Launchable, kind: _Kind, device: int) -> _Code | None:
        """Return the code of a launch on a device; None: it is launched by Triton."""
        for prepare in tuple(self.before_first):
            prepare(launch)
        try:
            if self._driver is None:
                self._driver = cuda_driver()
            compiled = compiled_of(launch)
            return _load(self._driver, compiled, kind, device)
        except (AttributeError, OSError, TypeError, ValueError) as error:
            # Another version of Triton or of the driver; whatever else is wrong Triton's own path raises again.
            logger.warning("%s is launched by Triton, which takes longer: %s", launch.kernel.fn.__name__, error)
            return None


def compiled_of(launch: Launchable) -> Any:
    """Return the CompiledKernel that Triton would launch."""
    settle_key(launch.kernel)
    return launch.kernel.warmup(grid=(1,), **launch.arguments, **launch.constants, **launch.options)


_dtype_of = attrgetter("dtype")


def _kind_of(launch: Launchable) -> _Kind | None:
    """Return the kind of a launch; None: it has arguments that only Triton can pass."""
    arguments = launch.arguments
    tensors = tuple(name for name, value in arguments.items() if isinstance(value, Tensor))
    numbers = tuple(name for name, value in arguments.items() if type(value) in (int, float))
    if len(tensors) + len(numbers) + sum(value is None for value in arguments.values()) < len(arguments):
        return None
    is_plain = {param.name: bool(param.do_not_specialize) for param in launch.kernel.params}
    specialized = tuple(index for index, name in enumerate(numbers) if isinstance(arguments[name], int) and not is_plain[name])
    return _Kind(_getter(tensors), _getter(numbers), specialized, {}, (*tensors, *numbers))


def _getter(names: tuple[str, ...]) -> Callable[[Values], Any]:
    if len(names) == 1:
        (name,) = names
        return lambda values: (values[name],)
    return itemgetter(*names) if names else lambda values: ()


def _classes(addresses: Sequence[int], numbers: Sequence[int | float], specialized: tuple[int, ...]) -> tuple[object, ...]:
    """Return what else of the values code is compiled for, at least as finely as Triton tells them apart."""
    bits = 0
    for address in addresses:
        bits |= address
    found: tuple[object, ...] = () if bits % _ALIGNMENT == 0 else tuple(address % _ALIGNMENT == 0 for address in addresses)
    for index in specialized:
        number = numbers[index]
        found = (*found, 1 if number == 1 else number % _ALIGNMENT == 0 and _ALIGNMENT)
    for index, number in enumerate(numbers):
        if not -_WIDE <= number < _WIDE and isinstance(number, int):
            found = (*found, index, number >= _UNSIGNED)
    return found


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
        formats += "Q" if type_name.startswith("*") else _FORMATS.get(type_name, "?")
        order.append(kind.names.index(name))
    if "?" in formats:
        raise ValueError(f"it has arguments of other types: {signature}")
    _, function, _, _, max_threads = triton.runtime.driver.active.utils.load_binary(
        compiled.name, compiled.kernel, metadata.shared, device
    )
    if 32 * metadata.num_warps > max_threads:
        raise ValueError(f"it takes too many registers for {metadata.num_warps} warps")
    return _Code(driver, function, metadata, formats, order)
