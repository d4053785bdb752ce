"""NativeModelBuilder: packs the weights of a model and makes the native plan of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from quire.base.errors import InvariantError
from quire.base.logging import get_logger
from quire.contracts.mixer_spec import GatedDeltaSpec, Mamba2Spec, MixerSpec, ShortConvSpec
from quire.contracts.model_spec import (
    NO_ATTENTION,
    NO_MLP,
    AltUpSpec,
    AttentionSpec,
    LatentSpec,
    LaurelSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    PerLayerInputs,
    RopeSpec,
)
from quire.kernels.reference.activation import XIELU_BETA, normal_quantile
from quire.model.native_experts import ExpertPacker, ExpertStack, WeightForms, is_finite, weight_rows
from quire.model.native_mixers import NativeMixerBuilder, mixer_refusal
from quire.model.native_shards import attention_rows, set_shard
from quire.model.native_weights import NativeWeight, WeightPacker
from quire.model.parameters import parameter_shapes
from quire.model.pipeline_stages import PipelineStage
from quire.model.tensor_shards import ExpertShard, LayerShard, ModelShard
from quire.parallel.shards import ShardRange
from quire.quant.parameters import DenseOrQuantized, Parameter, QuantizedStack, StoredParameter, load_parameter
from quire.quant.policy import is_in_end_layer

logger = get_logger(__name__)

_SCORINGS = {"softmax": 0, "sigmoid": 1, "sparse": 2}
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "xielu": 5}
_PROGRESS_DELAY_S = 3.0
SHORT_FROM = 1 << 26
"""Number of weights above which a model does not fit into the CPU's caches, so that 12-bit bfloat16 is worthwhile."""
_INT8_HEAD_FROM = 1 << 20
"""Number of weights above which an LM head gets an int8 copy for the argmax; a smaller one is read quickly enough."""
_MAX_EXPERTS, _MAX_GROUPS = 4096, 64
"""See csrc/elementwise.h."""
_MAX_INDEX_DIM = 512
"""See csrc/attention.h."""
_MAX_WINDOW = 2**31 - 1
"""A window of this many tokens means no window: positions have 32 bits."""


def native_refusal(spec: ModelSpec, block_size: int) -> str | None:
    """Return why the native kernels cannot run a model, or None if they can."""
    if spec.implementation == "transformers":
        return "models that transformers computes"
    if block_size % 16 != 0:
        return f"a block_size of {block_size} (choose a multiple of 16)"
    odd = {layer.attention.head_dim for layer in spec.layers if layer.attention.head_dim % 2}
    if odd:
        return f"heads of {min(odd)} values (an odd number)"
    for layer in spec.layers:
        if layer.attention.chain_reason is not None:
            return layer.attention.chain_reason
        if layer.attention.alibi_scale is not None:
            return "ALiBi of 8 bits"
    if any(layer.has_clamped_mlp for layer in spec.layers):
        return "a clamped gate outside of a mixture of experts, or of a shared expert"
    mixtures = [(layer, layer.mlp) for layer in spec.layers if isinstance(layer.mlp, MoeSpec)]
    if any(moe.expert.activation == "xielu" for _, moe in mixtures):
        return "xielu in a mixture of experts"
    num_groups = max((moe.groups.count for _, moe in mixtures if moe.groups is not None), default=1)
    if num_groups > _MAX_GROUPS or any(moe.num_experts > _MAX_EXPERTS for _, moe in mixtures):
        return f"more than {_MAX_EXPERTS} experts, or {_MAX_GROUPS} groups of them"
    if any(layer.attention.query_scaling is not None and _changes_rope(layer) for layer in spec.layers):
        return "queries scaled by position with a rope that depends on the length"
    indexers = [None if layer.attention.latent is None else layer.attention.latent.indexer for layer in spec.layers]
    if any(one is not None and (one.head_dim % 2 or one.head_dim > _MAX_INDEX_DIM) for one in indexers):
        return f"an indexer whose keys have an odd number of values, or more than {_MAX_INDEX_DIM}"
    if len({None if one is None else one.top_k for one in indexers}) > 1:
        return "an indexer of keys in some layers, or of other numbers of keys"
    if any(layer.kept is not None for layer in spec.layers):
        return "a residual of what blocks read"
    for layer in spec.layers:
        refusal = mixer_refusal(layer)
        if refusal is not None:
            return refusal
    if any(moe.latent_size is not None and moe.branch_norm is not None for _, moe in mixtures):
        return "experts that read a projection of their input, in a branch of their own"
    if any(layer.attention.has_output_gate and layer.attention.latent is not None for layer in spec.layers):
        return "a gate on the output of latent attention"
    if any((layer.altup is not None or layer.laurel is not None) and not _has_known_streams(layer) for layer in spec.layers):
        return "several residual streams (AltUp) or a low-rank residual (LAuReL) in another layer than that of Gemma 3n"
    if any(layer.has_scale and layer.mlp_out is None and not isinstance(layer.mlp, MoeSpec) for layer in spec.layers):
        return "a learned factor on the output of a layer without a norm at its end"
    if not spec.is_causal:
        return "attention in both directions"
    if spec.has_head_bias and spec.is_tied:
        return "a bias of a head that is the embedding"
    return None


def _changes_rope(layer: LayerSpec) -> bool:
    return layer.attention.rope is not None and layer.attention.rope.depends_on_length


def _has_known_streams(layer: LayerSpec) -> bool:
    parts = layer.altup, layer.laurel, layer.per_layer_gate, layer.attn_out, layer.mlp_out
    is_plain = isinstance(layer.mlp, MlpSpec) and not layer.is_parallel and not layer.has_scale
    return is_plain and all(part is not None for part in parts)


def has_int8_head(spec: ModelSpec) -> bool:
    """Return whether a model's dense LM head gets an int8 copy for the argmax."""
    has_plain_logits = spec.logit_scale == 1.0 and not spec.final_softcap
    return has_plain_logits and spec.vocab_size * spec.hidden_size >= _INT8_HEAD_FROM


def int8_head_bytes(spec: ModelSpec) -> int:
    """Return the bytes of the copy of a dense head: one per weight, and three numbers per output."""
    return -(-spec.vocab_size // 16) * 16 * (-(-spec.hidden_size // 8) * 8 + 12) if has_int8_head(spec) else 0


@dataclass(frozen=True, slots=True)
class NativeParts:
    """The objects that the plan refers to; they must outlive it.

    embedding, head  None if the pipeline stage does not have it
    layers        native layers, whose cache is set later
    weight_bytes  of all packed weights
    int8_head_bytes  of the int8 copy of the head, which rules most outputs out (csrc/argmax_prefilter.h); 0: there is none
    dense_stacks  names of experts' parameters that are kept dense, as their stored forms differ
    """

    embedding: NativeWeight | None
    head: NativeWeight | None
    layers: list[Any]
    weight_bytes: int
    int8_head_bytes: int = 0
    dense_stacks: frozenset[str] = frozenset()


class NativeModelBuilder:
    """Builds a plan once.

    plan        native, and empty
    parameters  as `open_parameters` or `load_parameters` return them; emptied during packing, so that packed weights are freed
    ropes       the number of each rope in the plan
    quantize    applied to every weight by its name just before it is packed, to each expert separately; row by row
    shard       the part of the model that this rank has; None: all of it
    has_whole_vocabulary  with a shard: the parts returned have the whole embedding and LM head, packed in addition
    stage       the pipeline stage that spec and parameters are of; None: the whole model
    """

    def __init__(
        self,
        native: ModuleType,
        plan: Any,
        spec: ModelSpec,
        parameters: dict[str, Parameter | StoredParameter],
        ropes: Mapping[RopeSpec, int],
        quantize: Callable[[str, Tensor], DenseOrQuantized] | None = None,
        shard: ModelShard | None = None,
        has_whole_vocabulary: bool = False,
        stage: PipelineStage | None = None,
    ) -> None:
        self._stage = stage
        self._shard = shard
        self._has_whole_vocabulary = has_whole_vocabulary
        self._native = native
        self._plan = plan
        self._spec = spec
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._parameters = parameters
        self._rope_index = ropes
        self._quantize = quantize
        num_weights = sum(map(math.prod, parameter_shapes(spec).values()))
        self._packer = WeightPacker(native, self._dtype, is_short=num_weights >= SHORT_FROM)
        self._forms = WeightForms(spec.dtype, quantize)
        self._experts = ExpertPacker(self._forms, self._packer, self._dtype)
        self._int8_head_bytes = 0
        # Layers share the weights of a block, and so their parameters; these are kept, so that no id is used again.
        self._has_blocks = any(layer.shared_block is not None for layer in spec.layers)
        self._shared: dict[tuple[int, ShardRange | None, bool], tuple[StoredParameter, NativeWeight]] = {}

    def build(self) -> NativeParts:
        """Pack all weights and complete the plan. Raises InvariantError if parameters remain unread."""
        if self._stage is not None:
            return self._build_stage(self._stage)
        embedding = self._parameters["embed.weight"]
        vocabulary = None if self._shard is None else self._shard.vocabulary
        whole = self._pack_whole_vocabulary() if self._has_whole_vocabulary else None
        embed = self._pack("embed", rows=vocabulary)
        is_head_own = "lm_head.weight" in self._parameters and self._parameters["lm_head.weight"] is not embedding
        head = self._pack("lm_head", rows=vocabulary) if is_head_own else embed
        if not is_head_own:
            self._parameters.pop("lm_head.weight", None)
        del embedding
        self._set_embedding(embed)
        self._set_head(head)
        return self._complete(*(whole or (embed, head)), self._layers())

    def _build_stage(self, stage: PipelineStage) -> NativeParts:
        """As build, for one pipeline stage; a tied embedding is on the first and on the last."""
        embedding = self._parameters.get("embed.weight")
        own_head = self._parameters.get("lm_head.weight")
        vocabulary = None if self._shard is None else self._shard.vocabulary
        embed = None if embedding is None else self._pack("embed", rows=vocabulary)
        head = None
        if stage.is_first and embed is not None:
            self._set_embedding(embed)
        if stage.is_last:
            is_head_own = own_head is not None and own_head is not embedding
            head = self._pack("lm_head", rows=vocabulary) if is_head_own else embed
            if not is_head_own:
                self._parameters.pop("lm_head.weight", None)
            self._set_head(head)
        return self._complete(embed, head, self._layers())

    def _set_embedding(self, embed: NativeWeight) -> None:
        spec, scale = self._spec, self._spec.embed_scale
        if spec.is_embed_scale_cast:
            scale = float(torch.tensor(scale, dtype=self._dtype))
        self._plan.set_embedding(embed, self._pack("pos") if spec.num_learned_positions else None, scale)
        self._set_norm(self._plan.embed_norm, spec.embed_norm, "embed_norm", spec.hidden_size)
        if spec.per_layer_inputs is not None:
            self._set_per_layer_inputs(spec.per_layer_inputs)
        if spec.altup is not None:
            self._plan.set_streams(spec.altup.active, *(self._pack_matrices(f"altup_{name}") for name in ("split", "join")))

    def _set_per_layer_inputs(self, inputs: PerLayerInputs) -> None:
        scales = inputs.size**0.5, self._spec.hidden_size**-0.5, 2.0**-0.5
        rounded = [float(torch.tensor(scale, dtype=self._dtype)) for scale in scales]
        scales = rounded if inputs.is_scale_cast else (rounded[0], *scales[1:])
        embed, projection = (self._pack(f"per_layer_{name}") for name in ("embed", "proj"))
        self._plan.set_per_layer_inputs(embed, projection, inputs.size, *scales)
        self._set_norm(self._plan.per_layer_norm, inputs.norm, "per_layer_norm", inputs.size)

    def _set_head(self, head: NativeWeight | None) -> None:
        spec, plan = self._spec, self._plan
        if head is None:
            raise InvariantError("the model has no LM head")
        plan.set_head(head, spec.logit_scale, spec.final_softcap or 0.0)
        self._int8_head_bytes = plan.make_int8_head() if has_int8_head(spec) else 0
        self._set_norm(plan.final_norm, spec.final_norm, "final_norm", spec.hidden_size)

    def _pack_whole_vocabulary(self) -> tuple[NativeWeight, NativeWeight]:
        """Return the whole embedding and LM head, and keep the parameters."""
        names = ("embed.weight", "lm_head.weight", "lm_head.bias")
        kept = {name: self._parameters[name] for name in names if name in self._parameters}
        is_tied = kept.get("lm_head.weight", kept["embed.weight"]) is kept["embed.weight"]
        embed = self._pack("embed")
        head = embed if is_tied else self._pack("lm_head")
        self._parameters |= kept
        return embed, head

    def pack_vocabulary(self, name: Literal["embed", "lm_head"]) -> NativeWeight:
        """Return the whole embedding or LM head; of a builder that builds no plan."""
        return self._pack(name)

    def _layers(self) -> Iterator[Any]:
        """Pack layer after layer."""
        specs = tqdm(self._spec.layers, "loading layers", delay=_PROGRESS_DELAY_S, disable=None, leave=False)
        for index, spec in enumerate(specs):
            shard = None if self._shard is None else self._shard.layers[index]
            yield self._build_layer(spec, f"layers.{index}.", shard)

    def _complete(self, embedding: NativeWeight | None, head: NativeWeight | None, layers: Iterable[Any]) -> NativeParts:
        """Put the layers into the plan and end it."""
        kept = []
        for layer in layers:
            kept.append(layer)
            self._plan.add_layer(layer)
        self._plan.finish()
        if self._parameters:
            raise InvariantError(f"the native kernels left parameters unread: {sorted(self._parameters)[:8]}")
        self._plan.is_near = self._packer.is_near
        dense = frozenset(self._experts.dense_stacks)
        return NativeParts(embedding, head, kept, self._packer.num_bytes, self._int8_head_bytes, dense)

    def _pack(
        self, name: str, dtype: torch.dtype | None = None, rows: ShardRange | None = None, is_exact: bool = False
    ) -> NativeWeight:
        """Return a packed weight with its bias; rows: those of this rank."""
        parameter = self._parameters.pop(f"{name}.weight")
        key = id(parameter), rows, is_in_end_layer(name, len(self._spec.layers))
        if key in self._shared:
            self._parameters.pop(f"{name}.bias", None)
            return self._shared[key][1]
        weight = self._forms.open(parameter) if isinstance(parameter, StoredParameter) else parameter
        if isinstance(weight, QuantizedStack):
            raise TypeError(f"{name} is a stack of weights")
        bias = self._vector(f"{name}.bias")
        is_quantized = False
        if rows is not None:
            if isinstance(weight, Tensor) and self._quantize is not None and not is_finite(weight, self._dtype):
                # Non-finite values make a quantised weight dense, so all ranks must check the whole weight.
                weight, is_quantized = self._forms.of(f"{name}.weight", weight), True
            weight = self._packer.fitting(weight, dtype)
            weight, bias = weight_rows(weight, rows.start, rows.stop), None if bias is None else bias[rows.start : rows.stop]
        weight = weight if is_quantized else self._forms.of(f"{name}.weight", weight)
        packed = self._packer.pack(weight, bias, dtype, is_exact=is_exact)
        if isinstance(parameter, StoredParameter):
            parameter.give_back()
            if self._has_blocks:
                self._shared[key] = parameter, packed
        return packed

    def _pack_parts(self, name: str, ranges: Sequence[ShardRange]) -> list[NativeWeight]:
        """Return packed rows of a weight, with those of its bias: ranges after one another."""
        parameter = self._parameters.pop(f"{name}.weight")
        weight = self._forms.open(parameter) if isinstance(parameter, StoredParameter) else parameter
        if isinstance(weight, QuantizedStack):
            raise TypeError(f"{name} is a stack of weights")
        bias = self._vector(f"{name}.bias")
        weight = self._packer.fitting(self._forms.of(f"{name}.weight", weight))
        packed = [
            self._packer.pack(
                weight_rows(weight, part.start, part.stop), None if bias is None else bias[part.start : part.stop]
            )
            for part in ranges
        ]
        if isinstance(parameter, StoredParameter):
            parameter.give_back()
        return packed

    def _vector(self, name: str) -> Tensor | None:
        """Return a bias or the weight of a norm, None if there is none."""
        parameter = self._parameters.pop(name, None)
        found = None if parameter is None else load_parameter(parameter)
        if not isinstance(found, Tensor | None):
            raise TypeError(f"{name} is quantised")
        return found

    def _set_input_norms(self, layer: Any, spec: LayerSpec, prefix: str) -> None:
        """Set what attention and a mixer read: the same norm, times a factor of each."""
        name, hidden = f"{prefix}attn_in", self._spec.hidden_size
        if spec.shared_block is not None:
            self._set_norm(layer.attn_in, spec.attn_in, name, 2 * hidden)
            self._set_norm(layer.mixer_in, spec.shared_block.mixer_in, f"{prefix}mixer_in", hidden)
            return
        factor, mixed = spec.attention_in_scale, spec.mixer.scales.input if isinstance(spec.mixer, Mamba2Spec) else 1.0
        weight = self._parameters.get(f"{name}.weight")
        if spec.mixer is not None and spec.attention != NO_ATTENTION:
            self._set_norm(layer.mixer_in, spec.attn_in, name, hidden, factor=mixed)
            self._parameters |= {} if weight is None else {f"{name}.weight": weight}
        elif spec.mixer is not None:
            factor = mixed
        self._set_norm(layer.attn_in, spec.attn_in, name, hidden, factor=factor)

    def _set_norm(
        self, norm: Any, spec: NormSpec | None, name: str, size: int, num_heads: int = 1, factor: float = 1.0
    ) -> None:
        """Set a native norm of rows of `size` values, times a factor; num_heads: number of heads, each with its own weight."""
        if spec is None:
            return
        weight, bias = (self._vector(f"{name}.{kind}") for kind in ("weight", "bias"))
        if (weight is None) == spec.has_weight:
            raise InvariantError(f"{name} must have a weight: {spec.has_weight}")
        # Without a weight, values are multiplied by one.
        weight = torch.ones(size * num_heads) if weight is None else weight.float().contiguous() + spec.offset
        weight = weight if factor == 1.0 else weight * factor
        bias = None if bias is None else bias.float().contiguous()
        addresses = weight.data_ptr(), 0 if bias is None else bias.data_ptr()
        norm.set(spec.kind == "layer", size, spec.eps, *addresses, num_heads)

    def _build_layer(self, spec: LayerSpec, prefix: str, shard: LayerShard | None = None) -> Any:
        layer, attention, hidden = self._native.PlanLayer(), spec.attention, self._spec.hidden_size
        self._set_input_norms(layer, spec, prefix)
        for name in ("attn_out", "mlp_in", "mlp_out"):
            self._set_norm(getattr(layer, name), getattr(spec, name), prefix + name, hidden)
        layer.num_heads, layer.num_kv_heads, layer.head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        if spec.mixer is not None:
            self._build_mixer(layer, spec.mixer, prefix, shard)
        if attention == NO_ATTENTION:
            pass
        elif attention.latent is None:
            self._build_heads(layer, spec, prefix, shard)
        else:
            self._build_latent(layer, attention, attention.latent, prefix, shard)
        if shard is not None:
            set_shard(layer, spec, shard)
        layer.scale, layer.window, layer.softcap = (
            attention.scale,
            min(attention.window or 0, _MAX_WINDOW),
            attention.softcap or 0.0,
        )
        if attention.query_scaling is not None:
            scaling = attention.query_scaling
            layer.query_beta, layer.query_max, layer.query_offset = scaling.beta, scaling.original_max, scaling.offset
        sinks, heads = self._vector(f"{prefix}sinks.weight"), ShardRange(0, attention.num_heads)
        if shard is not None:
            heads = (shard.heads if shard.context is None else shard.context).heads
        layer.sinks = [] if sinks is None else sinks[heads.start : heads.stop].float().tolist()
        layer.slopes = list(attention.alibi_slopes[heads.start : heads.stop])
        if not attention.has_plain_values:
            layer.value_dim, layer.value_scale = attention.value_size, attention.v_scale
        layer.rope = -1 if attention.rope is None else self._rope_index[attention.rope]
        layer.attention_out_scale, layer.mixer_out_scale = spec.attention_out_scale, spec.mixer_out_scale
        layer.residual_scale, layer.is_parallel, layer.clip = spec.residual_scale, spec.is_parallel, attention.clip_qkv or 0.0
        if isinstance(spec.mlp, MoeSpec):
            self._build_experts(layer, spec.mlp, prefix, shard)
        elif spec.mlp != NO_MLP:
            self._build_mlp(layer, spec.mlp, prefix, shard)
        if spec.per_layer_gate is not None:
            layer.per_layer_gate, layer.per_layer_up = (self._pack(f"{prefix}per_layer.{name}") for name in ("gate", "up"))
            self._set_norm(layer.per_layer_norm, spec.per_layer_gate.norm, f"{prefix}per_layer.norm", hidden)
        if spec.shared_block is not None:
            self._build_block(layer, spec, prefix, shard)
        if spec.altup is not None and spec.laurel is not None:
            self._build_streams(layer.streams, spec.altup, spec.laurel, prefix)
        if spec.has_scale:
            scale = self._vector(f"{prefix}layer_scale.weight")
            assert scale is not None
            layer.output_scale = float(scale)
        return layer

    def _build_mixer(self, layer: Any, mixer: MixerSpec, prefix: str, shard: LayerShard | None) -> None:
        builder = NativeMixerBuilder(self._native, self._pack, self._pack_parts, self._vector, self._set_norm)
        layer.mixer = builder.build(mixer, prefix, None if shard is None else shard.mixer_heads)
        names: dict[type, str] = {GatedDeltaSpec: "delta.o", ShortConvSpec: "conv.out"}
        name = f"{prefix}{names.get(type(mixer), 'mamba.out')}"
        layer.mixer.out = self._pack(name, rows=None if shard is None else shard.outputs)

    def _build_block(self, layer: Any, spec: LayerSpec, prefix: str, shard: LayerShard | None) -> None:
        layer.set_block(self._pack(f"{prefix}block_out", rows=None if shard is None else shard.outputs))
        rows = {} if shard is None else {**attention_rows(spec, shard), "gate": shard.inner, "up": shard.inner}
        for name in ("q", "k", "v", "gate", "up"):
            own = f"{prefix}adapters.{name}"
            if f"{own}_in.weight" in self._parameters:
                layer.set_block_adapter(name, self._pack(f"{own}_in"), self._pack(f"{own}_out", rows=rows.get(name)))

    def _build_streams(self, streams: Any, altup: AltUpSpec, laurel: LaurelSpec, prefix: str) -> None:
        hidden = self._spec.hidden_size
        streams.router = self._pack(f"{prefix}altup.router", torch.float32)
        streams.laurel_left, streams.laurel_right = (self._pack(f"{prefix}laurel.{name}") for name in ("left", "right"))
        self._set_norm(streams.norm, altup.norm, f"{prefix}altup.norm", hidden)
        self._set_norm(streams.laurel_norm, laurel.norm, f"{prefix}laurel.norm", hidden)
        for name in ("predict", "correct", *(("scale",) if altup.has_scale else ())):
            weight = self._vector(f"{prefix}altup.{name}.weight")
            assert weight is not None
            setattr(streams, name, weight.float().flatten().tolist())

    def _pack_matrices(self, name: str) -> list[NativeWeight]:
        """Return the matrices of a stack, in the model's dtype."""
        stack = self._vector(f"{name}.weight")
        assert stack is not None
        return [self._packer.pack(matrix) for matrix in stack]

    def _build_heads(self, layer: Any, spec: LayerSpec, prefix: str, shard: LayerShard | None) -> None:
        attention = spec.attention
        is_whole, is_each = attention.qk_norm_over == "all", attention.qk_norm_over == "each"
        layer.is_qk_norm_whole, layer.is_qk_norm_each, layer.is_qk_norm_last = is_whole, is_each, attention.is_qk_norm_last
        norms = (("q_norm", attention.num_heads), ("k_norm", attention.num_kv_heads))
        for name, heads in norms if attention.kv_source is None else norms[:1]:
            size = attention.head_dim * (heads if is_whole else 1)
            self._set_norm(getattr(layer, name), attention.qk_norm, prefix + name, size, heads if is_each else 1)
        rows, layer.has_head_gate = attention_rows(spec, shard), attention.has_head_gate
        for name in ("q", "k", "v", "o", *(("attn_gate",) if attention.has_output_gate else ())):
            is_none = name in ("k", "v") and attention.kv_source is not None
            if is_none or (name == "v" and attention.is_v_from_k):
                continue
            setattr(layer, name, self._pack(prefix + name, rows=rows.get(name)))
        if attention.is_v_from_k and attention.kv_source is None:
            layer.v = layer.k
        self._set_norm(layer.v_norm, attention.v_norm, prefix + "v_norm", attention.head_dim)

    def _build_latent(
        self, layer: Any, attention: AttentionSpec, latent: LatentSpec, prefix: str, shard: LayerShard | None
    ) -> None:
        """Pack the projections, and the halves of each head's kv_b: queries into the latent space, values out of it.

        These are kept in the model's dtype, because the first is transposed, across the groups of a quantised weight.
        """
        q_a = None if latent.q_rank is None else self._pack(f"{prefix}q_a")
        heads = ShardRange(0, attention.num_heads) if shard is None else shard.heads.heads
        q_dim = latent.nope_dim + latent.rope_dim
        layer.q = self._pack(f"{prefix}q", rows=None if shard is None else ShardRange(heads.start * q_dim, heads.stop * q_dim))
        layer.k = self._pack(f"{prefix}kv_a")
        layer.o = self._pack(f"{prefix}o", rows=None if shard is None else shard.o_outputs)
        sizes = latent.kv_rank, latent.nope_dim, latent.rope_dim, latent.value_dim
        layer.set_latent(*sizes, latent.is_interleaved, q_a)
        if latent.q_rank is not None:
            self._set_norm(layer.latent_q_norm, latent.norm, f"{prefix}q_a_norm", latent.q_rank)
        self._set_norm(layer.latent_kv_norm, latent.norm, f"{prefix}kv_a_norm", latent.kv_rank)
        if latent.indexer is not None and latent.indexer.is_shared:
            layer.share_choice(latent.indexer.top_k)
        elif latent.indexer is not None:
            indexer, weights = latent.indexer, (self._pack(f"{prefix}index_{name}") for name in ("q", "k", "weights"))
            layer.set_indexer(indexer.num_heads, indexer.head_dim, indexer.top_k, indexer.is_interleaved, *weights)
            self._set_norm(layer.index_k_norm, indexer.norm, f"{prefix}index_k_norm", indexer.head_dim)
        parameter = self._parameters.pop(f"{prefix}kv_b.weight")
        weight = parameter.open() if isinstance(parameter, StoredParameter) else parameter
        if not isinstance(weight, Tensor):
            weight = weight.dequantize(self._dtype)
        for head in weight.view(attention.num_heads, -1, latent.kv_rank)[heads.start : heads.stop]:
            key_up = head[: latent.nope_dim].t().contiguous()
            parts = (key_up, head[latent.nope_dim :].contiguous())
            layer.add_latent_head(*(self._packer.pack(part, may_be_short=False) for part in parts))
        if isinstance(parameter, StoredParameter):
            parameter.give_back()

    def _build_mlp(self, layer: Any, spec: MlpSpec, prefix: str, shard: LayerShard | None) -> None:
        layer.set_activation(_ACTIVATIONS[spec.activation])
        for name in ("gate", "up", "down") if spec.is_gated else ("up", "down"):
            rows = None if shard is None else shard.outputs if name == "down" else shard.inner
            setattr(layer, name, self._pack(prefix + name, rows=rows))
        layer.gate_scale, layer.down_scale = spec.gate_scale, spec.down_scale
        if spec.sparsity > 0:
            layer.is_sparse, layer.sparse_quantile = True, float(normal_quantile(spec.sparsity))
        if spec.activation == "xielu":
            layer.positive, layer.negative = self._xielu_numbers(prefix)

    def _xielu_numbers(self, prefix: str) -> tuple[float, ...]:
        """Return the factors of x^2 and of the exponential part of xielu."""
        found = []
        for part, offset in (("positive", 0.0), ("negative", XIELU_BETA)):
            stored = self._vector(f"{prefix}xielu_{part}.weight")
            if stored is None:
                raise InvariantError(f"{prefix}xielu_{part} is missing")
            found.append(offset + torch.nn.functional.softplus(stored.float()).item())
        return tuple(found)

    def _build_experts(self, layer: Any, spec: MoeSpec, prefix: str, shard: LayerShard | None) -> None:
        layer.set_activation(_ACTIVATIONS[spec.expert.activation])
        layer.top_k, layer.is_renormalized, layer.down_scale = spec.top_k, spec.is_renormalized, spec.output_scale
        if spec.expert.clamp is not None:
            layer.gate_limit, layer.gate_slope = spec.expert.clamp.limit, spec.expert.clamp.slope
        # Routing decides which weights a token meets: it is computed in f32.
        layer.router = self._pack(f"{prefix}router", torch.float32, is_exact=spec.is_router_f32)
        layer.routing, layer.weighs_inputs = self._routing(spec, prefix), spec.weighs_inputs
        if spec.has_expert_scale:
            scale = self._vector(f"{prefix}expert_scale.weight")
            assert scale is not None
            layer.expert_scale = scale.float().tolist()
        if spec.shared is not None:
            self._build_shared(layer, spec, prefix, shard)
        if spec.branch_norm is not None:
            self._build_branch(layer, spec.branch_norm, prefix)
        if spec.latent_size is not None:
            layer.latent_in = self._pack(f"{prefix}latent_in")
            layer.latent_out = self._pack(f"{prefix}latent_out", rows=None if shard is None else shard.outputs)
        size, own = spec.expert.intermediate_size, None if shard is None else shard.experts
        inner = ShardRange(0, size) if shard is None else shard.inner
        width = spec.latent_size or self._spec.hidden_size
        outputs = ShardRange(0, width) if shard is None or own is not None else shard.expert_outputs
        layer.is_expert_gated = spec.expert.is_gated
        ranges = (inner, ShardRange(size + inner.start, size + inner.stop)) if spec.expert.is_gated else (inner,)
        both = self._pack_experts(f"{prefix}experts.gate_up", spec.num_experts, ranges, own)
        down = self._pack_experts(f"{prefix}experts.down", spec.num_experts, (outputs,), own)
        for parts in zip(both, down, strict=True):
            ups = parts[0] or [None, None]
            layer.add_expert(ups[0] if len(ups) > 1 else None, ups[-1], *(parts[1] or (None,)))
        if own is not None:
            layer.expert_copies, layer.own_copies = list(own.num_copies), list(own.own_copies)

    def _pack_experts(
        self, module: str, num_experts: int, ranges: tuple[ShardRange, ...], own: ExpertShard | None
    ) -> list[list[NativeWeight] | None]:
        stack = ExpertStack(module, self._parameters.pop(f"{module}.weight"), self._vector(f"{module}.bias"))
        return self._experts.pack(stack, num_experts, ranges, own)

    def _routing(self, spec: MoeSpec, prefix: str) -> Any:
        routing, correction = self._native.Routing(), self._vector(f"{prefix}correction.bias")
        groups = spec.groups
        routing.set(
            _SCORINGS[spec.scoring],
            *((1, 1, 1) if groups is None else (groups.count, groups.num_chosen, groups.num_best)),
            least_sum=spec.least_sum,
            scale=spec.routed_scale,
            threshold=spec.sparse_margin,
            correction=[] if correction is None else correction.float().tolist(),
        )
        return routing

    def _build_branch(self, layer: Any, norm: NormSpec, prefix: str) -> None:
        hidden = self._spec.hidden_size
        for name in ("experts_in", "experts_out", "shared_out"):
            self._set_norm(getattr(layer.branch, name), norm, prefix + name, hidden)
        factors = self._vector(f"{prefix}router_in.weight")
        assert factors is not None
        factors = factors.float() * hidden**-0.5
        layer.branch.router_in.set(norm.kind == "layer", hidden, norm.eps, factors.data_ptr())

    def _build_shared(self, layer: Any, spec: MoeSpec, prefix: str, shard: LayerShard | None) -> None:
        for name in ("gate", "up", "down") if spec.shared is not None and spec.shared.is_gated else ("up", "down"):
            rows = None if shard is None else shard.outputs if name == "down" else shard.shared_inner
            setattr(layer, f"shared_{name}", self._pack(f"{prefix}shared.{name}", rows=rows))
        if spec.has_shared_gate:
            layer.shared_scale = self._pack(f"{prefix}shared_scale")
