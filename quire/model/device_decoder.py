"""DeviceDecoder: executes any ModelSpec on a GPU, with Triton kernels and torch's matrix products."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.expert_options import LossyRouting
from quire.contracts.model_spec import ModelSpec
from quire.kernels.reference.altup import join_streams, split_streams
from quire.kernels.triton.fused_linear import FEW_TOKENS
from quire.kernels.triton.norm import normalize
from quire.kernels.triton.rotated_codes import PACKED
from quire.kernels.triton.step import AddsAdapters, DeviceAttentionMetadata
from quire.kv.device_pool import DeviceKvPool
from quire.model.device_decoder_layer import DeviceLayer
from quire.model.device_embedding import DeviceEmbedding, norm_of
from quire.model.device_heads import fill_missing_weights, rope_of
from quire.model.device_layers import describe_fusion
from quire.model.device_linear import DeviceLinear
from quire.model.device_offload import OffloadedWeights
from quire.model.device_ranks import DeviceRanks, LayerRanks
from quire.model.device_refusal import check_on_device
from quire.model.device_routing import RealRows, RoutingCounts, read_counts
from quire.model.device_rows import RowRanks
from quire.model.device_stage import DeviceStage
from quire.model.device_streams import LayerInputs
from quire.model.device_weights import DeviceWeights, load_on_device
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
    rows           the ranks with which this one divides prompts; None: it computes all rows
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
        rows: RowRanks | None = None,
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
        self.ranks, self.stage, self.rows = ranks, stage, rows
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
        fill_missing_weights(own, self.spec, self.dtype, device)
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
    def captures_prompts(self) -> bool:
        """Whether the launches of steps with prompts depend on their padded sizes only, so that they can be captured. Ranks
        that share the tokens of sequences gather as many keys as contexts have."""
        return self.rows is None and (self.ranks is None or self.ranks.context is None)

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

    def watch_experts(self, lossy: LossyRouting, counts_pairs: bool = False) -> None:
        """Count the tokens of the experts of each layer from now on, and change choices as `lossy` says. Before the first step,
        on all ranks alike. counts_pairs: those of two experts, too, where the ranks are on several hosts."""
        self._real_rows = RealRows()
        for layer in self._layers:
            layer.watch_experts(lossy, self._real_rows)
            if counts_pairs and layer.routing is not None and self.ranks is not None and len(set(self.ranks.hosts)) > 1:
                layer.routing.count_pairs()

    def expert_pairs(self) -> dict[int, Tensor]:
        """Return the tokens that chose two experts [E, E] i64, on the CPU, of each layer that counts them."""
        with self.on_device():
            found = {index: layer.routing.pairs for index, layer in enumerate(self._layers) if layer.routing is not None}
            return {index: pairs.cpu() for index, pairs in found.items() if pairs is not None}

    def expert_counts(self) -> list[RoutingCounts | None]:
        """Return the counts of each layer; None: it has no experts, or they are not watched. Waits for launched steps."""
        with self.on_device():
            return read_counts([layer.routing for layer in self._layers])

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
            if self.device.type == "cuda":  # they were made on another stream, which could use their memory again
                for tensor in itertools.chain.from_iterable(weights.all_tensors() for weights in added.values()):
                    tensor.record_stream(torch.cuda.current_stream())

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
                              have num_long_rope_rows added to their positions. With step.homes those of its rows
        Returns               [T, hidden_size], after the final norm; of each token, in the step's order
        """
        divided = None if self.rows is None else self.rows.divide(step)
        if self.rows is None or divided is None:
            return self._forward(token_ids, positions, step, pool)
        own = token_ids[divided.rows], positions[divided.rows]
        return self.rows.gather(self._forward(*own, divided.step, pool), divided)

    def _forward(self, token_ids: Tensor, positions: Tensor, step: DeviceAttentionMetadata, pool: DeviceKvPool) -> Tensor:
        stored = step.slots if step.homes is None else step.homes.slots  # of all ranks
        if self.ranks is not None and self.ranks.context is not None:
            step = self.ranks.context.localize(step, pool.num_blocks - 1, pool.spec.block_size)  # one is spare
        x = None if self._embed is None else self._embed(token_ids, positions)
        if self.stage is not None:
            x = self.stage.take_rows(len(token_ids), x)
        assert x is not None
        is_few = self.is_fused and len(token_ids) <= FEW_TOKENS and step.is_decode and step.lora is None
        # The first layer changes x in place.
        embeddings = x.clone() if any(layer.shared_block is not None for layer in self.spec.layers) else None
        inputs = LayerInputs(None if self._embed is None else self._embed.per_layer_inputs(token_ids, x), embeddings)
        if self._offload is not None:
            self._offload.begin()
        if self._real_rows is not None:
            self._real_rows.begin(stored)
        if step.homes is not None and self.ranks is not None:
            with self.ranks.divided_rows(x, step.homes.sizes) as own:
                positions = positions[self.ranks.own_rows(len(positions))].clone()
                own_hidden = self._run_layers(own, None, inputs, positions, step, pool, False)
                hidden = self.ranks.gather_rows(own_hidden).index_select(0, step.homes.places)
        elif self.ranks is not None and self._divides_norms(x):
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
            fused = None if cache.v.dtype == PACKED else layer.fused  # which does not read codes of four bits
            if is_few and fused is not None and len(positions) <= fused.most_tokens:
                fused.forward(x, positions, places, cache)
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
