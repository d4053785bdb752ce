"""NativeHead: a LayerHead on the native CPU kernels; a whole run of drafts is one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.reference.attention import AttentionMetadata
from quire.kv.pool import KvPool
from quire.model.heads.head_spec import LayerHead
from quire.model.heads.native_vocabulary import NativeVocabulary
from quire.model.native_decoder import NativeDecoder
from quire.model.native_model import NativeModelBuilder, NativeParts
from quire.model.token_runs import TokenRuns
from quire.quant.parameters import Parameter

_ENTRIES = {"joined": 1, "beside": 2}
_SPARE_POSITIONS = 64
"""Additional positions for drafts after the longest sequence."""


class _NativeHeadBuilder(NativeModelBuilder):
    """Builds the native plan of a draft head; missing parts are the target's."""

    def __init__(self, head: LayerHead, target: NativeDecoder | NativeVocabulary, *args: Any) -> None:
        super().__init__(*args)
        self._head = head
        self._target = target

    def build(self) -> NativeParts:
        """See NativeModelBuilder."""
        head, plan, body = self._head, self._plan, self._spec
        embedding = self._pack("embed") if "embed.weight" in self._parameters else self._target.embedding
        output = self._pack("lm_head") if "lm_head.weight" in self._parameters else self._target.head
        plan.set_embedding(embedding, None, body.embed_scale)
        plan.set_head(output, body.logit_scale, body.final_softcap or 0.0)
        for norm, spec, name in (
            (plan.final_norm, body.final_norm if head.has_final_norm else None, "final_norm"),
            (plan.embed_norm, head.embed_norm, "embed_norm"),
            (plan.feature_norm, head.feature_norm, "feature_norm"),
        ):
            self._set_norm(norm, spec, name, body.hidden_size)
        plan.set_entry(_ENTRIES[head.entry], self._pack("fuse"), head.is_residual_normed, head.recycles_normed)
        return self._complete(embedding, output, [self._build_layer(body.layers[0], "layers.0.")])


class NativeHead(NativeDecoder):
    """Runs a draft head next to its model, whose packed embedding and LM head it shares if it has none.

    max_model_len  the longest sequence; some rope scalings depend on it
    quantize       applied to every weight by its name just before it is packed
    """

    def __init__(
        self,
        native: ModuleType,
        head: LayerHead,
        target: NativeDecoder | NativeVocabulary,
        max_model_len: int,
        quantize: Callable[[str, Tensor], Parameter] | None = None,
    ) -> None:
        self.head_spec = head
        self._target = target
        self._vocabulary = None if head.vocabulary is None else head.vocabulary.contiguous()
        super().__init__(native, head.body, dict(head.parameters), max_model_len, quantize)
        self._extend_angles(max_model_len + _SPARE_POSITIONS)
        self.head_spec = replace(head, parameters={})  # they are packed already

    def _builder(self, *args: Any) -> NativeModelBuilder:
        return _NativeHeadBuilder(self.head_spec, self._target, *args)

    def enter(
        self, token_ids: Tensor, positions: Tensor, step: AttentionMetadata, kv: KvPool, features: Tensor, rows: list[int]
    ) -> Tensor:
        """Compute tokens after their features, store their KV, and return the logits [R, V'] f32 of some rows.

        token_ids, positions  [T] i64: the token i + 1 of each place i, and i
        features              [T, feature_size] f32, or [T, H] of what `recycled` returned
        rows                  R indices of tokens
        """
        self._bind(kv)
        wanted = torch.tensor(rows, dtype=torch.int32)
        logits = torch.empty(len(rows), self.spec.vocab_size)
        place = _Place(step)
        self._plan.num_threads = torch.get_num_threads()
        self._plan.enter(
            *_addresses(token_ids, positions, place),
            features.data_ptr(),
            features.shape[1],
            wanted.data_ptr(),
            len(rows),
            logits.data_ptr(),
            *((0, 0) if step.trees is None else (step.trees.num_drafts.data_ptr(), step.trees.ancestors.data_ptr())),
        )
        return logits

    def recycled(self, count: int) -> Tensor:
        """Return the features of the next positions from the first `count` rows of the last `enter`: [count, H] f32."""
        found = torch.empty(count, self.spec.hidden_size)
        self._plan.recycled(count, found.data_ptr())
        return found

    def draft(
        self,
        runs: TokenRuns,
        origins: list[int],
        kv: KvPool,
        features: Tensor,
        counts: list[int],
        least_share: float = 0.0,
    ) -> list[list[int]]:
        """As `enter`; return the most likely tokens after the last one of every sequence s: counts[s] of them, or fewer if
        their joint probability falls below least_share.

        runs      of tokens i + 1 at the places i; the block tables have room for counts[s] - 1 tokens more
        origins   positions (starts of blocks) from which on each sequence is attended to
        features  [T or more, feature_size] f32
        """
        if self._kv is not kv:
            self._bind(kv)
        vocabulary = self._vocabulary
        self._plan.num_threads = torch.get_num_threads()
        return self._plan.draft(
            runs.token_ids,
            runs.starts,
            runs.ends,
            origins,
            runs.addresses,
            len(runs.tables[0]),
            features.data_ptr(),
            features.shape[1],
            counts,
            0 if vocabulary is None else vocabulary.data_ptr(),
            least_share,
        )


class _Place:
    """The arrays of an AttentionMetadata in the form of the native plan."""

    def __init__(self, step: AttentionMetadata) -> None:
        self.slots = step.slots
        self.starts = _int32(step.query_starts)
        self.lengths = _int32(step.context_lens)
        self.tables = np.ascontiguousarray(step.block_tables.numpy(), dtype=np.int32)


def _addresses(token_ids: Tensor, positions: Tensor, place: _Place) -> tuple[int, ...]:
    return (
        token_ids.data_ptr(),
        positions.data_ptr(),
        place.slots.data_ptr(),
        token_ids.shape[0],
        len(place.lengths),
        place.starts.ctypes.data,
        place.lengths.ctypes.data,
        place.tables.ctypes.data,
        place.tables.shape[1],
    )


def _int32(values: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)
