"""StoredParts: checked access to the tensors that a checkpoint stores for one quantised module."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quire.base.errors import ModelFormatError
from quire.quant.float8 import Float8Weight
from quire.quant.weight import CodeForm, QuantizedWeight, StoredWeight

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS = (torch.int32, torch.int64)


class StoredParts:
    """Tensors of a module by their suffix.

    module  the stored name of the module, with its prefix
    parts   "qweight", "weight_scale", ... -> tensor, still in the file
    """

    def __init__(self, module: str, parts: Mapping[str, Tensor]) -> None:
        self.module = module
        self._parts = parts

    def __contains__(self, part: str) -> bool:
        return part in self._parts

    def dtype(self, part: str) -> torch.dtype | None:
        """Return the dtype of a part; None: it is not stored."""
        return self._parts[part].dtype if part in self._parts else None

    def names(self) -> list[str]:
        """Return the suffixes that are stored."""
        return list(self._parts)

    def integers(
        self, shape: tuple[int, int], codes: CodeForm, load: Callable[[], QuantizedWeight], form: str = ""
    ) -> StoredWeight:
        """Return the weight of these parts, created by `load`; codes and form as in StoredWeight."""
        return StoredWeight(shape, load, tuple(self._parts.values()), form=form, codes=codes)

    def floats(self, shape: tuple[int, int], load: Callable[[], Tensor]) -> StoredWeight:
        """Return the weight of these parts, which have no integer form."""
        return StoredWeight(shape, load, tuple(self._parts.values()), is_integer=False)

    def float8(self, shape: tuple[int, int], columns: int, load: Callable[[], Float8Weight]) -> StoredWeight:
        """Return the float8 weight of these parts, with `columns` columns per scale."""
        tensors, codes = tuple(self._parts.values()), CodeForm("float8", columns)
        return StoredWeight(shape, lambda: load().dequantize(), tensors, is_integer=False, load_float8=load, codes=codes)

    def take(self, part: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int | None, ...]) -> Tensor:
        """Return a part that has one of the dtypes and one of the shapes; None in a shape is any size.

        Raises ModelFormatError with the tensor's name, what it is and what it must be.
        """
        tensor = self._parts.get(part)
        if tensor is None:
            raise ModelFormatError(f"{self.module}.{part} is missing, but there is {self.module}.{', '.join(self._parts)}")
        if tensor.dtype not in dtypes:
            raise self.wrong(part, f"of {' or '.join(map(str, dtypes))}")
        if not any(_fits(tuple(tensor.shape), shape) for shape in shapes):
            wanted = " or ".join(str(["any" if size is None else size for size in shape]).replace("'", "") for shape in shapes)
            raise self.wrong(part, f"of shape {wanted}")
        return tensor

    def wrong(self, part: str, expected: str) -> ModelFormatError:
        """Return the error for a part that is not as expected."""
        tensor = self._parts[part]
        return ModelFormatError(
            f"{self.module}.{part} has {list(tensor.shape)} of {tensor.dtype}, expected one {expected}; "
            "the weights and the quantisation config contradict each other"
        )

    def damaged(self, part: str, problem: str) -> ModelFormatError:
        """Return the error for a part with invalid values."""
        return ModelFormatError(f"{self.module}.{part} {problem}; the file is damaged")

    def scale(self, part: str, stored: Tensor) -> Tensor:
        """Return a part, already taken, as f32. Raises ModelFormatError if a value is not finite."""
        values = stored.float()
        if not bool(torch.isfinite(values).all()):
            raise self.damaged(part, "holds values that are not finite")
        return values

    def num_groups(self, num_columns: int, group_size: int | None) -> int:
        """Return the number of groups per row. Raises ModelFormatError if the group size does not divide the columns."""
        if group_size is None:
            return 1
        if num_columns % group_size:
            raise ModelFormatError(
                f"{self.module} has {num_columns} input columns, which group_size {group_size} of the quantisation config "
                "does not divide"
            )
        return num_columns // group_size


def _fits(got: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(got) == len(wanted) and all(size is None or size == has for has, size in zip(got, wanted, strict=True))
