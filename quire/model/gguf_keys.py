"""GgufKeys: the metadata of one architecture as checked values, and which keys of it may not be ignored. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from quire.base.errors import UnsupportedError
from quire.base.gguf_file import GgufFile
from quire.base.logging import get_logger

logger = get_logger(__name__)

_HARMLESS = frozenset(
    ("context_length", "vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.layer_norm_rms_epsilon")
)
_CHANGES_RESULTS: dict[str, object] = {
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.sliding_window")),
    **dict.fromkeys(("attention.sliding_window_pattern", "attention.temperature_length", "attention.temperature_scale")),
    **dict.fromkeys(("attn_logit_softcapping", "expert_count", "expert_group_count", "expert_shared_count")),
    **dict.fromkeys(("expert_group_used_count", "attention.kv_lora_rank", "attention.q_lora_rank")),
    **dict.fromkeys(("expert_shared_feed_forward_length", "final_logit_softcapping", "leading_dense_block_count")),
    **dict.fromkeys(("nextn_predict_layers", "rope.dimension_sections", "rope.scaling.yarn_log_multiplier")),
    **dict.fromkeys(("router_logit_softcapping", "swin_norm", "use_parallel_residual")),
    **dict.fromkeys(("attention.scale", "embedding_scale", "expert_weights_scale", "logit_scale", "residual_scale"), 1),
    **dict.fromkeys(("rope.scale_linear", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), 1),
    **dict.fromkeys(("rope.scaling.yarn_ext_factor", "expert_gating_func", "interleave_moe_layer_step"), 1),
    **dict.fromkeys(("attention.causal", "expert_weights_norm"), True),
}
"""Keys that change results, each with the value that does not, beside 0 and false: an architecture that does not read one
refuses a file that sets it."""


class GgufKeys:
    """The keys of one architecture, without its name in front; remembers which were read."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self.metadata, self.architecture = file, file.metadata, architecture
        self._prefix = f"{architecture}."
        self._read: set[str] = set()

    def raw(self, name: str) -> object:
        """Return a value; one per layer must be the same for all layers."""
        self._read.add(name)
        found = self.metadata.raw(self._prefix + name)
        if found is None:
            return None
        if not found.kind.endswith("[]"):
            return self.metadata.number(self._prefix + name) if found.kind == "f32" else found.value
        values = cast("Sequence[object]", found.value)
        if not values or any(value != values[0] for value in values):
            raise UnsupportedError(
                f"{self.file.path}: {self._prefix}{name} differs between layers ({found}), which is not supported"
            )
        return values[0]

    def integer(self, name: str) -> int | None:
        """Return an integer >= 0, None where there is none."""
        value = self.raw(name)
        if value is not None and (type(value) is not int or value < 0):
            raise self.metadata.error(self._prefix + name, "an integer >= 0")
        return value

    def required(self, name: str) -> int:
        """Return an integer >= 1 that must be there."""
        value = self.integer(name)
        if not value:
            raise self.metadata.error(self._prefix + name, "an integer >= 1")
        return value

    def per_layer(self, name: str, num_layers: int) -> list[int]:
        """Return an integer >= 0 of each layer: those of an array, or one for all.

        An array may go on with those of layers that only draft.
        """
        found = self.metadata.raw(self._prefix + name)
        if found is None or not found.kind.endswith("[]"):
            return [self.integer(name) or 0] * num_layers
        self._read.add(name)
        values = cast("Sequence[object]", found.value)
        numbers = [value for value in values if type(value) is int and value >= 0]
        if len(numbers) != len(values) or len(values) not in (num_layers, self.required("block_count")):
            raise self.metadata.error(self._prefix + name, f"{num_layers} integers >= 0, one for each layer")
        return numbers[:num_layers]

    def numbers(self, name: str) -> list[float] | None:
        """Return an array of numbers, which need not be finite; None where there is none."""
        self._read.add(name)
        found = self.metadata.array(self._prefix + name, "f32")
        return None if found is None else [float(value) for value in found]  # type: ignore[arg-type]

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number; without a default it must be there."""
        value = self.raw(name)
        value = default if value is None else value
        if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
            raise self.metadata.error(self._prefix + name, "a number")
        return float(value)  # type: ignore[arg-type]

    def sections(self, name: str) -> None:
        """Take note of an array that does not change results."""
        self._read.add(name)

    def flags(self, name: str) -> list[bool] | None:
        """Return an array of booleans, None where there is none or something else."""
        found = self.metadata.raw(self._prefix + name)
        if found is None or found.kind != "bool[]":
            return None
        self._read.add(name)
        return [bool(value) for value in cast("Sequence[int]", found.value)]

    def has_tensor(self, name: str) -> bool:
        """Return whether the file holds a tensor."""
        return name in self.file.tensors

    def refuse_unread(self) -> None:
        """Raise UnsupportedError for a key that changes results and was not read; mention the others in the log."""
        unread = [key for key in self.metadata if key.startswith(self._prefix) and key[len(self._prefix) :] not in self._read]
        for key in unread:
            name, found = key[len(self._prefix) :], self.metadata.raw(key)
            value = None if found is None else found.value
            is_neutral = not value or value == _CHANGES_RESULTS.get(name)
            if name == "attention.causal":
                is_neutral = value is True
            if name in _CHANGES_RESULTS and not is_neutral:
                raise UnsupportedError(f"{self.file.path}: {key} ({found}) is not supported in {self.architecture!r} models")
            if name not in _HARMLESS and not is_neutral:
                logger.info("%s: %s is not known and ignored", self.file.path, key)
