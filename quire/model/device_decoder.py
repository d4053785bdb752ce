"""DeviceDecoder: executes any ModelSpec on a GPU, with Triton kernels and torch's matrix products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
    ModelSpec,
    MoeSpec,
    RopeSpec,
)
from quire.kernels.reference.activation import apply_xielu, cut_gate
from quire.kernels.reference.altup import join_streams, split_streams
from quire.kernels.reference.norm import normalize as normalize_by_torch
from quire.kernels.triton.activation import activate
from quire.kernels.triton.attention import KvCache, attend
from quire.kernels.triton.fused_attention import ProjectedAttention
from quire.kernels.triton.fused_linear import FEW_TOKENS
from quire.kernels.triton.moe import ExpertBiases, ExpertExtras, Routes, mixture_of_experts, multiply_pairs, route_pairs
from quire.kernels.triton.norm import Norm, add_and_normalize, normalize
from quire.kernels.triton.qk_rope_store import Projections, Rope, place_heads
from quire.kernels.triton.step import AddsAdapters, DeviceAttentionMetadata
from quire.kv.device_pool import DeviceKvPool
from quire.model.device_embedding import DeviceEmbedding, norm_of
from quire.model.device_experts import ExpertExchange
from quire.model.device_heads import fill_missing_weights, needs_separate_heads, rope_of, turn_heads
from quire.model.device_latent import LatentAttention
from quire.model.device_layers import (
    ExpertBranches,
    FusedLayer,
    LayerTail,
    SharedBlock,
    describe_fusion,
    reason_not_to_fuse,
)
from quire.model.device_linear import DeviceLinear
from quire.model.device_mixers import DeviceMixerInputs, mixer_linears
from quire.model.device_offload import OffloadedWeights
from quire.model.device_ranks import DeviceRanks, LayerRanks, PartKind
from quire.model.device_refusal import check_on_device
from quire.model.device_routing import DeviceRouting, RealRows, RoutingCounts, read_counts
from quire.model.device_stage import DeviceStage
from quire.model.device_streams import LayerInputs, LayerNorms, StreamLayer
from quire.model.device_weights import DeviceWeights, can_put_expert, load_on_device, put_expert, under
from quire.model.mixers import mix
from quire.parallel.expert_placement import ExpertPlacement
from quire.parallel.torch_communicator import ORDERED_BYTES
from quire.quant.parameters import Parameter, StoredParameter
from quire.quant.policy import QuantizationPolicy, parameter_quantizer


class DeviceDecoder:
    """A decoder-only model whose parameters and cache are on a device. It never synchronises with the device or copies to it.

    Besides the matrix products a layer launches five kernels: norm, heads (norm of q and k, rope, store), attention, norm with
    the residual, and activation; split attention has a second one. q, k and v are one product, gate and up another. In
    decode steps of few sequences most layers are five fused kernels including the products: see device_layers.py. With ranks,
    each all-reduce is one more launch.

    parameters     as `open_parameters` or `load_parameters` return them; emptied on the way
    max_model_len  the longest sequence; some rope scalings depend on it
    device         where it runs; OffloadedWeights: their device, with the weights of some layers in host memory
    policy         how weights are quantised during loading; None: they run as stored, quantised if a kernel supports it
    is_in_order    batch-invariant: a row has the same bits for any number of rows; quire's own kernels form sums in one order
    ranks          the tensor-parallel group of this rank: it has a part of every weight, and `spec` becomes the spec of this
                   part. All ranks must run the same steps in the same order
    stage          the pipeline stage of this rank: it has these layers only, which `spec` then has; `ranks` are those of the
                   stage. `forward` reads and changes its rows, and returns them unless it is the last one
    Raises ConfigError if a policy is given and weights are already quantised.

    is_fused, which may be changed between steps, selects fused layers where they are supported.
    embedding, head  shared with draft heads that have none; None: on another stage
    fusion  says which layers are fused, for the log
    """

    def __init__(
        self,
        spec: ModelSpec,
        parameters: MutableMapping[str, Parameter | StoredParameter],
        max_model_len: int,
        device: torch.device | OffloadedWeights,
        policy: QuantizationPolicy | None = None,
        is_in_order: bool = False,
        ranks: DeviceRanks | None = None,
        stage: DeviceStage | None = None,
    ) -> None:
        self._offload = offload = device if isinstance(device, OffloadedWeights) else None
        device = device.device if isinstance(device, OffloadedWeights) else device
        check_on_device(spec, is_in_order)
        quantize = None if policy is None else parameter_quantizer(parameters, spec, policy, keeps_float8=True)
        switch_len = spec.rope_switch_len(max_model_len)
        is_first, is_last = stage is None or stage.stage.is_first, stage is None or stage.stage.is_last
        if stage is not None:
            quantize = None if quantize is None else replace(quantize, first_layer=stage.stage.start)
            parameters, spec = stage.take_parameters(parameters), stage.stage.spec(spec)
        self.spec = spec if ranks is None else ranks.shard.local_spec
        self.ranks, self.stage = ranks, stage
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.device = device
        self.is_in_order = is_in_order
        shard = None if ranks is None else ranks.shard
        weights = load_on_device(parameters, spec, device, quantize, shard=shard, offload=offload)
        self._weights, own = weights, weights.tensors
        self.head: DeviceLinear | None = None
        if is_last:
            head = "lm_head.weight" if "lm_head.weight" in weights.linears else "embed.weight"
            self.head = DeviceLinear(weights.linears[head], own.get("lm_head.bias"), is_in_order, weights.whole_rows[head])
        fill_missing_weights(own, spec, self.dtype, device)
        self._embed = DeviceEmbedding(spec, weights, self.dtype, is_in_order, ranks) if is_first else None
        self.embedding = None if self._embed is None else self._embed.linear
        self._final_norm = norm_of(own, "final_norm", spec.final_norm) if is_last else None
        ropes = {layer.attention.rope: None for layer in spec.layers if layer.attention.rope is not None}
        tables = {rope: rope_of(rope, max_model_len, switch_len, self.dtype, device) for rope in ropes}
        self.num_long_rope_rows = max_model_len
        self._layers = [
            DeviceLayer(
                layer, f"layers.{index}.", weights, tables, is_in_order, LayerRanks.of(ranks, index, weights.row_parallel)
            )
            for index, layer in enumerate(self.spec.layers)
        ]
        self.is_fused = True
        self._tapped: dict[int, int] = {}
        self._features: Tensor | None = None
        self._real_rows: RealRows | None = None
        most_kv_heads = max((layer.attention.num_kv_heads for layer in self.spec.layers), default=1)
        arrived = torch.zeros(FEW_TOKENS, most_kv_heads, dtype=torch.int32, device=device)
        reasons = Counter(reason for layer in self._layers if (reason := layer.fuse(arrived, self.dtype)) is not None)
        most = min((layer.fused.most_tokens for layer in self._layers if layer.fused is not None), default=FEW_TOKENS)
        self.fusion = describe_fusion(len(self._layers), reasons, most, 5 if ranks is None else 7)

    @property
    def row_parallel(self) -> frozenset[str]:
        """The names of the weights that are cut by their inputs, with ranks."""
        return frozenset(self._weights.row_parallel)

    def on_device(self) -> AbstractContextManager[object]:
        """Make the model's device current for this thread, within the block."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def weight_tensors(self) -> list[Tensor]:
        """Return the weights on the device; some may share memory."""
        return list(self._weights.all_tensors())

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the weights that are in host memory."""
        return 0 if self._offload is None else self._offload.num_bytes

    def watch_experts(self, lossy: LossyRouting) -> None:
        """Count the tokens of the experts of each layer from now on, and change choices as `lossy` says. Before the first step,
        on all ranks alike."""
        self._real_rows = RealRows()
        for layer in self._layers:
            layer.watch_experts(lossy, self._real_rows)

    def expert_counts(self) -> list[RoutingCounts | None]:
        """Return the counts of each layer; None: it has no experts, or they are not watched. Waits for launched steps."""
        with self.on_device():
            return read_counts([layer.routing for layer in self._layers])

    @property
    def placements(self) -> dict[int, ExpertPlacement]:
        """Where the whole experts of each layer are, by its index; empty: they are not on ranks."""
        exchanges = {index: layer.exchange for index, layer in enumerate(self._layers)}
        return {index: exchange.placement for index, exchange in exchanges.items() if exchange is not None}

    def check_expert(self, layer: int, weights: DeviceWeights) -> None:
        """Raise UnsupportedError for the weights of one expert whose form is not that of the layer's."""
        self._layers[layer].check_expert(weights)

    @torch.inference_mode()
    def place_experts(self, layer: int, added: Mapping[int, DeviceWeights], placement: ExpertPlacement, rank: int) -> None:
        """Take another placement of a layer's experts between two steps: waits for launched steps, and launches copies.

        added  the weights of the experts that this rank gets, as load_expert returns them
        """
        with self.on_device():
            self._layers[layer].place_experts(added, placement)

    def keep_features(self, layers: tuple[int, ...], most_tokens: int) -> None:
        """Keep the features for a draft head in every step from now on, in a fixed buffer, so that CUDA graphs write them too.

        layers       whose inputs these are, low to high; none: the hidden states after the final norm
        most_tokens  of a step, padding included
        """
        width = self.spec.hidden_size
        self._tapped = {layer: place * width for place, layer in enumerate(layers)}
        shape = most_tokens, width * max(1, len(layers))
        self._features = torch.zeros(shape, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def features_at(self, rows: Sequence[int]) -> Tensor:
        """Return a copy of the features [R, F] of tokens of the last launched step, by their indices in it."""
        if self._features is None:
            raise InvariantError("features of a step are asked for, and none are kept")
        return self._features.index_select(0, torch.tensor(rows, dtype=torch.int64).to(self.device))

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, step: DeviceAttentionMetadata, pool: DeviceKvPool) -> Tensor:
        """Compute the tokens of one step and store their KV.

        token_ids, positions  [T] i64, the sequences of the step one after the other. Tokens with the short variant of a rope
                              have num_long_rope_rows added to their positions
        Returns               [T, hidden_size], after the final norm
        """
        x = None if self._embed is None else self._embed(token_ids, positions)
        if self.stage is not None:
            x = self.stage.take_rows(len(token_ids), x)
        assert x is not None
        is_few = self.is_fused and len(token_ids) <= FEW_TOKENS and step.is_decode and step.lora is None and not pool.is_packed
        # The first layer changes x in place.
        embeddings = x.clone() if any(layer.shared_block is not None for layer in self.spec.layers) else None
        inputs = LayerInputs(None if self._embed is None else self._embed.per_layer_inputs(token_ids, x), embeddings)
        if self._offload is not None:
            self._offload.begin()
        if self._real_rows is not None:
            self._real_rows.begin(step.slots)
        if self.ranks is not None and self._divides_norms(x):
            norm = self._layers[0].first_norm
            y = x if norm is None else normalize(x, norm)
            with self.ranks.divided_rows(x) as own:
                hidden = self._run_layers(own, y, inputs, positions, step, pool, False)
        else:
            hidden = self._run_layers(x, None, inputs, positions, step, pool, is_few)
        self._keep(hidden, None if self._tapped else 0)
        return hidden

    def _divides_norms(self, x: Tensor) -> bool:
        """Return whether each rank norms a part of the rows of a step. Sums that are gathered whole, to be added in order, stay
        so: then a row does not depend on the number of rows. A stage sends all rows."""
        may_divide = x.nbytes > ORDERED_BYTES and self.stage is None and not self._tapped
        return may_divide and all(layer.can_divide_rows for layer in self._layers)

    def _run_layers(
        self,
        x: Tensor,
        y: Tensor | None,
        inputs: LayerInputs,
        positions: Tensor,
        step: DeviceAttentionMetadata,
        pool: DeviceKvPool,
        is_few: bool,
    ) -> Tensor:
        """Run all layers; return the hidden states [T, hidden_size] after the final norm, or x if it is on a later stage.

        x  the residual stream, or this rank's rows of it; changed
        y  the norm that the first layer reads, of all rows; None: it is made from x
        """
        altup = self.spec.altup
        if altup is not None:
            x = split_streams(x, self._stack("altup_split"))
        for index, layer in enumerate(self._layers):
            self._keep(x if altup is None else x[altup.active], self._tapped.get(index))
            if self._offload is not None:
                if index > 0:
                    self._offload.after(index - 1)
                self._offload.before(index)
            source = index if layer.kv_source is None else layer.kv_source
            cache, places = pool.caches[source], step
            if pool.is_windowed[source] and step.window is not None:
                places = step.window
            if is_few and layer.fused is not None and len(positions) <= layer.fused.most_tokens:
                layer.fused.forward(x, positions, places, cache)
                y = None
                continue
            own_inputs = None if inputs.per_layer is None else inputs.per_layer[:, index]
            if altup is not None:
                x = layer.forward_streams(x, positions, places, cache, own_inputs)
                continue
            if y is None:
                y = x if layer.first_norm is None else normalize(x, layer.first_norm)
            is_last = index + 1 == len(self._layers)
            following = self._final_norm if is_last else self._layers[index + 1].first_norm
            states = pool.states[index] if pool.states else ()
            y = layer.forward(x, y, positions, places, cache, following, states, own_inputs, inputs.embeddings)
        x = x if altup is None else join_streams(x, self._stack("altup_join"))
        if self._final_norm is None:
            return x
        return normalize(x, self._final_norm) if y is None else y

    def _stack(self, name: str) -> Tensor:
        """Return a stack of matrices [N, hidden_size, hidden_size], dense."""
        stack = self._weights.experts[f"{name}.weight"]
        if not isinstance(stack, Tensor):
            raise InvariantError(f"{name} is quantised")
        return stack

    def _keep(self, rows: Tensor, column: int | None) -> None:
        """Copy rows [T, hidden_size] to a column of the features; None: they are not needed."""
        if self._features is not None and column is not None:
            self._features[: len(rows), column : column + rows.shape[1]].copy_(rows)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None, lora: AddsAdapters | None = None) -> Tensor:
        """Return the logits [R, vocab_size] of rows of `forward`'s result, in the model's dtype; in `out` if that is given.

        lora  the rows that have adapters; None: there are none
        """
        if self.head is None:
            raise InvariantError("logits are asked of a pipeline stage without the LM head")
        logits = self.head(hidden, out if self.ranks is None else None)
        logits = logits if lora is None else lora.add_to(logits, hidden, "lm_head")
        return self.finish_logits(logits if self.ranks is None else self.ranks.gather_logits(logits, out))

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Scale and cap logits as the model does, in place, and return them."""
        if self.spec.logit_scale != 1.0:
            logits.mul_(self.spec.logit_scale)
        if self.spec.final_softcap is not None:
            logits.div_(self.spec.final_softcap).tanh_().mul_(self.spec.final_softcap)
        return logits


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
        self._sinks = own.get("sinks.weight")
        is_branched = isinstance(spec.mlp, MoeSpec) and spec.mlp.branch_norm is not None
        self._branches = ExpertBranches(spec.mlp, own) if is_branched and isinstance(spec.mlp, MoeSpec) else None
        attention = spec.attention
        self._rope = None if attention.rope is None else ropes[attention.rope]
        self._sizes = [attention.num_heads * attention.head_dim, *([attention.num_kv_heads * attention.head_dim] * 2)]
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
        self._latent = None if attention.latent is None else LatentAttention(attention, own, self._rope, is_in_order, prefix)
        gate, bias = own.get("attn_gate.weight"), own.get("attn_gate.bias")
        self._attention_gate = None if gate is None else DeviceLinear((gate,), bias, is_in_order)
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
            return add_and_normalize(x, self._mlp(y, step, x), following, self._mlp_out, scale)
        branch = self._mix(y, positions, step, cache, states)
        if self._spec.mlp == NO_MLP:
            return add_and_normalize(x, branch, following, self._attn_out, scale)
        if self._spec.is_parallel:
            read = y if self._mlp_in is None else normalize(x, self._mlp_in)
            other = self._mlp(read, step, x)
            add_and_normalize(x, branch, None, self._attn_out, scale)
            return add_and_normalize(x, other, following, self._mlp_out, scale)
        y = add_and_normalize(x, branch, self._mlp_in, self._attn_out, scale)
        y = y if self._ranks is None or self._takes_own_rows(y, step) else self._ranks.gather_rows(y)
        y = add_and_normalize(x, self._mlp(y, step, x), following, self._mlp_out, scale)
        return y if self._ranks is None else self._ranks.gather_rows(y)

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
        norms, rope = self._qk_norms, self._rope
        if norms is not None and spec.qk_norm_over == "all":
            q, k = (q, k) if self._ranks is None else self._ranks.gather_heads(q, k)
            q, k, norms = normalize(q, norms[0]), normalize(k, norms[1]), None
            q, k = (q, k) if self._ranks is None else self._ranks.own_heads(q, k)
        heads = Projections(*(part.unflatten(1, (-1, spec.head_dim)) for part in (q, k, v)))
        if needs_separate_heads(spec):
            heads, rope, norms = turn_heads(heads, spec, positions, rope, norms), None, None
        if spec.v_norm is not None and self.kv_source is None:
            heads = heads._replace(v=normalize_by_torch(heads.v, spec.v_norm, None))
        slots = step.slots if self.kv_source is None else None
        q = place_heads(heads, cache, slots, positions, rope, norms, self._is_in_order)
        attended = attend(q, cache, step, spec, self._sinks, self._is_in_order).flatten(1)
        if self._attention_gate is not None:
            gate = self._adapted(step, self._attention_gate(y), y, "attn_gate")
            attended = attended * torch.sigmoid(gate)
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
        if self._ranks is None:
            return self._product(name, rows, step)
        return self._ranks.close_block(name, lambda x: self._product(name, x, step), rows)

    def _mlp(self, y: Tensor, step: DeviceAttentionMetadata, residual: Tensor) -> Tensor:
        """Return the output of the feed-forward block of y, the residual normalised."""
        spec = self._spec.mlp
        if isinstance(spec, MoeSpec) and self._router is not None:
            routed, read = (y, y) if self._branches is None else self._branches.inputs(residual)
            routed = routed.float() if spec.is_router_f32 else routed
            logits, lora = self._adapted(step, self._router(routed), routed, "router"), step.lora
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
        both = self._product("gate_up", y, step)
        if spec.is_gated:
            gate, up = both.chunk(2, 1)
            gate = gate if spec.gate_scale == 1.0 else gate * spec.gate_scale
            gate = gate if spec.sparsity == 0 else cut_gate(gate, spec.sparsity)
            out = self._close("down", activate(gate, up, spec.activation), step)
            return out if spec.down_scale == 1.0 else out * spec.down_scale
        if self._xielu is not None:
            return self._close("down", apply_xielu(both, *self._xielu), step)
        return self._close("down", activate(both, None, spec.activation), step)

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
            return multiply_pairs(rows, own, *given, ExpertExtras(extra.biases, adapters=adapters))

        note = None if self.routing is None else self.routing.note
        out, is_part = self.exchange.run(x, routes, multiply, note, None if lora is None else lora.numbers)
        return out, "sum" if is_part else "whole"

    def _shared_expert(self, y: Tensor, spec: MlpSpec, step: DeviceAttentionMetadata) -> Tensor:
        """Return the output of the shared expert; with ranks, its partial sum or its columns."""
        both = self._product("shared.gate_up", y, step)
        inner = activate(*both.chunk(2, 1), spec.activation) if spec.is_gated else activate(both, None, spec.activation)
        if self._ranks is not None and "shared.down" not in self._ranks.row_parallel:
            inner = self._ranks.gather_inner(inner, "shared.down")
        out = self._product("shared.down", inner, step)
        if self._shared_scale is None:
            return out
        return torch.sigmoid(self._adapted(step, self._shared_scale(y), y, "shared_scale")) * out
