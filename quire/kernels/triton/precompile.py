"""The variant of a launch."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.triton.launching import Argument, Launch
from quire.kernels.triton.tma_tensor import TmaTensor
from quire.kernels.triton.variant import Pointer, Variant

_ALIGNMENT = 16
_WIDE = 1 << 31


def variant_of(launch: Launch) -> Variant:
    """Return the variant of a launch, whose tensors may be on the device "meta"."""
    is_plain = {param.name: bool(param.do_not_specialize) for param in launch.kernel.params}
    arguments = tuple((name, _stand_in(value, is_plain[name])) for name, value in launch.arguments.items())
    options = tuple(launch.options.items())
    return Variant(launch.kernel.fn.__module__, launch.kernel.fn.__name__, arguments, tuple(launch.constants.items()), options)


def _stand_in(value: Argument, is_plain: bool) -> Pointer | TmaTensor | int | float | None:
    if isinstance(value, TmaTensor):
        return TmaTensor(Pointer(str(value.tensor.dtype).removeprefix("torch."), 0), value.box, value.box)
    if isinstance(value, Tensor):
        is_aligned = value.storage_offset() * value.itemsize % _ALIGNMENT == 0
        return Pointer(str(value.dtype).removeprefix("torch."), 0 if is_aligned or is_plain else value.itemsize)
    if value is None or isinstance(value, float):
        return None if value is None else 0.5
    if value == 1 and not is_plain:
        return 1
    unit = _ALIGNMENT if value % _ALIGNMENT == 0 and not is_plain else _ALIGNMENT + 1
    return unit if -_WIDE <= value < _WIDE else _WIDE * unit + (unit - _ALIGNMENT)
