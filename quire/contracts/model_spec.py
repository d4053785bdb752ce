"""ModelSpec: a decoder-only model as data. A family's page reads config.json into one; one decoder executes any.

Everything is resolved when the spec is read: no layer types, defaults or scaling rules are left for the step. Layers that
are alike share one LayerSpec object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.base.errors import UnsupportedError
from quire.contracts.mixer_spec import MixerSpec
from quire.contracts.sparse_spec import BlockIndexerSpec, CompressionSpec, SharedKvSpec

Dtype = Literal["float32", "bfloat16", "float16"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
"""relu2 is relu(x) ** 2. xielu (Huang and Schlag, 2024) has two learned numbers per layer, see `parameter_shapes`."""
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A normalisation over the last dimension.

    kind       "rms" (Zhang and Sennrich, 2019) or "layer" (with mean and, if has_bias, a bias)
    offset     added to the weight: 1 where the checkpoint stores w - 1 (Gemma)
    late_cast  multiply by the weight in f32 and round once; otherwise the normalised value is rounded to the dtype first
    has_weight False: nothing is multiplied (OLMo, nanochat)
    """

    kind: Literal["rms", "layer"]
    eps: float
    offset: int = 0
    has_bias: bool = False
    late_cast: bool = False
    has_weight: bool = True


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al., 2021) over the first `dim` of each head, pairing i with i + dim / 2.

    Families that pair 2i with 2i + 1 have the rows of their q and k reordered when they are loaded (`sources.pair_halves`):
    scores do not depend on the order of a head's elements.

    kind                "default", "linear", "dynamic" (NTK), "llama3", "yarn" (Peng et al., 2023), "longrope" or "proportional"
                        (Gemma 4: only the first num_pairs of the dim / 2 pairs rotate, the others have the angle 0)
    original_max        positions the model was trained on before scaling
    attention_factor    multiplies cos and sin
    short, long         longrope's divisors per frequency, dim / 2 each
    is_f32              rotate in f32 and round once; otherwise cos and sin are rounded to the dtype first
    is_table_rounded    with is_f32: cos and sin are rounded to the dtype all the same (Cohere)
    "dynamic" and "longrope" depend on the length of a sequence, see ModelSpec.rope_switch_len
    """

    dim: int
    theta: float
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"] = "default"
    factor: float = 1.0
    original_max: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    is_f32: bool = False
    is_table_rounded: bool = False
    num_pairs: int = 0

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on how long the sequence is."""
        return self.kind in ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """What chooses the keys that a query attends to, the best top_k of all before it (DeepSeek-V3.2, GLM-5).

    The score of a key is the sum over heads of relu(q.k / sqrt(head_dim)), times a weight that the query gives each head.

    norm            of keys, a layer norm with bias
    is_interleaved  how the first values of its heads are rotated, as in LatentSpec
    is_shared       queries attend to the keys that the last indexer before it has chosen: the layer has none (GLM-5.2)
    """

    num_heads: int
    head_dim: int
    top_k: int
    norm: NormSpec
    is_interleaved: bool = False
    is_shared: bool = False

    @property
    def key_size(self) -> int:
        """The values that are cached of a token."""
        return 0 if self.is_shared else self.head_dim


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (MLA, DeepSeek-V2: https://arxiv.org/abs/2405.04434).

    Keys and values of all heads are made of one latent row per token, which is cached, with a rotated key that all heads share.

    q_rank      size of the latent row that queries are made of; None: they are made of the input
    kv_rank     size of the latent row that keys and values are made of
    nope_dim    of a head of queries and keys, not rotated; rope_dim: rotated, after the others
    value_dim   of a head of values
    norm        of both latent rows
    has_bias    on the projections to the latent rows
    is_interleaved  2i is rotated with 2i + 1 of the rope_dim values, and not i with i + rope_dim / 2
    indexer     None: queries attend to all keys before them
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm: NormSpec
    has_bias: bool = False
    is_interleaved: bool = False
    indexer: IndexerSpec | None = None


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """A factor on the queries of late positions (Llama 4): 1 + beta * log(1 + floor((position + offset) / original_max))."""

    beta: float
    original_max: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Multi-head, multi-query or grouped-query attention; num_heads is a multiple of num_kv_heads.

    scale          multiplies q.k
    window         a token attends to itself and the window - 1 tokens before it; None: to all before it
    qk_norm_over   "head": one weight of head_dim for every head; "each": a weight of its own for each head; "all": over the
                   concatenated heads
    is_qk_norm_last q and k are normalised after the rotation, head by head
    query_scaling  None: queries are the same at any position
    clip_qkv       q, k and v are clipped to [-clip_qkv, clip_qkv] as they are projected (OLMo)
    softcap        scores become softcap * tanh(scores / softcap), before the mask
    alibi_slopes   of each head, what a score loses for each token between query and key (ALiBi, https://arxiv.org/abs/2108.12409);
                   empty: nothing
    alibi_scale    None: that; otherwise scores gain the slope times the key's position, both of 8 bits, times this (Falcon)
    is_softmax_f32 softmax in f32, rounded to the dtype after; False (GPT-2): in the dtype
    has_sinks      attention sinks: a learned logit per query head takes part in the softmax, without a value (gpt-oss)
    is_v_from_k    values are what k projects, before norm and rotation (Gemma 4): there is no v
    v_norm         normalises each head of v, without a weight (Gemma 3n and 4)
    kv_source      the earlier layer whose cached keys and values the layer reads: it has no k and v, and stores nothing; None:
                   its own
    has_output_gate what the heads give is multiplied by the sigmoid of a further projection, before o (Qwen3-Next)
    has_head_gate  with it: the projection has one number a head, whose softplus multiplies the head (Laguna)
    is_causal      False: a token attends to all tokens of the sequence, or with a window to those less than `window` away on
                   either side
    latent         multi-head latent attention, absorbed: num_kv_heads is 1, and head_dim that of the cached row, in which the
                   rotated values stand first. Key and value are both that row
    shared_kv      multi-query attention whose key and value are one row; num_kv_heads is 1
    v_dim, v_scale the size of a value, at most head_dim, and what multiplies values; None: head_dim. The cache has zeros after
                   smaller values
    block_indexer  chooses blocks of keys that queries attend to; None: they attend to all keys before them
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None = None
    window: int | None = None
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    qk_norm: NormSpec | None = None
    qk_norm_over: Literal["head", "each", "all"] = "head"
    is_qk_norm_last: bool = False
    query_scaling: QueryScaling | None = None
    clip_qkv: float | None = None
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] = ()
    alibi_scale: float | None = None
    is_softmax_f32: bool = True
    has_sinks: bool = False
    is_v_from_k: bool = False
    v_norm: NormSpec | None = None
    kv_source: int | None = None
    has_output_gate: bool = False
    has_head_gate: bool = False
    latent: LatentSpec | None = None
    is_causal: bool = True
    shared_kv: SharedKvSpec | None = None
    block_indexer: BlockIndexerSpec | None = None
    v_dim: int | None = None
    v_scale: float = 1.0

    @property
    def reads_other_layer(self) -> bool:
        """Whether it reads the cached keys and values of an earlier layer, or which keys that has chosen."""
        indexer = None if self.latent is None else self.latent.indexer
        return self.kv_source is not None or (indexer is not None and indexer.is_shared)

    @property
    def compression(self) -> CompressionSpec | None:
        """The compressed entries that it attends to beside its window; None: there are none."""
        return None if self.shared_kv is None else self.shared_kv.compression

    @property
    def kept_window(self) -> int | None:
        """How many last tokens must stay in the cache of the layer, those that the next entry is made of too; None: all."""
        if self.window is None or self.compression is None:
            return self.window
        return max(self.window, self.compression.num_source_tokens)

    @property
    def cached_size(self) -> int:
        """The values of a key in the cache: with compression, what entries are made of stands after it."""
        return self.head_dim + (0 if self.compression is None else sum(self.compression.source_sizes(self.head_dim)))

    @property
    def output_size(self) -> int:
        """The size of what the heads give together, which the o projection reads."""
        return self.num_heads * (self.value_size if self.latent is None else self.latent.value_dim)

    @property
    def value_size(self) -> int:
        """The size of a value."""
        return self.head_dim if self.v_dim is None else self.v_dim

    @property
    def has_plain_values(self) -> bool:
        """Whether values are as large as keys, and stored as they are projected."""
        return self.value_size == self.head_dim and self.v_scale == 1.0

    @property
    def chain_reason(self) -> str | None:
        """See ModelSpec.chain_reason."""
        if self.shared_kv is not None:
            return "compressed keys and values"
        return None if self.block_indexer is None else "an indexer of blocks of keys"


NO_ATTENTION = AttentionSpec(0, 0, 0, scale=1.0)
"""Of layers without attention: no heads, and no KV."""


@dataclass(frozen=True, slots=True)
class GateClamp:
    """A gate that takes g = min(gate, limit) and u = up within -limit and limit, and gives (u + 1) * g * sigmoid(slope * g).

    slope  None: it gives activation(g) * u (DeepSeek-V4)
    """

    limit: float
    slope: float | None


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """A feed-forward block: down(act(gate(x)) * up(x)) when gated, down(act(up(x))) otherwise.

    clamp     stands in the place of the activation function and the product of a gated block (gpt-oss); None: neither is
              clamped
    sparsity  the share of the gate's values that become 0 before the activation, if they are normally distributed: those
              below mean + quantile(sparsity) * deviation, which is subtracted from the others (Gemma 3n); 0: none
    gate_scale, down_scale  multiply what the gate gives, and the output (Falcon-H1)
    """

    intermediate_size: int
    activation: Activation
    is_gated: bool = True
    has_bias: bool = False
    clamp: GateClamp | None = None
    sparsity: float = 0.0
    gate_scale: float = 1.0
    down_scale: float = 1.0


NO_MLP = MlpSpec(0, "relu", is_gated=False)
"""Of layers without a feed-forward block (Nemotron-H, Mamba)."""


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Experts in equal groups, of which a token takes the best `num_chosen`, by the sum of the num_best best scores of each."""

    count: int
    num_chosen: int
    num_best: int = 1


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts: scores of all experts in f32, then the top_k of them.

    is_renormalized  the chosen weights are divided by their sum
    is_weight_f32    weights stay f32 over the product with the expert's output (Mixtral); otherwise rounded to the dtype
    has_router_bias  the router's logits have a bias
    scoring          "softmax" over the experts, "sigmoid" or "sqrt_softplus" of each, or "sparse" (SparseMixer, Phi-3.5-MoE)
    has_correction   a bias is added to the scores for choosing, but not to the weights (DeepSeek-V3)
    groups           None: the experts are not grouped
    least_sum        the least that renormalised weights are divided by
    routed_scale     multiplies the weights in the end
    is_router_f32    the router's product is in f32
    is_score_f32     scores and weights are computed in f32; otherwise in the dtype (LFM2; kernels of GPUs
                     compute them in f32)
    is_sum_f32       the outputs of the experts are added in f32 and rounded once (Nemotron-H)
    sparse_margin    with "sparse": of the scores, see `sparse_weights` in kernels/reference/moe.py
    weighs_inputs    the weights multiply what the experts read, not what they give (Llama 4)
    shared           an expert that every token is given in addition; None: none
    has_shared_gate  it is multiplied by the sigmoid of a linear layer of one output (Qwen2-MoE)
    branch_norm      the shared expert and the others are two branches (Gemma 4): experts read the residual under a norm of
                     their own, the router reads it normalised without a weight, times a learned vector and
                     hidden_size ** -0.5, and the output of each branch is normalised before they are added; None: all read
                     the same
    has_expert_scale the weights are multiplied by a learned number of each expert in the end (Gemma 4)
    latent_size      what the experts read and give is projected to this size and back; the router and the shared expert read
                     the input itself (Nemotron 3). None: it is not. has_latent_bias: these projections have a bias
    output_scale     multiplies the sum of all experts in the end (Cohere 2 takes the mean of it and the shared expert)
    has_token_table  the experts of a token are those that a table has for its id, weighed by their scores (DeepSeek-V4)
    """

    num_experts: int
    top_k: int
    expert: MlpSpec
    is_renormalized: bool = True
    is_weight_f32: bool = False
    has_router_bias: bool = False
    scoring: Literal["softmax", "sigmoid", "sqrt_softplus", "sparse"] = "softmax"
    has_correction: bool = False
    groups: ExpertGroups | None = None
    least_sum: float = 0.0
    routed_scale: float = 1.0
    is_router_f32: bool = False
    is_score_f32: bool = True
    is_sum_f32: bool = False
    sparse_margin: float = 0.0
    weighs_inputs: bool = False
    shared: MlpSpec | None = None
    has_shared_gate: bool = False
    branch_norm: NormSpec | None = None
    has_expert_scale: bool = False
    latent_size: int | None = None
    has_latent_bias: bool = False
    output_scale: float = 1.0
    has_token_table: bool = False

    @property
    def is_plain_softmax(self) -> bool:
        """Whether experts are chosen and weighed by the softmax of the router alone."""
        is_plain = self.scoring == "softmax" and not self.has_correction and self.groups is None
        return is_plain and self.least_sum == 0 and self.routed_scale == 1


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """Embeddings that a layer gets of each token in addition to the residual (PLE, Gemma 3n and 4).

    They are (norm(proj(x)) + embedding(token)) / sqrt(2) with x the model's embedding: `size` values for each layer.

    vocab_size     tokens from here on have the embedding of token 0
    norm           of the projection, over the `size` values of a layer
    is_scale_cast  the factors are rounded to the weights' dtype first (Gemma 3n)
    """

    vocab_size: int
    size: int
    norm: NormSpec
    is_scale_cast: bool = False


@dataclass(frozen=True, slots=True)
class PerLayerGate:
    """What a layer does with its per-layer inputs p of `size`: norm(up(activation(gate(x)) * p)) is added to x."""

    size: int
    activation: Activation
    norm: NormSpec


@dataclass(frozen=True, slots=True)
class LaurelSpec:
    """A low-rank residual next to attention (LAuReL, https://arxiv.org/abs/2411.07501).

    y + norm(right(left(y))) of the normed input y is added to the residual after attention, and the sum divided by sqrt(2).
    """

    rank: int
    norm: NormSpec


@dataclass(frozen=True, slots=True)
class AltUpSpec:
    """Alternating updates (https://arxiv.org/abs/2301.13310): num_streams residual streams, of which layers compute one.

    Before a layer all streams are predicted from all, after it they are corrected by what it has made of the active one.

    norm       of what the routers of both read
    has_scale  the per-layer gate reads the active stream times a learned vector
    """

    num_streams: int
    active: int
    norm: NormSpec
    has_scale: bool = True


@dataclass(frozen=True, slots=True)
class HyperSpec:
    """Hyper-connections whose mixing is doubly stochastic (mHC, https://arxiv.org/abs/2512.24880): residual streams.

    Each block reads a sum of the streams and is added to all of them, which are mixed with one another, by weights that depend
    on the streams.

    num_iterations  of normalising rows and columns of the mixing (Sinkhorn and Knopp); eps is added to what they divide by
    norm            of all streams together, from which the weights are made
    """

    num_streams: int
    num_iterations: int
    eps: float
    norm: NormSpec

    @property
    def num_weights(self) -> int:
        """Of a block: what it reads of each stream, what is added to each, and the mixing."""
        return self.num_streams * (2 + self.num_streams)


@dataclass(frozen=True, slots=True)
class SharedBlockSpec:
    """A transformer block before the mixer of a layer, whose weights several layers share (Zamba 2, arXiv 2411.15242).

    The block reads the residual concatenated with the embeddings, [T, 2 * hidden_size]. Attention and the feed-forward block
    follow each other without residual connections. A matrix of the layer projects the result, and the mixer reads the sum of
    that and the residual; only the output of the mixer is added to the residual.

    mixer_in        the norm of what the mixer reads
    attention_rank  of the layer's own low-rank adapters of q, k and v; None: they have none
    mlp_rank        of the layer's own low-rank adapter of gate and up
    """

    mixer_in: NormSpec
    attention_rank: int | None
    mlp_rank: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: x += residual_scale * attn_out(attention(attn_in(x))), then the same with the mlp; a norm may be None.

    is_parallel  both blocks read the same x, and their results are added to it together; without mlp_in the feed-forward block
                 reads what attention reads
    mixer        has a recurrent state. It reads what attention reads, and its output is added to that of attention, which is
                 NO_ATTENTION where the mixer stands in its place; None: there is none. A layer may have neither attention nor
                 a mixer, and its mlp may be NO_MLP: then it has the other block only
    per_layer_gate  adds the per-layer inputs after the feed-forward block: to x, with alternating updates to all streams but
                 the first; None: there are none
    has_scale    the layer's output is multiplied by a learned number (Gemma 4)
    laurel       None: nothing is added to attention
    altup        the same in all layers of a model; None: there is one residual stream
    attention_in_scale, attention_out_scale, mixer_out_scale  multiply what attention reads, its output and that of the mixer
                 (Falcon-H1)
    kept         what a block reads, times these (of attention or the mixer, and of mlp), is the residual after it (MiniMax);
                 None: the residual is as it was
    shared_block  attention and mlp are a block before the mixer; None: they are not
    hyper        the same in all layers of a model; None: there is one residual stream
    """

    attention: AttentionSpec
    mlp: MlpSpec | MoeSpec
    attn_in: NormSpec | None = None
    attn_out: NormSpec | None = None
    mlp_in: NormSpec | None = None
    mlp_out: NormSpec | None = None
    residual_scale: float = 1.0
    is_parallel: bool = False
    mixer: MixerSpec | None = None
    per_layer_gate: PerLayerGate | None = None
    has_scale: bool = False
    laurel: LaurelSpec | None = None
    altup: AltUpSpec | None = None
    attention_in_scale: float = 1.0
    attention_out_scale: float = 1.0
    mixer_out_scale: float = 1.0
    shared_block: SharedBlockSpec | None = None
    hyper: HyperSpec | None = None
    kept: tuple[float, float] | None = None

    @property
    def is_mlp_only(self) -> bool:
        """Whether the layer has a feed-forward block and nothing else."""
        return self.attention == NO_ATTENTION and self.mixer is None

    @property
    def has_clamped_mlp(self) -> bool:
        """Whether the gate of its feed-forward block, or of its shared expert, is clamped."""
        mlp = self.mlp.shared if isinstance(self.mlp, MoeSpec) else self.mlp
        return mlp is not None and mlp.clamp is not None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole model, with the facts of config.json that the engine needs beside the graph.

    max_positions        positions that the model can take (after scaling, where the configuration says so)
    is_tied              the output head is the embedding
    embed_scale          multiplies embeddings; is_embed_scale_cast: it is first rounded to the weights' dtype (Gemma)
    num_learned_positions rows of a learned position embedding that is added (GPT-2); 0: none
    embed_norm           normalises the embeddings before the first layer (nanochat)
    has_head_bias        the output head has a bias (Phi-2, Phi-3.5-MoE)
    is_residual_f32      the residual is f32 whatever the dtype is (Mamba); only in models that torch runs
    logit_scale          multiplies logits; final_softcap caps them, in the dtype
    per_layer_inputs     None: layers get nothing but the residual
    eos_token_ids        of config.json and generation_config.json together
    implementation       "quire": the spec says all; "transformers": the transformers library computes the model. Then there is
                         a layer for each call of attention, and only attention, the sizes and the token ids are meaningful
    """

    model_type: str
    dtype: Dtype
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    max_positions: int
    is_tied: bool = False
    embed_scale: float = 1.0
    is_embed_scale_cast: bool = False
    num_learned_positions: int = 0
    embed_norm: NormSpec | None = None
    has_head_bias: bool = False
    is_residual_f32: bool = False
    logit_scale: float = 1.0
    final_softcap: float | None = None
    per_layer_inputs: PerLayerInputs | None = None
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    implementation: Literal["quire", "transformers"] = "quire"

    @property
    def has_recurrent_state(self) -> bool:
        """Whether sequences have a state of fixed size besides their KV."""
        return any(layer.mixer is not None for layer in self.layers)

    @property
    def chain_reason(self) -> str | None:
        """What lets a model verify drafts only if they are a chain, of methods that read nothing of it; None: nothing."""
        if self.has_recurrent_state:
            return "a recurrent state"
        return next((reason for layer in self.layers if (reason := layer.attention.chain_reason) is not None), None)

    @property
    def is_causal(self) -> bool:
        """Whether a token's hidden state depends only on the tokens before it: prompts may be cut, and their KV reused."""
        return all(layer.attention.is_causal for layer in self.layers)

    @property
    def altup(self) -> AltUpSpec | None:
        """The alternating updates of its layers; None: there is one residual stream."""
        return self.layers[0].altup if self.layers else None

    @property
    def hyper(self) -> HyperSpec | None:
        """The hyper-connections of its layers; None: there is one residual stream."""
        return self.layers[0].hyper if self.layers else None

    def rope_switch_len(self, max_model_len: int) -> int | None:
        """Return the longest sequence that takes the short variant of the rope; longer ones take the long variant.

        None where all sequences of up to max_model_len tokens take the same. The long variant of "longrope" has the long
        factors, that of "dynamic" the frequencies of max_model_len; the short variant is that of the original length. This is
        what transformers does: https://arxiv.org/abs/2402.13753 and `dynamic_rope_update` in its modeling_rope_utils.py.

        Raises UnsupportedError where layers switch at different lengths.
        """
        ropes = [layer.attention.rope for layer in self.layers if layer.attention.rope is not None]
        lengths = sorted({rope.original_max for rope in ropes if rope.depends_on_length})
        if len(lengths) > 1:
            raise UnsupportedError(f"the layers' ropes change at different lengths ({lengths}): one length is supported")
        return lengths[0] if lengths and max_model_len > lengths[0] else None
