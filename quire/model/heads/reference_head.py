"""ReferenceHead: a LayerHead on the torch reference kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.reference.attention import AttentionMetadata
from quire.kernels.reference.norm import normalize
from quire.kernels.reference.rope import cos_sin, inverse_frequencies
from quire.kv.pool import KvPool
from quire.model.decoder import Decoder, DecoderLayer, LayerCache, LayerInputs
from quire.model.heads.head_spec import LayerHead
from quire.model.token_runs import TokenRuns

DRAFT_SHARPNESS = 4.0
"""Logits are multiplied by it to estimate the probability of greedy drafts; SHARPNESS in csrc/draft_run.cpp."""


class ReferenceHead:
    """Runs a draft head next to its model.

    max_model_len  the longest sequence; some rope scalings depend on it
    """

    def __init__(self, head: LayerHead, target: Decoder, max_model_len: int) -> None:
        self.spec = head
        body = head.body
        self._dtype: torch.dtype = getattr(torch, body.dtype)
        self._parameters = {name: tensor.to(self._dtype) for name, tensor in head.parameters.items()}
        self._layer = DecoderLayer(body.layers[0], "layers.0.", self._parameters)
        rope = body.layers[0].attention.rope
        self._rope = rope
        self._frequencies = None if rope is None else inverse_frequencies(rope, max_model_len)
        self._target = target
        self._embedding = self._parameters.get("embed.weight", target.parameter("embed.weight"))
        self._recycled = torch.empty(0)

    @torch.inference_mode()
    def enter(
        self, token_ids: Tensor, positions: Tensor, step: AttentionMetadata, kv: KvPool, features: Tensor, rows: list[int]
    ) -> Tensor:
        """Compute tokens after their features, store their KV, and return the logits [R, V'] of some rows.

        token_ids, positions  [T] i64: the token i + 1 of each place i, and i
        features              [T, feature_size], or [T, H] of what `recycled` returned
        rows                  R indices of tokens
        """
        head, body = self.spec, self.spec.body
        features = features.to(self._dtype)
        e = F.embedding(token_ids, self._embedding)  # pyright: ignore[reportArgumentType]
        if body.embed_scale != 1.0:
            e = e * body.embed_scale
        if head.embed_norm is not None:
            e = normalize(e, head.embed_norm, self._parameters["embed_norm.weight"])
        attended = None
        if head.entry == "joined":
            if head.feature_norm is not None:
                features = normalize(features, head.feature_norm, self._parameters["feature_norm.weight"])
            x = self._fuse(torch.cat((e, features), -1))
        else:
            x = features if features.shape[1] == body.hidden_size else self._fuse(features)
            layer_norm = body.layers[0].attn_in
            normed = x if layer_norm is None else normalize(x, layer_norm, self._parameters["layers.0.attn_in.weight"])
            attended = torch.cat((e, normed), -1)
            x = normed if head.is_residual_normed else x
        rope = self._rope
        angles = {} if rope is None else {rope: cos_sin(rope, self._frequencies, positions, self._dtype)}  # type: ignore[arg-type]
        x = self._layer.forward(x, angles, step, LayerCache(kv.k[0], kv.v[0]), LayerInputs(attended=attended))[
            torch.tensor(rows, dtype=torch.int64)
        ]
        normed = normalize(x, body.final_norm, self._parameters["final_norm.weight"]) if head.has_final_norm else x
        self._recycled = (normed if head.recycles_normed else x).float()
        if "lm_head.weight" in self._parameters:
            return F.linear(normed, self._parameters["lm_head.weight"])
        return self._target.logits(normed)

    def recycled(self, count: int) -> Tensor:
        """Return the features of the next positions from the first `count` rows of the last `enter`: [count, H] f32."""
        return self._recycled[:count]

    def _fuse(self, x: Tensor) -> Tensor:
        return F.linear(x, self._parameters["fuse.weight"], self._parameters.get("fuse.bias"))

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
        size = kv.spec.block_size
        token_ids, positions, step = runs.tensors(size, origins, [count - 1 for count in counts])
        features = features[: len(token_ids)]
        rows = [start - 1 for start in step.query_starts[1:]]
        positions_of_rows, lengths, tables = positions[torch.tensor(rows)], list(step.context_lens), step.block_tables
        going = list(range(len(counts)))  # the sequences of the rows
        found: list[list[int]] = [[] for _ in going]
        ways = [1.0] * len(going)
        while True:
            logits = self.enter(token_ids, positions, step, kv, features, rows)
            shares, best = logits.float().mul(DRAFT_SHARPNESS).softmax(-1).max(-1)
            chosen = best if self.spec.vocabulary is None else self.spec.vocabulary[best].long()
            kept: list[int] = []  # rows that continue; a sequence with all its drafts writes nothing more
            for row, (sequence, share, token_id) in enumerate(zip(going, shares.tolist(), chosen.tolist(), strict=True)):
                ways[sequence] *= share
                if ways[sequence] < least_share:
                    continue
                found[sequence].append(token_id)
                if len(found[sequence]) < counts[sequence]:
                    kept.append(row)
            if not kept:
                return found
            features, token_ids, tables = self.recycled(len(going))[kept], chosen[kept], tables[kept]
            going, lengths = [going[row] for row in kept], [lengths[row] + 1 for row in kept]
            positions = positions_of_rows = positions_of_rows[kept] + 1
            slots = [int(tables[row, (end - 1) // size]) * size + (end - 1) % size for row, end in enumerate(lengths)]
            rows = list(range(len(going)))
            step = AttentionMetadata(torch.tensor(slots), list(range(len(going) + 1)), lengths, tables)
