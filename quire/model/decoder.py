"""Decoder: executes any ModelSpec with the torch reference kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.model_spec import (
    NO_ATTENTION,
    AttentionSpec,
    IndexerSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    QueryScaling,
    RopeSpec,
)
from quire.kernels.reference.activation import ACTIVATIONS, apply_gate, apply_xielu
from quire.kernels.reference.attention import AttentionMetadata, attend, move_kv, store_kv
from quire.kernels.reference.indexed_attention import IndexQueries, attend_indexed, store_index_keys
from quire.kernels.reference.moe import ExpertBiases, mixture_of_experts
from quire.kernels.reference.norm import normalize
from quire.kernels.reference.rope import cos_sin, inverse_frequencies, query_factors, rotate
from quire.kv.pool import KvPool
from quire.model.mixers import run_mixer
from quire.model.token_runs import TokenRuns
from quire.quant.parameters import Parameter, StoredParameter, dense_parameters


class Decoder:
    """A decoder-only model: a spec and its parameters under their canonical names.

    parameters     canonical name -> tensor in the spec's dtype or quantised weight, as `open_parameters` or
                   `load_parameters` return them; quantised weights are made dense once, here
    max_model_len  the longest sequence; some rope scalings depend on it
    """

    def __init__(self, spec: ModelSpec, parameters: Mapping[str, Parameter | StoredParameter], max_model_len: int) -> None:
        self.spec = spec
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        dense = dense_parameters(parameters, self.dtype)
        self._parameters = dense
        ropes = {layer.attention.rope for layer in spec.layers if layer.attention.rope is not None}
        self._frequencies = {rope: inverse_frequencies(rope, max_model_len) for rope in ropes}
        changing = [rope for rope in ropes if rope.depends_on_length]
        self._short_frequencies = {rope: inverse_frequencies(rope, rope.original_max) for rope in changing}
        self._layers = [DecoderLayer(layer, f"layers.{index}.", dense) for index, layer in enumerate(spec.layers)]
        self._hidden: Tensor | None = None
        self._hidden_rows: list[int] = []
        self._kept_rows: list[int] | None = None
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
        x = F.embedding(token_ids, self._parameters["embed.weight"])
        if spec.embed_scale != 1.0:
            x = x * (torch.tensor(spec.embed_scale, dtype=self.dtype) if spec.is_embed_scale_cast else spec.embed_scale)
        if spec.num_learned_positions:
            x = x + F.embedding(positions, self._parameters["pos.weight"])
        if spec.embed_norm is not None:
            x = self._norm(x, spec.embed_norm, "embed_norm")
        factors = {scaling: query_factors(scaling, positions, self.dtype) for scaling in self._scalings}
        angles = {rope: cos_sin(rope, self._frequencies_of(rope, step), positions, self.dtype) for rope in self._frequencies}
        self._taps = []
        for index in range(len(self._layers)) if layers is None else layers:
            if index in self._aux_hidden_state_layers:
                self._taps.append(x)
            cache = LayerCache(kv.k[index], kv.v[index], kv.states[index] if kv.states else ())
            x = self._layers[index].forward(x, angles, step, cache, factors=factors)
        return self._norm(x, spec.final_norm, "final_norm")

    def _norm(self, x: Tensor, spec: NormSpec, name: str) -> Tensor:
        return normalize(x, spec, self._parameters.get(f"{name}.weight"), self._parameters.get(f"{name}.bias"))

    def step(
        self,
        token_ids: Tensor,
        positions: Tensor,
        step: AttentionMetadata,
        kv: KvPool,
        logit_rows: list[int],
        keeps_all: bool = False,
        hidden_rows: list[int] | None = None,
        layers: Sequence[int] | None = None,
    ) -> Tensor:
        """Compute the tokens of one step and return the logits [R, vocab_size] of the rows in `logit_rows`.

        keeps_all    logits_at may ask for other rows before the next step
        hidden_rows  other rows, of which hidden_states may ask for some
        layers       the layers to run, in order; None: all. The KV of the others is unchanged
        """
        hidden = self.forward(token_ids, positions, step, kv, layers)
        self._hidden = hidden if keeps_all or hidden_rows else None
        self._hidden_rows = hidden_rows or []
        return self.logits(hidden[torch.tensor(logit_rows, dtype=torch.int64)])

    def run(
        self,
        runs: TokenRuns,
        kv: KvPool,
        logit_rows: list[int],
        hidden_rows: list[int] | None = None,
        *,
        keeps_all: bool = False,
        wants_best: bool = False,
        needs_logits: bool = True,
    ) -> tuple[Tensor, list[int] | None]:
        """As `step`, for runs of tokens; returns None for the best tokens, which only the native decoder computes."""
        self._kept_rows = None if keeps_all else logit_rows
        return self.step(*runs.tensors(kv.spec.block_size), kv, logit_rows, True, hidden_rows), None

    def move_tokens(self, kv: KvPool, sources: Tensor, targets: Tensor) -> None:
        """Copy the KV of the slots `sources` [N] i64 to `targets` in every layer; all are read before any is written."""
        for k_cache, v_cache in zip(kv.k, kv.v, strict=True):
            move_kv(k_cache, v_cache, sources, targets)

    def logits_at(self, first: int, last: int) -> Tensor:
        """Return the logits of rows [first, last) of the last step, which kept all."""
        if self._hidden is None:
            raise InvariantError("the last step did not keep its rows")
        return self.logits(self._hidden[first:last])

    def hidden_states(self, first: int, last: int) -> Tensor:
        """Return the hidden states [last - first, hidden_size] f32, after the final norm, of a run of the last hidden_rows."""
        if self._hidden is None:
            raise InvariantError("the last step did not keep its rows")
        return self._hidden[torch.tensor(self._hidden_rows[first:last], dtype=torch.int64)].float()

    def final_states(self, places: Sequence[int]) -> Tensor:
        """Return the hidden states [R, hidden_size] f32, after the final norm, of rows of the last `run`: the indices of
        tokens if it kept all, otherwise indices into its logit_rows."""
        if self._hidden is None:
            raise InvariantError("the last step did not keep its rows")
        rows = places if self._kept_rows is None else [self._kept_rows[place] for place in places]
        return self._hidden[torch.tensor(rows, dtype=torch.int64)].float()

    def keep_inputs(self, layers: tuple[int, ...]) -> None:
        """Keep the inputs of these layers, low to high, in every step from now on."""
        self._aux_hidden_state_layers = layers

    def layer_inputs(self, rows: Sequence[int]) -> Tensor:
        """Return the kept inputs [R, layers * hidden_size] f32 of rows of the last step's tokens."""
        chosen = torch.tensor(rows, dtype=torch.int64)
        return torch.cat([tap[chosen].float() for tap in self._taps], -1) if self._taps else torch.empty(len(rows), 0)

    def parameter(self, name: str) -> Tensor | None:
        """Return a dense parameter by its canonical name; None if the model has none."""
        return self._parameters.get(name)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, vocab_size] of rows of `forward`'s result, in the model's dtype."""
        logits = F.linear(hidden, self._head, self._parameters.get("lm_head.bias"))
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        if self.spec.final_softcap is not None:
            logits = torch.tanh(logits / self.spec.final_softcap) * self.spec.final_softcap
        return logits


class LayerCache(NamedTuple):
    """One layer's tensors of a KvPool; states: the recurrent states of a mixer."""

    k: Tensor
    v: Tensor
    states: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The positions of a step's tokens for one layer.

    angles  cos and sin of its rope; None: it has none
    factor  [T, 1, 1] that scales queries by their positions; None: no scaling
    """

    angles: tuple[Tensor, Tensor] | None
    step: AttentionMetadata
    k_cache: Tensor
    v_cache: Tensor
    factor: Tensor | None = None

    def rotate(self, heads: Tensor, is_interleaved: bool = False) -> Tensor:
        """Return heads [T, H, D] rotated."""
        return heads if self.angles is None else rotate(heads, *self.angles, is_interleaved=is_interleaved)

    def scale(self, q: Tensor) -> Tensor:
        """Return queries [T, H, D] scaled by their positions."""
        return q if self.factor is None else q * self.factor


class DecoderLayer:
    """One layer; it takes the `parameters` whose canonical names begin with `prefix`."""

    def __init__(self, spec: LayerSpec, prefix: str, parameters: dict[str, Tensor]) -> None:
        self.spec = spec
        self._parameters = {n.removeprefix(prefix): p for n, p in parameters.items() if n.startswith(prefix)}

    def forward(
        self,
        x: Tensor,
        angles: dict[RopeSpec, tuple[Tensor, Tensor]],
        step: AttentionMetadata,
        cache: LayerCache,
        attended: Tensor | None = None,
        factors: Mapping[QueryScaling, Tensor] | None = None,
    ) -> Tensor:
        """Return the layer's output [T, H].

        attended  the input of attention, if it is not the normed input
        factors   the factors on queries [T, 1, 1] of each query scaling; None: the model has none
        """
        spec = self.spec
        normed = self._norm(x, spec.attn_in, "attn_in") if attended is None else attended
        before = x
        y = self._mix(normed, angles, step, cache, factors)
        x = self._add(x, self._norm(y, spec.attn_out, "attn_out"))
        if spec.is_parallel:
            read = normed if spec.mlp_in is None else self._norm(before, spec.mlp_in, "mlp_in")
        else:
            read = self._norm(x, spec.mlp_in, "mlp_in")
        return self._add(x, self._norm(self._mlp(read), spec.mlp_out, "mlp_out"))

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
        mixed = None if mixer is None else run_mixer(x, mixer, self._parameters, cache.states, step)
        if mixed is not None and attention == NO_ATTENTION:
            return mixed
        scaling, rope = attention.query_scaling, attention.rope
        if scaling is not None and factors is None:
            raise InvariantError("a layer that scales queries by their positions is run without factors")
        factor = None if scaling is None or factors is None else factors[scaling]
        place = LayerPlace(None if rope is None else angles[rope], step, cache.k, cache.v, factor)
        run = self._attention if attention.latent is None else self._latent_attention
        y = run(x, attention, place)
        return y if mixed is None else y + mixed

    def _norm(self, x: Tensor, spec: NormSpec | None, name: str) -> Tensor:
        if spec is None:
            return x
        return normalize(x, spec, self._parameters.get(f"{name}.weight"), self._parameters.get(f"{name}.bias"))

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._parameters[f"{name}.weight"], self._parameters.get(f"{name}.bias"))

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + (y if self.spec.residual_scale == 1.0 else y * self.spec.residual_scale)

    def _attention(self, x: Tensor, spec: AttentionSpec, place: LayerPlace) -> Tensor:
        q, k, v = self._linear(x, "q"), self._linear(x, "k"), self._linear(x, "v")
        if spec.clip_qkv is not None:
            q, k, v = (y.clamp(-spec.clip_qkv, spec.clip_qkv) for y in (q, k, v))
        if spec.qk_norm is not None and spec.qk_norm_over == "all":
            q, k = self._norm(q, spec.qk_norm, "q_norm"), self._norm(k, spec.qk_norm, "k_norm")
        q, k, v = (y.view(len(x), -1, spec.head_dim) for y in (q, k, v))
        by_head = None if spec.qk_norm_over == "all" else spec.qk_norm
        if by_head is not None and not spec.is_qk_norm_last:
            q, k = self._norm(q, by_head, "q_norm"), self._norm(k, by_head, "k_norm")
        q, k = place.rotate(q), place.rotate(k)
        if by_head is not None and spec.is_qk_norm_last:
            q, k = self._norm(q, by_head, "q_norm"), self._norm(k, by_head, "k_norm")
        store_kv(k, v, place.k_cache, place.v_cache, place.step.slots)
        attended = attend(place.scale(q), place.k_cache, place.v_cache, place.step, spec, self._parameters.get("sinks.weight"))
        attended = attended.flatten(1)
        if spec.has_output_gate:
            attended = attended * torch.sigmoid(self._linear(x, "attn_gate"))
        return self._linear(attended, "o")

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
        q = place.scale(torch.cat((q_rope, torch.einsum("thn,hnr->thr", q_nope, up[:, :nope])), -1))
        row = torch.cat((k_rope, row[:, None]), -1)
        if latent.indexer is None:
            store_kv(row, row, place.k_cache, place.v_cache, place.step.slots)
            attended = attend(q, place.k_cache, place.v_cache, place.step, spec)
        else:
            # The indexer's keys are stored in the value cache, since a latent row is both key and value.
            index, keys = self._index(x, q_latent, latent.indexer, latent.rope_dim, place)
            store_index_keys(row[:, 0], place.k_cache, place.step.slots)
            store_index_keys(keys, place.v_cache, place.step.slots)
            attended = attend_indexed(q, index, (place.k_cache, place.v_cache), place.step, spec, latent.indexer)
        attended = attended[..., latent.rope_dim :]
        return self._linear(torch.einsum("thr,hvr->thv", attended, up[:, nope:]).flatten(1), "o")

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

    def _mlp(self, x: Tensor) -> Tensor:
        spec = self.spec.mlp
        if isinstance(spec, MoeSpec):
            modules = ("router", "experts.gate_up", "experts.down")
            biases = ExpertBiases(*(self._parameters.get(f"{module}.bias") for module in (*modules, "correction")))
            y = mixture_of_experts(x, spec, *(self._parameters[f"{module}.weight"] for module in modules), biases)
            return y if spec.shared is None else y + self._shared_expert(x, spec, spec.shared)
        return self._linear(self._activate(x, spec), "down")

    def _shared_expert(self, x: Tensor, spec: MoeSpec, expert: MlpSpec) -> Tensor:
        y = self._linear(self._activate(x, expert, "shared."), "shared.down")
        return torch.sigmoid(self._linear(x, "shared_scale")) * y if spec.has_shared_gate else y

    def _activate(self, x: Tensor, spec: MlpSpec, prefix: str = "") -> Tensor:
        if spec.is_gated:
            return apply_gate(self._linear(x, f"{prefix}gate"), self._linear(x, f"{prefix}up"), spec)
        up = self._linear(x, f"{prefix}up")
        if spec.activation == "xielu":
            return apply_xielu(up, self._parameters["xielu_positive.weight"], self._parameters["xielu_negative.weight"])
        return ACTIVATIONS[spec.activation](up)
