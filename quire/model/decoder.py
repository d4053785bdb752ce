"""Decoder: executes any ModelSpec with the torch reference kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.model_spec import (
    NO_ATTENTION,
    NO_MLP,
    AltUpSpec,
    AttentionSpec,
    HyperSpec,
    IndexerSpec,
    LaurelSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    PerLayerGate,
    PerLayerInputs,
    QueryScaling,
    RopeSpec,
)
from quire.contracts.sparse_spec import BlockIndexerSpec
from quire.kernels.reference.activation import ACTIVATIONS, apply_gate, apply_output_gate, apply_xielu
from quire.kernels.reference.altup import correct, join_streams, modalities, predict, split_streams
from quire.kernels.reference.attention import AttentionMetadata, attend, store_kv
from quire.kernels.reference.block_sparse import attend_blocks
from quire.kernels.reference.compressed_attention import EntryCache
from quire.kernels.reference.hyper_connections import HyperWeights, connect, join_all
from quire.kernels.reference.indexed_attention import IndexQueries, attend_indexed, choose_all, store_index_keys
from quire.kernels.reference.moe import ExpertExtras, mixture_of_experts, route, router_logits, run_experts
from quire.kernels.reference.norm import normalize
from quire.kernels.reference.per_layer_inputs import per_layer_inputs
from quire.kernels.reference.rope import cos_sin, inverse_frequencies, query_factors, rotate
from quire.kv.pool import KvPool
from quire.model.lora.deltas import LoraDeltas
from quire.model.mixers import run_mixer
from quire.model.shared_kv import Angles, SharedKvInputs, shared_kv_attention
from quire.model.step_decoder import StepDecoder
from quire.quant.parameters import Parameter, StoredParameter, dense_parameters


class Decoder(StepDecoder):
    """A decoder-only model: a spec and its parameters under their canonical names.

    parameters     canonical name -> tensor in the spec's dtype or quantised weight, as `open_parameters` or
                   `load_parameters` return them; quantised weights are made dense once, here
    max_model_len  the longest sequence; some rope scalings depend on it
    lora           the LoRA adapters, which may be loaded later; None: there are none
    """

    def __init__(
        self,
        spec: ModelSpec,
        parameters: Mapping[str, Parameter | StoredParameter],
        max_model_len: int,
        lora: LoraDeltas | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.adapters = lora
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        dense = dense_parameters(parameters, self.dtype)
        self._parameters = dense
        ropes = {layer.attention.rope for layer in spec.layers if layer.attention.rope is not None}
        self._frequencies = {rope: inverse_frequencies(rope, max_model_len) for rope in ropes}
        changing = [rope for rope in ropes if rope.depends_on_length]
        self._short_frequencies = {rope: inverse_frequencies(rope, rope.original_max) for rope in changing}
        self._layers = [DecoderLayer(layer, f"layers.{index}.", dense, lora) for index, layer in enumerate(spec.layers)]
        self._aux_hidden_state_layers: tuple[int, ...] = ()
        self._taps: list[Tensor] = []
        self._head = dense.get("lm_head.weight", dense["embed.weight"])
        self._scalings = {layer.attention.query_scaling for layer in spec.layers} - {None}

    def _frequencies_of(self, rope: RopeSpec, step: AttentionMetadata) -> Tensor:
        """Return the frequencies of a rope [dim / 2], or [T, dim / 2] if tokens differ."""
        short = self._short_frequencies.get(rope)
        if short is None or step.short_ropes is None:
            return self._frequencies[rope]
        return torch.where(step.short_ropes[:, None], short, self._frequencies[rope])

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, step: AttentionMetadata, kv: KvPool, layers: Sequence[int] | None = None
    ) -> Tensor:
        """Compute the tokens of one step and store their KV.

        token_ids, positions  [T] i64, the sequences of the step one after the other
        Returns               [T, hidden_size], after the final norm
        """
        spec = self.spec
        if self.adapters is not None:
            self.adapters.begin(step.adapters)
        x = F.embedding(token_ids, self._parameters["embed.weight"])
        if spec.embed_scale != 1.0:
            x = x * (torch.tensor(spec.embed_scale, dtype=self.dtype) if spec.is_embed_scale_cast else spec.embed_scale)
        if spec.num_learned_positions:
            x = x + F.embedding(positions, self._parameters["pos.weight"])
        if spec.embed_norm is not None:
            x = self._norm(x, spec.embed_norm, "embed_norm")
        inputs = None if spec.per_layer_inputs is None else self._per_layer_inputs(token_ids, x, spec.per_layer_inputs)
        x = x.float() if spec.is_residual_f32 else x
        embeddings = x
        if spec.altup is not None:
            x = split_streams(x, self._parameters["altup_split.weight"])
        if spec.hyper is not None:
            x = x[:, None].repeat(1, spec.hyper.num_streams, 1)
        factors = {scaling: query_factors(scaling, positions, self.dtype) for scaling in self._scalings}
        angles = {rope: cos_sin(rope, self._frequencies_of(rope, step), positions, self.dtype) for rope in self._frequencies}
        self._taps, hidden_keys = [], list[Tensor]()
        for index in range(len(self._layers)) if layers is None else layers:
            if index in self._aux_hidden_state_layers:
                self._taps.append(x if spec.altup is None else x[spec.altup.active])
            source = spec.layers[index].attention.kv_source
            source = index if source is None else source
            states = kv.states[index] if kv.states else ()
            cache = LayerCache(kv.k[source], kv.v[source], states, self._entry_caches(index, step, kv), hidden_keys)
            own_inputs = None if inputs is None else inputs[:, index]
            dtype = self.dtype if spec.is_residual_f32 else None
            extra = LayerInputs(factors, own_inputs, None, embeddings, dtype, token_ids, self._frequencies)
            own = step.window if step.window is not None and kv.spec.is_windowed[source] else step
            x = self._layers[index].forward(x, angles, own, cache, extra)
        if spec.altup is not None:
            x = join_streams(x, self._parameters["altup_join.weight"])
        if spec.hyper is not None:
            x = join_all(x, spec.hyper, hyper_weights(self._parameters, "hyper"))
        return self._norm(x, spec.final_norm, "final_norm").to(self.dtype)

    def _entry_caches(self, index: int, step: AttentionMetadata, kv: KvPool) -> tuple[EntryCache, ...]:
        """Return the caches of a layer's entries, and of its indexer's; see KvSpec.layer_shapes."""
        attention, place = self.spec.layers[index].attention, len(self.spec.layers) + index
        compression = attention.compression
        if attention.block_indexer is not None:
            return (EntryCache(kv.k[place], step.block_tables, attention.block_indexer.head_dim, rate=1),)
        if compression is None:
            return ()
        entries = EntryCache(kv.k[place], step.block_tables, attention.head_dim, compression.rate)
        if compression.indexer is None:
            return (entries,)
        return entries, EntryCache(kv.v[place], step.block_tables, compression.indexer.head_dim, compression.rate)

    def _per_layer_inputs(self, token_ids: Tensor, x: Tensor, spec: PerLayerInputs) -> Tensor:
        embedding, projection, norm = (self._parameters[f"per_layer_{name}.weight"] for name in ("embed", "proj", "norm"))
        return per_layer_inputs(token_ids, x, spec, embedding, lambda y: F.linear(y, projection), norm)

    def _norm(self, x: Tensor, spec: NormSpec, name: str) -> Tensor:
        return normalize(x, spec, self._parameters.get(f"{name}.weight"), self._parameters.get(f"{name}.bias"))

    def keep_inputs(self, layers: tuple[int, ...]) -> None:
        """Keep the inputs of these layers, low to high, in every step from now on."""
        self._aux_hidden_state_layers = layers

    def layer_inputs(self, rows: Sequence[int]) -> Tensor:
        """Return the kept inputs [R, layers * hidden_size] f32 of rows of the last step's tokens."""
        chosen = torch.tensor(rows, dtype=torch.int64)
        return torch.cat([tap[chosen].float() for tap in self._taps], -1) if self._taps else torch.empty(len(rows), 0)

    def copy_queries(self, rows: Sequence[int]) -> list[Tensor]:
        """Return memory [R, H, D] f32 of each layer, to which the next step writes the rotated queries of R rows."""
        chosen = torch.tensor(rows, dtype=torch.int64)
        return [layer.copy_queries(chosen) for layer in self._layers]

    def parameter(self, name: str) -> Tensor | None:
        """Return a dense parameter by its canonical name; None if the model has none."""
        return self._parameters.get(name)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, vocab_size] of rows of `forward`'s result, in the model's dtype."""
        return self._finish_logits(F.linear(hidden, self._head, self._parameters.get("lm_head.bias")))

    @torch.inference_mode()
    def logits_of(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """See StepDecoder; with what the adapters of the step add to the LM head."""
        if self.adapters is None:
            return self.logits(hidden[rows])
        read = hidden[rows]
        logits = F.linear(read, self._head, self._parameters.get("lm_head.bias"))
        return self._finish_logits(self.adapters.add_to_rows(logits, read, rows, "lm_head"))

    def logits_at(self, first: int, last: int) -> Tensor:
        """See StepDecoder."""
        return (
            super().logits_at(first, last) if self.adapters is None else self.logits_of(self._kept(), torch.arange(first, last))
        )

    def _finish_logits(self, logits: Tensor) -> Tensor:
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        if self.spec.final_softcap is not None:
            logits = torch.tanh(logits / self.spec.final_softcap) * self.spec.final_softcap
        return logits


class LayerCache(NamedTuple):
    """One layer's tensors of a KvPool; states: the recurrent states of a mixer; entries: what stands for several tokens;
    hidden_keys: what the last indexer of the step has hidden, see `choose_all`, which a layer with an indexer writes."""

    k: Tensor
    v: Tensor
    states: Sequence[Tensor] = ()
    entries: tuple[EntryCache, ...] = ()
    hidden_keys: list[Tensor] | None = None


class LayerInputs(NamedTuple):
    """What a layer reads besides the residual.

    factors    on queries [T, 1, 1] of each query scaling; None: the model has none
    per_layer  [T, size], its per-layer inputs; None: it has none
    attended   what attention reads where it is not the normed residual
    embeddings [T, H], what the first layer reads; None: no layer has a shared block
    dtype      what the residual is rounded to before the norm; None: it has that dtype
    token_ids  [T] i64, of layers whose experts depend on them
    frequencies  of each rope [dim / 2], of layers that rotate at other positions than those of the tokens
    """

    factors: Mapping[QueryScaling, Tensor] | None = None
    per_layer: Tensor | None = None
    attended: Tensor | None = None
    embeddings: Tensor | None = None
    dtype: torch.dtype | None = None
    token_ids: Tensor | None = None
    frequencies: Mapping[RopeSpec, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The positions of a step's tokens for one layer.

    angles  cos and sin of its rope; None: it has none
    factor  [T, 1, 1] that scales queries by their positions; None: no scaling
    entries, hidden_keys  see LayerCache
    """

    angles: tuple[Tensor, Tensor] | None
    step: AttentionMetadata
    k_cache: Tensor
    v_cache: Tensor
    factor: Tensor | None = None
    entries: tuple[EntryCache, ...] = ()
    hidden_keys: list[Tensor] | None = None

    def rotate(self, heads: Tensor, is_interleaved: bool = False) -> Tensor:
        """Return heads [T, H, D] rotated."""
        return heads if self.angles is None else rotate(heads, *self.angles, is_interleaved=is_interleaved)

    def scale(self, q: Tensor) -> Tensor:
        """Return queries [T, H, D] scaled by their positions."""
        return q if self.factor is None else q * self.factor


class DecoderLayer:
    """One layer; it takes the `parameters` whose canonical names begin with `prefix`."""

    def __init__(self, spec: LayerSpec, prefix: str, parameters: dict[str, Tensor], lora: LoraDeltas | None = None) -> None:
        self.spec = spec
        self._prefix, self._lora = prefix, lora
        self._parameters = {n.removeprefix(prefix): p for n, p in parameters.items() if n.startswith(prefix)}
        self._query_copy: tuple[Tensor, Tensor] | None = None  # rows of the next step, and where their queries go

    def copy_queries(self, rows: Tensor) -> Tensor:
        """See Decoder.copy_queries."""
        attention = self.spec.attention
        found = torch.empty(len(rows), attention.num_heads, attention.head_dim)
        self._query_copy = rows, found
        return found

    def forward(
        self,
        x: Tensor,
        angles: dict[RopeSpec, tuple[Tensor, Tensor]],
        step: AttentionMetadata,
        cache: LayerCache,
        inputs: LayerInputs | None = None,
    ) -> Tensor:
        """Return the layer's output, as x: [T, H], all streams [N, T, H] of alternating updates, or [T, N, H] of
        hyper-connections."""
        spec, inputs = self.spec, inputs or LayerInputs()
        if spec.hyper is not None:
            return self._forward_connected(x, spec.hyper, angles, step, cache, inputs)
        if spec.is_mlp_only:
            return self._add(x, self._mlp(self._norm(x, spec.mlp_in, "mlp_in"), x))
        if spec.shared_block is not None:
            block = self._shared_block(x, inputs.embeddings, self._place(angles, step, cache, inputs.factors))
            return x + self._run_mixer(self._norm(x + block, spec.shared_block.mixer_in, "mixer_in"), step, cache)
        streams = None
        if spec.altup is not None:
            streams = predict(x, self._modalities(x[spec.altup.active], spec.altup), self._parameters["altup.predict.weight"])
            x = streams[spec.altup.active]
        read = x if inputs.dtype is None else x.to(inputs.dtype)
        normed = self._norm(read, spec.attn_in, "attn_in") if inputs.attended is None else inputs.attended
        before = x
        y = self._mix(normed, angles, step, cache, inputs.factors)
        x = self._add(x if spec.kept is None else normed * spec.kept[0], self._norm(y, spec.attn_out, "attn_out"))
        if spec.laurel is not None:
            x = (x + self._laurel(normed, spec.laurel)) / math.sqrt(2)
        if spec.mlp == NO_MLP:
            return x
        if spec.is_parallel:
            read = normed if spec.mlp_in is None else self._norm(before, spec.mlp_in, "mlp_in")
        else:
            read = self._norm(x, spec.mlp_in, "mlp_in")
        y = self._norm(self._mlp(read, x), spec.mlp_out, "mlp_out")
        x = self._add(x if spec.kept is None else read * spec.kept[1], y)
        if spec.altup is not None and streams is not None:
            x = self._correct(streams, x, spec.altup)
        if spec.per_layer_gate is not None and inputs.per_layer is not None:
            x = self._add_per_layer(x, spec.per_layer_gate, inputs.per_layer)
        return x * self._parameters["layer_scale.weight"] if spec.has_scale else x

    def _forward_connected(
        self,
        streams: Tensor,
        hyper: HyperSpec,
        angles: dict[RopeSpec, Angles],
        step: AttentionMetadata,
        cache: LayerCache,
        inputs: LayerInputs,
    ) -> Tensor:
        attention = connect(streams, hyper, hyper_weights(self._parameters, "attn_hyper"))
        read = self._norm(attention.read, self.spec.attn_in, "attn_in")
        streams = attention.join(streams, self._shared_kv(read, angles, step, cache, inputs))
        mlp = connect(streams, hyper, hyper_weights(self._parameters, "mlp_hyper"))
        read = self._norm(mlp.read, self.spec.mlp_in, "mlp_in")
        return mlp.join(streams, self._mlp(read, read, inputs.token_ids))

    def _shared_kv(
        self,
        x: Tensor,
        angles: dict[RopeSpec, Angles],
        step: AttentionMetadata,
        cache: LayerCache,
        inputs: LayerInputs,
    ) -> Tensor:
        spec = self.spec.attention
        rope, frequencies = spec.rope, inputs.frequencies
        if rope is None or frequencies is None or spec.shared_kv is None:
            raise InvariantError("attention with shared keys and values is run without a rope or its frequencies")

        def angles_at(positions: Tensor) -> Angles:
            return cos_sin(rope, frequencies[rope], positions, x.dtype)

        own = SharedKvInputs(self._parameters, self._linear, angles[rope], angles_at, step, cache.k, cache.v, cache.entries)
        return shared_kv_attention(x, spec, spec.shared_kv, own)

    def _modalities(self, x: Tensor, spec: AltUpSpec) -> Tensor:
        return modalities(self._norm(x, spec.norm, "altup.norm"), self._parameters["altup.router.weight"])

    def _correct(self, streams: Tensor, x: Tensor, spec: AltUpSpec) -> Tensor:
        return correct(streams, spec.active, x, self._modalities(x, spec), self._parameters["altup.correct.weight"])

    def _laurel(self, x: Tensor, spec: LaurelSpec) -> Tensor:
        return x + self._norm(self._linear(self._linear(x, "laurel.left"), "laurel.right"), spec.norm, "laurel.norm")

    def _add_per_layer(self, x: Tensor, spec: PerLayerGate, inputs: Tensor) -> Tensor:
        """Return x with what the per-layer inputs give: x [T, H], or streams [N, T, H] of which the first stays as it is."""
        altup = self.spec.altup
        read = x if altup is None else x[altup.active]
        if altup is not None and altup.has_scale:
            read = read * self._parameters["altup.scale.weight"]
        gated = ACTIVATIONS[spec.activation](self._linear(read, "per_layer.gate")) * inputs
        y = self._norm(self._linear(gated, "per_layer.up"), spec.norm, "per_layer.norm")
        return x + y if altup is None else torch.cat((x[:1], x[1:] + y))

    def _mix(
        self,
        x: Tensor,
        angles: dict[RopeSpec, tuple[Tensor, Tensor]],
        step: AttentionMetadata,
        cache: LayerCache,
        factors: Mapping[QueryScaling, Tensor] | None,
    ) -> Tensor:
        """Return the output of attention, of the mixer, or of both together."""
        attention, mixer = self.spec.attention, self.spec.mixer
        mixed = None if mixer is None else self._run_mixer(x, step, cache)
        if mixed is not None and attention == NO_ATTENTION:
            return mixed * self.spec.mixer_out_scale
        if self.spec.attention_in_scale != 1.0:
            x = x * self.spec.attention_in_scale
        place = self._place(angles, step, cache, factors)
        run = self._attention if attention.latent is None else self._latent_attention
        y = run(x, attention, place)
        y = y * self.spec.attention_out_scale
        return y if mixed is None else mixed * self.spec.mixer_out_scale + y

    def _place(
        self,
        angles: dict[RopeSpec, tuple[Tensor, Tensor]],
        step: AttentionMetadata,
        cache: LayerCache,
        factors: Mapping[QueryScaling, Tensor] | None,
    ) -> LayerPlace:
        scaling, rope = self.spec.attention.query_scaling, self.spec.attention.rope
        if scaling is not None and factors is None:
            raise InvariantError("a layer that scales queries by their positions is run without factors")
        factor = None if scaling is None or factors is None else factors[scaling]
        return LayerPlace(
            None if rope is None else angles[rope], step, cache.k, cache.v, factor, cache.entries, cache.hidden_keys
        )

    def _run_mixer(self, x: Tensor, step: AttentionMetadata, cache: LayerCache) -> Tensor:
        assert self.spec.mixer is not None
        return run_mixer(x, self.spec.mixer, self._parameters, cache.states, step, self._adapted)

    def _shared_block(self, x: Tensor, embeddings: Tensor | None, place: LayerPlace) -> Tensor:
        """Return what a shared block gives the mixer."""
        if embeddings is None:
            raise InvariantError("a layer with a shared block is run without embeddings")
        spec = self.spec
        y = self._attention(self._norm(torch.cat((x, embeddings), -1), spec.attn_in, "attn_in"), spec.attention, place)
        return self._linear(self._mlp(self._norm(y, spec.mlp_in, "mlp_in"), x), "block_out")

    def _norm(self, x: Tensor, spec: NormSpec | None, name: str) -> Tensor:
        if spec is None:
            return x
        return normalize(x, spec, self._parameters.get(f"{name}.weight"), self._parameters.get(f"{name}.bias"))

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = F.linear(x, self._parameters[f"{name}.weight"], self._parameters.get(f"{name}.bias"))
        if self.spec.shared_block is not None and f"adapters.{name}_in.weight" in self._parameters:
            first, second = f"adapters.{name}_in", f"adapters.{name}_out"
            read = self._adapted(F.linear(x, self._parameters[f"{first}.weight"]), x, first)
            y = y + self._adapted(F.linear(read, self._parameters[f"{second}.weight"]), read, second)
        return self._adapted(y, x, name)

    def _adapted(self, y: Tensor, x: Tensor, name: str) -> Tensor:
        """Return the output y of a linear layer with what LoRA adapters add for its input x; may change y."""
        return y if self._lora is None else self._lora.add_to(y, x, self._prefix + name)

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + (y if self.spec.residual_scale == 1.0 else y * self.spec.residual_scale)

    def _attention(self, x: Tensor, spec: AttentionSpec, place: LayerPlace) -> Tensor:
        names = ("q",) if spec.kv_source is not None else ("q", "k") if spec.is_v_from_k else ("q", "k", "v")
        heads = {name: self._linear(x, name) for name in names}
        if spec.is_v_from_k and spec.kv_source is None:
            heads["v"] = heads["k"]
        if spec.clip_qkv is not None:
            heads = {name: y.clamp(-spec.clip_qkv, spec.clip_qkv) for name, y in heads.items()}
        is_by_head = spec.qk_norm_over != "all"
        if not is_by_head:
            self._norm_qk(heads, spec)
        heads = {name: y.view(len(x), -1, spec.value_size if name == "v" else spec.head_dim) for name, y in heads.items()}
        if is_by_head and not spec.is_qk_norm_last:
            self._norm_qk(heads, spec)
        heads |= {name: place.rotate(y) for name, y in heads.items() if name != "v"}
        if is_by_head and spec.is_qk_norm_last:
            self._norm_qk(heads, spec)
        if spec.kv_source is None:
            v = self._norm(heads["v"], spec.v_norm, "v_norm")
            if not spec.has_plain_values:
                v = F.pad(v * spec.v_scale, (0, spec.head_dim - spec.value_size))
            store_kv(heads["k"], v, place.k_cache, place.v_cache, place.step.slots)
        sinks, q = self._parameters.get("sinks.weight"), place.scale(heads["q"])
        if self._query_copy is not None:
            rows, found = self._query_copy
            found.copy_(q[rows])
            self._query_copy = None
        if spec.block_indexer is None:
            attended = attend(q, place.k_cache, place.v_cache, place.step, spec, sinks)
        else:
            index = self._block_index(x, spec.block_indexer, place)
            attended = attend_blocks(q, index, place.entries[0], (place.k_cache, place.v_cache), place.step, spec)
        attended = attended[..., : spec.value_size].flatten(1)
        if spec.has_output_gate:
            attended = apply_output_gate(attended, self._linear(x, "attn_gate"), spec)
        return self._linear(attended, "o")

    def _block_index(self, x: Tensor, spec: BlockIndexerSpec, place: LayerPlace) -> tuple[Tensor, Tensor]:
        """Return the indexer's heads [T, H, D] and keys [T, D]."""
        q, k = (
            place.rotate(self._norm(self._linear(x, name).unflatten(-1, (-1, spec.head_dim)), spec.norm, f"{name}_norm"))
            for name in ("index_q", "index_k")
        )
        return q, k[:, 0]

    def _norm_qk(self, heads: dict[str, Tensor], spec: AttentionSpec) -> None:
        """Normalise what there is of q and k, in the dict."""
        heads.update({name: self._norm(y, spec.qk_norm, f"{name}_norm") for name, y in heads.items() if name != "v"})

    def _latent_attention(self, x: Tensor, spec: AttentionSpec, place: LayerPlace) -> Tensor:
        """Attend in the latent space of the cached rows: the key half of kv_b projects queries into it, and the value half
        projects the attention output back."""
        latent = spec.latent
        assert latent is not None
        nope, rank = latent.nope_dim, latent.kv_rank
        q_latent = x if latent.q_rank is None else self._norm(self._linear(x, "q_a"), latent.norm, "q_a_norm")
        q = self._linear(q_latent, "q")
        q_nope, q_rope = q.view(len(x), spec.num_heads, -1).split((nope, latent.rope_dim), -1)
        row, k_rope = self._linear(x, "kv_a").split((rank, latent.rope_dim), -1)
        row = self._norm(row, latent.norm, "kv_a_norm")
        up = self._parameters["kv_b.weight"].view(spec.num_heads, -1, rank)
        q_rope, k_rope = (place.rotate(heads, latent.is_interleaved) for heads in (q_rope, k_rope[:, None]))
        q_row = torch.einsum("thn,hnr->thr", q_nope, up[:, :nope])
        if self._lora is not None:
            q_row = self._lora.add_to_keys(q_row, q_nope, f"{self._prefix}kv_b", latent)
        q = place.scale(torch.cat((q_rope, q_row), -1))
        row = torch.cat((k_rope, row[:, None]), -1)
        if latent.indexer is None:
            store_kv(row, row, place.k_cache, place.v_cache, place.step.slots)
            attended = attend(q, place.k_cache, place.v_cache, place.step, spec)
        else:
            # A latent row is both key and value: what would be the cache of values holds the indexer's keys.
            store_index_keys(row[:, 0], place.k_cache, place.step.slots)
            hidden = place.hidden_keys if place.hidden_keys is not None else []
            if not latent.indexer.is_shared:
                index, keys = self._index(x, q_latent, latent.indexer, latent.rope_dim, place)
                store_index_keys(keys, place.v_cache, place.step.slots)
                hidden[:] = choose_all(index, place.v_cache, place.step, latent.indexer)
            attended = attend_indexed(q, hidden, place.k_cache, place.step, spec)
        attended = attended[..., latent.rope_dim :]
        values = torch.einsum("thr,hvr->thv", attended, up[:, nope:])
        if self._lora is not None:
            values = self._lora.add_to_values(values, attended, f"{self._prefix}kv_b", latent)
        return self._linear(values.flatten(1), "o")

    def _index(
        self, x: Tensor, q_latent: Tensor, spec: IndexerSpec, rope_dim: int, place: LayerPlace
    ) -> tuple[IndexQueries, Tensor]:
        """Return the indexer's queries, and its keys [T, D]."""
        q = self._linear(q_latent, "index_q").view(len(x), spec.num_heads, spec.head_dim)
        k = self._norm(self._linear(x, "index_k"), spec.norm, "index_k_norm")[:, None]
        q, k = (
            torch.cat((place.rotate(heads[..., :rope_dim], spec.is_interleaved), heads[..., rope_dim:]), -1) for heads in (q, k)
        )
        weights = self._linear(x, "index_weights").float() * spec.num_heads**-0.5
        return IndexQueries(q, weights), k[:, 0]

    def _mlp(self, x: Tensor, residual: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Return the output of the feed-forward block; x is the residual, normed."""
        spec = self.spec.mlp
        if not isinstance(spec, MoeSpec):
            y = self._linear(self._activate(x, spec), "down")
            return y if spec.down_scale == 1.0 else y * spec.down_scale
        if spec.branch_norm is not None and spec.shared is not None:
            return self._branches(x, residual, spec, spec.branch_norm, spec.shared)
        table = self._parameters.get("token_experts.weight")
        y = self._experts(x, spec, None, None if table is None or token_ids is None else table[token_ids])
        y = y if spec.shared is None else y + self._shared_expert(x, spec, spec.shared)
        return y if spec.output_scale == 1.0 else y * spec.output_scale

    def _experts(self, x: Tensor, spec: MoeSpec, router_input: Tensor | None = None, chosen: Tensor | None = None) -> Tensor:
        modules = ("router", "experts.gate_up", "experts.down")
        biases = [self._parameters.get(f"{module}.bias") for module in (*modules, "correction")]
        adds = () if self._lora is None else (self._add_to_expert, self._add_to_router)
        extra = replace(ExpertExtras(*biases, self._parameters.get("expert_scale.weight"), router_input, *adds), chosen=chosen)
        router, gate_up, down = (self._parameters[f"{module}.weight"] for module in modules)
        if spec.latent_size is None:
            return mixture_of_experts(x, spec, router, gate_up, down, extra)
        routed = route(router_logits(x, spec, router, extra), spec, extra.correction)
        return self._linear(run_experts(self._linear(x, "latent_in"), spec, routed, gate_up, down, extra), "latent_out")

    def _add_to_expert(self, y: Tensor, x: Tensor, rows: Tensor, expert: int, module: str) -> None:
        """See ExpertExtras."""
        if self._lora is not None:
            self._lora.add_to_rows(y, x, rows, f"{self._prefix}experts.{expert}.{module}")

    def _add_to_router(self, logits: Tensor, x: Tensor) -> Tensor:
        """See ExpertExtras."""
        return logits if self._lora is None else self._lora.add_to(logits, x, f"{self._prefix}router")

    def _branches(self, x: Tensor, residual: Tensor, spec: MoeSpec, norm: NormSpec, shared: MlpSpec) -> Tensor:
        """Return the sum of the shared expert of x and the experts of the residual, each normalised; see MoeSpec."""
        routed = normalize(residual, replace(norm, has_weight=False), None)
        routed = routed * self._parameters["router_in.weight"] * residual.shape[-1] ** -0.5
        y = self._experts(self._norm(residual, norm, "experts_in"), spec, routed)
        first = self._norm(self._shared_expert(x, spec, shared), norm, "shared_out")
        return first + self._norm(y, norm, "experts_out")

    def _shared_expert(self, x: Tensor, spec: MoeSpec, expert: MlpSpec) -> Tensor:
        y = self._linear(self._activate(x, expert, "shared."), "shared.down")
        return torch.sigmoid(self._linear(x, "shared_scale")) * y if spec.has_shared_gate else y

    def _activate(self, x: Tensor, spec: MlpSpec, prefix: str = "") -> Tensor:
        if spec.is_gated:
            gate = self._linear(x, f"{prefix}gate")
            gate = gate if spec.gate_scale == 1.0 else gate * spec.gate_scale
            return apply_gate(gate, self._linear(x, f"{prefix}up"), spec)
        up = self._linear(x, f"{prefix}up")
        if spec.activation == "xielu":
            return apply_xielu(up, self._parameters["xielu_positive.weight"], self._parameters["xielu_negative.weight"])
        return ACTIVATIONS[spec.activation](up)


def hyper_weights(parameters: Mapping[str, Tensor], name: str) -> HyperWeights:
    """Return the parameters of one hyper-connection."""
    return HyperWeights(*(parameters[f"{name}.{kind}"] for kind in ("weight", "bias", "scale")))
