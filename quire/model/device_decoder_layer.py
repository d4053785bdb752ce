"""DeviceLayer: a layer of a DeviceDecoder with separate kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quire.base.errors import InvariantError, UnsupportedError
from quire.contracts.expert_options import LossyRouting
from quire.contracts.model_spec import (
    NO_ATTENTION,
    NO_MLP,
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    RopeSpec,
)
from quire.kernels.reference.activation import apply_gate, apply_output_gate, apply_xielu, cut_gate
from quire.kernels.triton.activation import activate
from quire.kernels.triton.attention import KvCache, attend
from quire.kernels.triton.fused_attention import ProjectedAttention
from quire.kernels.triton.moe import (
    ExpertBiases,
    ExpertExtras,
    Routes,
    mixture_of_experts,
    multiply_pairs,
    pack_inputs,
    route_pairs,
)
from quire.kernels.triton.norm import Norm, add_and_normalize, normalize, normalize_unweighted
from quire.kernels.triton.qk_rope_store import Projections, Rope, place_heads
from quire.kernels.triton.step import AddsAdapters, DeviceAttentionMetadata
from quire.model.device_block_indexer import BlockAttention
from quire.model.device_embedding import norm_of
from quire.model.device_experts import ExpertExchange
from quire.model.device_heads import needs_separate_heads, turn_heads
from quire.model.device_latent import LatentAttention
from quire.model.device_layers import (
    ExpertBranches,
    FusedLayer,
    LayerTail,
    SharedBlock,
    reason_not_to_fuse,
)
from quire.model.device_linear import DeviceLinear
from quire.model.device_mixers import DeviceMixerInputs, mixer_linears
from quire.model.device_ranks import LayerRanks, PartKind
from quire.model.device_routing import DeviceRouting, RealRows
from quire.model.device_streams import LayerNorms, StreamLayer
from quire.model.device_weights import DeviceWeights, can_put_expert, put_expert, under
from quire.model.mixers import mix
from quire.parallel.expert_placement import ExpertPlacement


class DeviceLayer:
    """A layer of a DeviceDecoder with separate kernels; with `ranks`, the part of one rank."""

    def __init__(
        self,
        spec: LayerSpec,
        prefix: str,
        weights: DeviceWeights,
        ropes: Mapping[RopeSpec, Rope],
        is_in_order: bool,
        ranks: LayerRanks | None = None,
    ) -> None:
        own = under(weights.tensors, prefix)
        self._spec, self._prefix, self._is_in_order, self._ranks = spec, prefix, is_in_order, ranks
        self._head_ranks = None if ranks is None or ranks.whole.shard.has_homes else ranks  # that divide the heads
        whole_rows = under(weights.whole_rows, prefix)
        self._linears = {
            name.removesuffix(".weight"): DeviceLinear(
                parts, own.get(f"{name.removesuffix('weight')}bias"), is_in_order, whole_rows[name]
            )
            for name, parts in under(weights.linears, prefix).items()
        }
        self._experts = under(weights.experts, prefix)
        self._router = DeviceLinear((own["router.weight"],), own.get("router.bias"), is_in_order) if self._experts else None
        biases = own.get("experts.gate_up.bias"), own.get("experts.down.bias")
        self._expert_biases = None if biases[0] is None or biases[1] is None else ExpertBiases(*biases)
        self._correction, scale = own.get("correction.bias"), own.get("shared_scale.weight")
        self._shared_scale = None if scale is None else DeviceLinear((scale,), None, is_in_order)
        self._sinks, self._slopes = own.get("sinks.weight"), own.get("slopes")
        is_branched = isinstance(spec.mlp, MoeSpec) and spec.mlp.branch_norm is not None
        self._branches = ExpertBranches(spec.mlp, own) if is_branched and isinstance(spec.mlp, MoeSpec) else None
        attention = spec.attention
        self._rope = None if attention.rope is None else ropes[attention.rope]
        num_kv_heads, head_dim = attention.num_kv_heads, attention.head_dim
        self._sizes = [attention.num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * attention.value_size]
        self.attn_in = norm_of(own, "attn_in", spec.attn_in)
        self._attn_out = norm_of(own, "attn_out", spec.attn_out)
        self._mlp_in = norm_of(own, "mlp_in", spec.mlp_in)
        self._mlp_out = norm_of(own, "mlp_out", spec.mlp_out)
        # A layer that reads another's keys has only q: then the norm of k is not used.
        names = ("q_norm", "q_norm" if attention.kv_source is not None else "k_norm")
        q_norm, k_norm = (norm_of(own, name, attention.qk_norm) for name in names)
        self._qk_norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        self.kv_source = attention.kv_source
        norms = LayerNorms(self.attn_in, self._attn_out, self._mlp_in, self._mlp_out)
        self._streams = None if spec.altup is None else StreamLayer(spec, own, norms)
        self._shared = None if spec.shared_block is None else SharedBlock(spec.shared_block, own, is_in_order)
        self._tail = LayerTail(spec, own, is_in_order) if spec.per_layer_gate is not None or spec.has_scale else None
        is_learned = isinstance(spec.mlp, MlpSpec) and spec.mlp.activation == "xielu"
        self._xielu = (own["xielu_positive.weight"], own["xielu_negative.weight"]) if is_learned else None
        self.fused: FusedLayer | None = None
        self.exchange = ExpertExchange.of(spec.mlp, ranks, is_in_order, own)
        self.routing: DeviceRouting | None = None
        self._own = own
        self._context = None if ranks is None else ranks.context
        kinds = self._rope, is_in_order, prefix, self._context
        self._latent = None if attention.latent is None else LatentAttention(attention, own, *kinds)
        blocks = attention, own, self._rope, self._head_ranks, is_in_order
        self._blocks = None if attention.block_indexer is None else BlockAttention(*blocks)
        gate, bias = own.get("attn_gate.weight"), own.get("attn_gate.bias")
        rows = None if gate is None or ranks is None else (len(gate) // attention.num_heads * ranks.num_heads,)
        self._attention_gate = None if gate is None else DeviceLinear((gate,), bias, is_in_order, rows)
        self._mixer_linears = mixer_linears(own, is_in_order) if spec.mixer is not None else {}

    def watch_experts(self, lossy: LossyRouting, rows: RealRows) -> None:
        """See DeviceDecoder."""
        if isinstance(self._spec.mlp, MoeSpec):
            router = self._own["router.weight"]
            self.routing = DeviceRouting(self._spec.mlp, lossy, rows, self._correction, router.device)
        if self.exchange is not None:
            self.exchange.needs_all_rows = bool(lossy)

    def check_expert(self, weights: DeviceWeights) -> None:
        """See DeviceDecoder."""
        for name, stack in self._experts.items():
            one = weights.experts[self._prefix + name]
            if not can_put_expert(stack, one if not isinstance(one, Tensor) else one[0]):
                raise UnsupportedError(f"{self._prefix}{name} of one expert has another form than those of the layer")

    def place_experts(self, added: Mapping[int, DeviceWeights], placement: ExpertPlacement) -> None:
        """See DeviceDecoder."""
        assert self.exchange is not None
        for slot, expert in self.exchange.place(placement):
            weights = added[expert]
            for name, stack in self._experts.items():
                one = weights.experts[self._prefix + name]
                put_expert(stack, one[0] if isinstance(one, Tensor) else one, slot)
            if self._expert_biases is not None:
                self._expert_biases.gate_up[slot].copy_(weights.tensors[f"{self._prefix}experts.gate_up.bias"][0])
                self._expert_biases.down[slot].copy_(weights.tensors[f"{self._prefix}experts.down.bias"][0])

    @property
    def first_norm(self) -> Norm | None:
        """The norm of what the layer reads first; None where it normalises that itself."""
        if self._shared is not None:
            return None
        return self._mlp_in if self._spec.is_mlp_only else self.attn_in

    @property
    def can_divide_rows(self) -> bool:
        """Whether ranks may each have a part of the rows of the residual stream: both blocks end with a sum over the ranks."""
        spec = self._spec
        if spec.mixer is not None or spec.is_parallel or spec.is_mlp_only or spec.mlp == NO_MLP:
            return False
        if self._ranks is None or any(part is not None for part in (self._tail, self._shared, self._branches, self._streams)):
            return False
        closing = {"o", "experts.down"} if isinstance(spec.mlp, MoeSpec) else {"o", "down"}
        closing -= {"experts.down"} if self.exchange is not None else set()
        if isinstance(spec.mlp, MoeSpec) and spec.mlp.shared is not None:
            closing.add("shared.down")
        return self._ranks.row_parallel >= closing

    def fuse(self, arrived: Tensor, dtype: torch.dtype) -> str | None:
        """Set `fused` if the layer can be fused, otherwise return why not; `arrived` as in ProjectedAttention."""
        reason = reason_not_to_fuse(self._spec, self._linears, self._ranks, dtype)
        if reason is None:
            norms = self.attn_in, self._mlp_in
            attention = ProjectedAttention(self._spec.attention, self._rope, self._qk_norms, arrived)
            self.fused = FusedLayer(self._spec, self._linears, norms, attention, self._ranks)
        return reason

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        positions: Tensor,
        step: DeviceAttentionMetadata,
        cache: KvCache,
        following: Norm | None,
        states: Sequence[Tensor] = (),
        per_layer: Tensor | None = None,
        embeddings: Tensor | None = None,
    ) -> Tensor:
        """Change the residual stream x in place; y is its norm. Returns what the next block reads: `following` of x.

        states      the layer's recurrent states, of a DeviceKvPool
        per_layer   its inputs besides the residual [T, size]
        embeddings  [T, hidden_size] what the first layer reads, for a shared block
        """
        if self._shared is not None and embeddings is not None:
            return self._run_shared(x, embeddings, positions, step, cache, following, states)
        if self._tail is None:
            return self._run_blocks(x, y, positions, step, cache, following, states)
        self._run_blocks(x, y, positions, step, cache, None, states)
        self._tail.finish(x, per_layer)
        return x if following is None else normalize(x, following)

    def _run_shared(
        self,
        x: Tensor,
        embeddings: Tensor,
        positions: Tensor,
        step: DeviceAttentionMetadata,
        cache: KvCache,
        following: Norm | None,
        states: Sequence[Tensor],
    ) -> Tensor:
        """Run the shared block and the mixer after it; see SharedBlockSpec."""
        assert self._shared is not None
        assert self.attn_in is not None
        assert self._mlp_in is not None
        assert self._spec.mixer is not None
        y = self._attention(
            normalize(torch.cat((x, embeddings), 1), self.attn_in), positions, step, cache, self._spec.attention
        )
        read = self._shared.mixer_input(x, self._mlp(normalize(y, self._mlp_in), step, x), partial(self._adapted, step))
        mixed = mix(read, self._spec.mixer, self._mixer_inputs(states, step))
        return add_and_normalize(x, mixed, following)

    def forward_streams(
        self, streams: Tensor, positions: Tensor, step: DeviceAttentionMetadata, cache: KvCache, per_layer: Tensor | None
    ) -> Tensor:
        """Return the streams [N, T, hidden_size] of alternating updates after the layer."""
        if self._streams is None:
            raise InvariantError("several streams are run through a layer of one")

        def mix(y: Tensor) -> Tensor:
            return self._mix(y, positions, step, cache, ())

        return self._streams.forward(streams, mix, lambda y, x: self._mlp(y, step, x), per_layer)

    def _run_blocks(
        self,
        x: Tensor,
        y: Tensor,
        positions: Tensor,
        step: DeviceAttentionMetadata,
        cache: KvCache,
        following: Norm | None,
        states: Sequence[Tensor],
    ) -> Tensor:
        """Add the blocks to the residual stream x in place; return `following` of it."""
        scale = self._spec.residual_scale
        if self._spec.is_mlp_only:
            return add_and_normalize(x, self._mlp(self._mlp_rows(y, step), step, x), following, self._mlp_out, scale)
        branch = self._mix(y, positions, step, cache, states)
        if self._spec.mlp == NO_MLP:
            return add_and_normalize(x, branch, following, self._attn_out, scale)
        if self._spec.is_parallel:
            read = self._mlp_rows(y if self._mlp_in is None else normalize(x, self._mlp_in), step)
            other = self._mlp(read, step, x)
            add_and_normalize(x, branch, None, self._attn_out, scale)
            return add_and_normalize(x, other, following, self._mlp_out, scale)
        y = add_and_normalize(x, branch, self._mlp_in, self._attn_out, scale)
        residual = x if self._branches is None else self._mlp_rows(x, step)
        y = add_and_normalize(x, self._mlp(self._mlp_rows(y, step), step, residual), following, self._mlp_out, scale)
        return y if self._ranks is None else self._ranks.attention_rows(y)

    def _mlp_rows(self, own: Tensor, step: DeviceAttentionMetadata) -> Tensor:
        """Return the rows that the feed-forward block reads, given this rank's where rows are divided, otherwise all."""
        return own if self._ranks is None or self._takes_own_rows(own, step) else self._ranks.gather_rows(own)

    def _takes_own_rows(self, y: Tensor, step: DeviceAttentionMetadata) -> bool:
        """Return whether the feed-forward block of divided rows reads this rank's only."""
        return step.lora is None and self.exchange is not None and self.exchange.takes_own_rows(y)

    def _mixer_inputs(self, states: Sequence[Tensor], step: DeviceAttentionMetadata) -> DeviceMixerInputs:
        return DeviceMixerInputs(self._own, self._mixer_linears, states, step, self._prefix)

    def _mix(
        self, y: Tensor, positions: Tensor, step: DeviceAttentionMetadata, cache: KvCache, states: Sequence[Tensor]
    ) -> Tensor:
        """Return the output of attention, of the mixer, or of both together."""
        spec, mixed = self._spec, None
        if spec.mixer is not None:
            mixed = mix(y, spec.mixer, self._mixer_inputs(states, step))
            if spec.attention == NO_ATTENTION:
                return mixed
        read = y if spec.attention_in_scale == 1.0 else y * spec.attention_in_scale
        attended = self._attention(read, positions, step, cache, spec.attention)
        return attended if mixed is None else mixed * spec.mixer_out_scale + attended * spec.attention_out_scale

    def _attention(
        self, y: Tensor, positions: Tensor, step: DeviceAttentionMetadata, cache: KvCache, spec: AttentionSpec
    ) -> Tensor:
        if self._latent is not None:
            attended = self._latent.attend(y, lambda name, x: self._product(name, x, step), positions, step, cache)
            return self._close("o", attended, step)
        qkv = self._product("qkv", y, step)
        if spec.clip_qkv is not None:
            qkv = qkv.clamp_(-spec.clip_qkv, spec.clip_qkv)
        q, k, v = self._split(qkv)
        if spec.v_scale != 1.0:
            v.mul_(spec.v_scale)
        norms, rope = self._qk_norms, self._rope
        if norms is not None and spec.qk_norm_over == "all":
            q, k = (q, k) if self._head_ranks is None else self._head_ranks.gather_heads(q, k)
            q, k, norms = normalize(q, norms[0]), normalize(k, norms[1]), None
            q, k = (q, k) if self._head_ranks is None else self._head_ranks.own_heads(q, k)
        q, k = (part.unflatten(1, (-1, spec.head_dim)) for part in (q, k))
        heads = Projections(q, k, v.unflatten(1, (-1, spec.value_size)))
        if self._context is not None:
            heads = self._context.gather_heads(heads)
        if needs_separate_heads(spec):
            heads, rope, norms = turn_heads(heads, spec, positions, rope, norms), None, None
        if spec.v_norm is not None and self.kv_source is None:
            heads = heads._replace(v=normalize_unweighted(heads.v, spec.v_norm).to(heads.v.dtype))
        slots = step.slots if self.kv_source is None else None
        q = place_heads(heads, cache, slots, positions, rope, norms, self._is_in_order)
        if step.exchange is not None and slots is not None:
            step.exchange(cache)
        if self._blocks is not None:
            attended = self._blocks.attend(q, y, positions, step, cache, partial(self._adapted, step)).flatten(1)
        elif self._context is None:
            attended = attend(q, cache, step, spec, self._sinks, self._is_in_order, self._slopes).flatten(1)
        else:
            attended = self._context.attend(q, cache, step, self._sinks, self._is_in_order).flatten(1)
        if self._attention_gate is not None:
            gate = self._adapted(step, self._attention_gate(y), y, "attn_gate")
            attended = apply_output_gate(attended, gate, spec)
        return self._close("o", attended, step)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v; keys may be values, too, and a layer without keys of its own gives some queries in their place."""
        count = 1 if self.kv_source is not None else 2 if self._spec.attention.is_v_from_k else 3
        q, *others = qkv.split(self._sizes[:count], 1)
        k = others[0] if others else q[:, : self._sizes[1]]
        return q, k, others[1] if len(others) > 1 else k

    def _product(self, name: str, x: Tensor, step: DeviceAttentionMetadata) -> Tensor:
        """Return the output of a linear layer, with what the adapters of the step add."""
        out = self._linears[name](x)
        if self._shared is not None:
            self._shared.adapt(out, x, name, partial(self._adapted, step))
        return self._adapted(step, out, x, name)

    def _adapted(self, step: DeviceAttentionMetadata, y: Tensor, x: Tensor, name: str) -> Tensor:
        """Return the output y of a linear layer with what LoRA adapters add for its input x; may change y."""
        return y if step.lora is None else step.lora.add_to(y, x, self._prefix + name)

    def _close(self, name: str, rows: Tensor, step: DeviceAttentionMetadata) -> Tensor:
        """Return the output of attention ("o") or of the feed-forward block ("down"), given its inputs."""
        if self._ranks is None or (name == "o" and self._head_ranks is None):
            return self._product(name, rows, step)
        return self._ranks.close_block(name, lambda x: self._product(name, x, step), rows)

    def _mlp(self, y: Tensor, step: DeviceAttentionMetadata, residual: Tensor) -> Tensor:
        """Return the output of the feed-forward block of y, the residual normalised."""
        spec = self._spec.mlp
        if isinstance(spec, MoeSpec) and self._router is not None:
            out = self._mixture(y, step, residual, spec, self._router)
            return out if spec.output_scale == 1.0 else out * spec.output_scale
        both = self._product("gate_up", y, step)
        if spec.is_gated:
            gate, up = both.chunk(2, 1)
            gate = gate if spec.gate_scale == 1.0 else gate * spec.gate_scale
            gate = gate if spec.sparsity == 0 else cut_gate(gate, spec.sparsity)
            out = self._close("down", _gated(gate, up, spec), step)
            return out if spec.down_scale == 1.0 else out * spec.down_scale
        if self._xielu is not None:
            return self._close("down", apply_xielu(both, *self._xielu), step)
        return self._close("down", activate(both, None, spec.activation), step)

    def _mixture(
        self, y: Tensor, step: DeviceAttentionMetadata, residual: Tensor, spec: MoeSpec, router: DeviceLinear
    ) -> Tensor:
        """Return the sum of the experts of y, the shared one included."""
        routed, read = (y, y) if self._branches is None else self._branches.inputs(residual)
        routed = routed.float() if spec.is_router_f32 else routed
        logits, lora = self._adapted(step, router(routed), routed, "router"), step.lora
        read = read if spec.latent_size is None else self._product("latent_in", read, step)
        adapters = None if lora is None else lora.of_experts(f"{self._prefix}experts")
        extra = ExpertExtras(self._expert_biases, self._correction, self._own.get("expert_scale.weight"), adapters)
        if self.routing is not None:
            extra = self.routing.watched(extra, logits, is_noted=self.exchange is not None)
        out, kind = self._run_experts(read, logits, spec, extra, lora)
        out = out if spec.latent_size is None else self._product("latent_out", out, step)
        ranks = self._ranks
        read = y if ranks is None or not self._takes_own_rows(y, step) else ranks.gather_rows(y)
        shared = None if spec.shared is None else self._shared_expert(read, spec.shared, step)
        if ranks is None:
            branches = self._branches
            return out if shared is None else out + shared if branches is None else branches.join(shared, out)
        if shared is None:
            return ranks.close_part(out, kind)
        shared_kind = "sum" if "shared.down" in ranks.row_parallel else "columns"
        if kind == shared_kind and self._branches is None:
            return ranks.close_part(out + shared, kind)
        out, shared = ranks.close_part(out, kind), ranks.close_part(shared, shared_kind)
        return out + shared if self._branches is None else self._branches.join(shared, out)

    def _run_experts(
        self, x: Tensor, logits: Tensor, spec: MoeSpec, extra: ExpertExtras, lora: AddsAdapters | None
    ) -> tuple[Tensor, PartKind]:
        """Return what the experts give for x [T, N], and what that is with ranks."""
        gate_up, down = self._experts["experts.gate_up.weight"], self._experts["experts.down.weight"]
        if self.exchange is None:
            ranks = self._ranks
            is_sum = ranks is not None and "experts.down" in ranks.row_parallel
            gather = None if ranks is None or is_sum else ranks.gather_inner
            out = mixture_of_experts(x, logits, spec, gate_up, down, self._is_in_order, extra, gather=gather)
            return out, "sum" if is_sum else "columns"
        given = replace(spec, num_experts=self.exchange.num_own), gate_up, down, self._is_in_order
        routes = route_pairs(logits, spec, x.dtype, extra)

        def multiply(rows: Tensor, own: Routes, numbers: Tensor | None) -> Tensor:
            adapters = None if lora is None else lora.of_experts(f"{self._prefix}experts", numbers)
            return multiply_pairs(rows, own, *given, ExpertExtras(extra.biases, adapters=adapters), x.dtype)

        def form(rows: Tensor, num_rows: int) -> Tensor:
            is_exact = self._is_in_order or lora is not None
            return rows if is_exact else pack_inputs(rows, num_rows, spec, gate_up, down)

        note = None if self.routing is None else self.routing.note
        out, is_part = self.exchange.run(x, routes, multiply, note, None if lora is None else lora.numbers, form)
        return out, "sum" if is_part else "whole"

    def _shared_expert(self, y: Tensor, spec: MlpSpec, step: DeviceAttentionMetadata) -> Tensor:
        """Return the output of the shared expert; with ranks, its partial sum or its columns."""
        both = self._product("shared.gate_up", y, step)
        inner = _gated(*both.chunk(2, 1), spec) if spec.is_gated else activate(both, None, spec.activation)
        if self._ranks is not None and "shared.down" not in self._ranks.row_parallel:
            inner = self._ranks.gather_inner(inner, "shared.down")
        out = self._product("shared.down", inner, step)
        if self._shared_scale is None:
            return out
        return torch.sigmoid(self._adapted(step, self._shared_scale(y), y, "shared_scale")) * out


def _gated(gate: Tensor, up: Tensor, spec: MlpSpec) -> Tensor:
    return activate(gate, up, spec.activation) if spec.clamp is None else apply_gate(gate, up, spec)
