"""NativeVocabulary: the packed embedding and LM head of a model whose layers are in other processes, for draft heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from types import ModuleType

from torch import Tensor

from quire.contracts.model_spec import DTYPE_BYTES, ModelSpec
from quire.model.native_model import NativeModelBuilder
from quire.model.native_weights import NativeWeight
from quire.quant.parameters import DenseOrQuantized, Parameter, StoredParameter

_NAMES = ("embed.weight", "lm_head.weight", "lm_head.bias")


class NativeVocabulary:
    """Packs each of both only when a draft head reads it, as heads may have their own.

    spec, parameters  of the whole model, as `open_parameters` returns them; the others are not opened
    quantize          as in NativeDecoder
    """

    def __init__(
        self,
        native: ModuleType,
        spec: ModelSpec,
        parameters: Mapping[str, Parameter | StoredParameter],
        quantize: Callable[[str, Tensor], DenseOrQuantized] | None = None,
    ) -> None:
        own = {name: parameters[name] for name in _NAMES if name in parameters}
        self._is_tied = own.get("lm_head.weight", own["embed.weight"]) is own["embed.weight"]
        self._builder = NativeModelBuilder(native, None, spec, own, {}, quantize)

    @cached_property
    def embedding(self) -> NativeWeight:
        """The rows of the vocabulary."""
        return self._builder.pack_vocabulary("embed")

    @cached_property
    def head(self) -> NativeWeight:
        """The LM head; the embedding if they are tied."""
        return self.embedding if self._is_tied else self._builder.pack_vocabulary("lm_head")


def vocabulary_bytes(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the bytes of the embedding and the LM head, not quantised; shapes: of all parameters."""
    return sum(math.prod(shapes[name]) for name in _NAMES if name in shapes) * DTYPE_BYTES[spec.dtype]
