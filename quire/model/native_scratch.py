"""Computes the scratch memory of a step of the native decoder in advance: what Plan::reserve of kernels/cpu/csrc will
allocate."""

from __future__ import annotations

from quire.contracts.mixer_spec import GatedDeltaSpec, Mamba1Spec, Mamba2Spec, MixerSpec, ShortConvSpec
from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec

_CHUNK_TOKENS, _TILE_ROWS, _TILE_HEADS = 256, 48, 32
"""Of attention (csrc/attention_tile.inl): cached tokens per softmax block, rows and heads of a tile."""
_GATHERED_PIECES, _RUN_TOKENS = 8, 16
"""Rows whose keys an indexer chooses at once (csrc/key_choice.h), and tokens of a run of the cache."""
_TREE_TOKENS = 64
"""Maximum tokens of a draft tree, by which the rows of a tile may be farther apart."""
_TILES_A_THREAD = 4
"""Tiles that cost less than a thread's work divided by this are not split, so fewer than this many per thread are split."""
_FIRST_POSITIONS = 4096
_ADAPTED_OUTPUTS, _MIXER_PARTS = 4, 6
"""Adapted layers that read the same rows, and as many with mixers, indexers or latent experts: num_outputs in csrc/lora.h."""
_NUM_ARRAYS, _HUGE_PAGE_BYTES = 20, 2 << 20


def scratch_bytes(spec: ModelSpec, num_tokens: int, max_model_len: int, num_threads: int) -> int:
    """Return the maximum memory of a step of this many tokens, without weights, cache and logits."""
    row_words = _row_words(spec)
    # A row for each thread, and that row packed.
    rows = num_threads * 4 * row_words
    attention = max(attention_bytes(layer.attention, max_model_len, num_threads) for layer in spec.layers)
    ropes = {layer.attention.rope for layer in spec.layers if layer.attention.rope is not None}
    # Cosine and sine of every position; the tables are reallocated when they grow.
    angles = sum(2 * 4 * rope.dim * max(_FIRST_POSITIONS, max_model_len) for rope in ropes)
    rounding = _NUM_ARRAYS * _HUGE_PAGE_BYTES
    gathered = max(
        _gathered_bytes(layer.attention, max_model_len, 2 if spec.dtype == "bfloat16" else 4, num_tokens)
        for layer in spec.layers
    )
    return 4 * num_tokens * row_words + rows + attention + angles + rounding + gathered


def adapter_scratch_bytes(spec: ModelSpec, num_tokens: int, max_rank: int) -> int:
    """Return the maximum memory of a step's adapters of at most this rank (LoraState::reserve in csrc/lora.cpp).

    num_tokens  of the step, or its rows that get logits, if these are more
    """
    rank = 3 * (-(-max_rank // 16) * 16)  # of q, k and v joined
    num_choices = max((layer.mlp.top_k for layer in spec.layers if isinstance(layer.mlp, MoeSpec)), default=1)
    latents = [layer.attention.latent for layer in spec.layers]
    has_more = any(one is not None and one.indexer is not None for one in latents)
    has_more |= any(isinstance(layer.mlp, MoeSpec) and layer.mlp.latent_size is not None for layer in spec.layers)
    outputs = _MIXER_PARTS if spec.has_recurrent_state or has_more else _ADAPTED_OUTPUTS
    heads = max((layer.attention.num_heads for layer in spec.layers if layer.attention.latent is not None), default=0)
    return 4 * num_tokens * max(num_choices * outputs, heads) * rank + _HUGE_PAGE_BYTES


def home_scratch_bytes(spec: ModelSpec, num_tokens: int) -> int:
    """Return what each further rank takes for a step if it has all heads (enable_dp_attention): queries, keys, values and
    results of all tokens, and the packed input of the output projection."""
    words = 0
    for layer in spec.layers:
        attention = layer.attention
        sizes = (attention.num_heads + 2 * attention.num_kv_heads, attention.num_heads)
        rows = sum(_stride(_heads_size(size, layer)) for size in sizes) + _latent_words(attention)
        words = max(words, rows + _packed_words(spec, _heads_size(attention.num_heads, layer)))
    return 4 * num_tokens * words


def attention_bytes(attention: AttentionSpec, max_model_len: int, num_threads: int) -> int:
    """Return the maximum memory of a step's attention, for any sequences."""
    if attention.num_heads == 0:
        return 0
    units = attention.num_kv_heads * -(-attention.num_heads // attention.num_kv_heads // _TILE_HEADS)
    # The tiles of all units cost the same: either all are split or none.
    num_cut = (_TILES_A_THREAD * num_threads - 1) // units * units if num_threads > 1 else 0
    return num_threads * _tile_bytes(attention) + num_cut * _cut_bytes(attention, max_model_len)


def _gathered_bytes(attention: AttentionSpec, max_model_len: int, element_bytes: int, num_tokens: int) -> int:
    """Return the memory of the keys that an indexer chooses, and of two numbers for each that it chooses from;
    which they are is kept for all tokens where layers share it."""
    if attention.latent is None or attention.latent.indexer is None:
        return 0
    num_keys = min(attention.latent.indexer.top_k, max_model_len) + _RUN_TOKENS
    gathered = num_keys * (attention.head_dim * element_bytes + 4)
    kept = 4 * num_keys * num_tokens if attention.latent.indexer.is_shared else 0
    return _GATHERED_PIECES * (gathered + 8 * (max_model_len + _RUN_TOKENS)) + kept + _HUGE_PAGE_BYTES


def _row_words(spec: ModelSpec) -> int:
    """Return the 32-bit words of one token."""
    layers = spec.layers
    hidden = _stride(spec.hidden_size)
    qkv = max(_heads_size(layer.attention.num_heads + 2 * layer.attention.num_kv_heads, layer) for layer in layers)
    latent = max(_latent_words(layer.attention) for layer in layers)
    attended = max(_heads_size(layer.attention.num_heads, layer) for layer in layers)
    inner = packed = experts = shared = projected = 0
    for layer in layers:
        sites = [spec.hidden_size, layer.attention.num_heads * layer.attention.head_dim]
        if layer.shared_block is not None:
            sites.append(2 * spec.hidden_size)
            projected = max(projected, _block_words(spec, layer))
        if layer.mixer is not None:
            sites.append(_mixer_values(layer.mixer))
        if layer.attention.latent is not None:
            sites.append(layer.attention.num_heads * layer.attention.latent.nope_dim)
        if isinstance(layer.mlp, MoeSpec):
            top_k, size = layer.mlp.top_k, layer.mlp.expert.intermediate_size
            inner = max(inner, _stride(size) * top_k)
            width = layer.mlp.latent_size or 0
            projected = max(projected, _stride(width))
            # Every token is packed once for each of its experts; so are its results.
            sites += [(width or spec.hidden_size) * top_k, size * top_k, width]
            experts = max(experts, hidden + layer.mlp.num_experts + top_k * (max(hidden, _stride(width)) + 6))
            if layer.mlp.shared is not None:
                inner = max(inner, _stride(layer.mlp.shared.intermediate_size))
                sites.append(layer.mlp.shared.intermediate_size)
                shared = hidden + 1
        else:
            inner = max(inner, _stride(layer.mlp.intermediate_size))
            sites.append(layer.mlp.intermediate_size)
        packed = max(packed, *(_packed_words(spec, size) for size in sites))
    mixers = [_mixer_words(layer.mixer) for layer in layers if layer.mixer is not None]
    # Each part of a mixer's memory is as large as the largest of any layer; so is the gate of attention.
    mixed = sum(map(max, zip(*mixers, strict=True))) if mixers else 0
    gates = [_heads_size(layer.attention.num_heads, layer) for layer in layers if layer.attention.has_output_gate]
    mixed += _stride(max(gates, default=0))
    has_router = any(isinstance(layer.mlp, MoeSpec) for layer in layers)
    # The router reads f32.
    packed = max(packed, spec.hidden_size) if has_router else packed
    inputs = spec.per_layer_inputs
    extra = 0 if inputs is None else _stride(inputs.size * len(layers)) + _stride(inputs.size)
    if spec.altup is not None:
        # The streams, the router's products, and the low-rank residual.
        rank = max(layer.laurel.rank for layer in layers if layer.laurel is not None)
        extra += spec.altup.num_streams * hidden + spec.altup.num_streams + hidden + _stride(rank)
        packed = max(packed, spec.hidden_size)  # the router reads f32
    extra += projected
    return 2 * hidden + extra + _stride(qkv) + _stride(attended) + inner + experts + shared + latent + packed + mixed


def _block_words(spec: ModelSpec, layer: LayerSpec) -> int:
    """Return the words of a block before a mixer: the embeddings, alone and beside the residual, the results of adapters' first
    matrices and of `up`."""
    assert layer.shared_block is not None
    rank = max(layer.shared_block.attention_rank or 0, layer.shared_block.mlp_rank)
    assert isinstance(layer.mlp, MlpSpec)
    parts = spec.hidden_size, 2 * spec.hidden_size, layer.mlp.intermediate_size
    return sum(map(_stride, parts)) + 3 * _stride(rank)


def _mixer_values(mixer: MixerSpec) -> int:
    """Return the values of a mixer's output."""
    return mixer.num_v_heads * mixer.v_dim if isinstance(mixer, GatedDeltaSpec) else mixer.channels


def _mixer_words(mixer: MixerSpec) -> tuple[int, ...]:
    """Return the words of each part of a mixer's memory, see Plan::reserve: projected inputs, convolved channels, second
    projections, shared and normed results, keys, values, decays and factors."""
    values, keys, decays, heads, low = _mixer_values(mixer), 0, 0, 0, 0
    if isinstance(mixer, ShortConvSpec):
        inputs, channels = 3 * values, values
    elif isinstance(mixer, Mamba1Spec):
        inputs, channels, keys, decays, heads = 2 * values, values, mixer.state_size, values, 1
        low = mixer.step_rank + 2 * mixer.state_size
    elif isinstance(mixer, Mamba2Spec):
        channels, keys = mixer.conv_channels, mixer.num_groups * mixer.state_size
        decays = heads = mixer.num_heads
        inputs = channels + values + heads
    else:
        channels, keys, heads = mixer.conv_channels, mixer.num_k_heads * mixer.k_dim, mixer.num_v_heads
        decays = heads if mixer.gate_rank is None else heads * mixer.k_dim
        inputs = channels + heads + (values + heads if mixer.gate_rank is None else 2 * mixer.gate_rank)
        low = 0 if mixer.gate_rank is None else values + decays
    shared = 2 * _stride(2 * values)
    return (*map(_stride, (inputs, channels, low)), shared, 2 * keys, 2 * values, decays, heads)


def _latent_words(attention: AttentionSpec) -> int:
    """Return the words of multi-head latent attention, without queries and outputs in the latent space."""
    latent = attention.latent
    if latent is None:
        return 0
    questions = attention.num_heads * (latent.nope_dim + latent.rope_dim)
    index = latent.indexer
    chosen = () if index is None else (index.num_heads * index.head_dim, index.head_dim, index.num_heads)
    return sum(map(_stride, (attention.head_dim, latent.q_rank or 0, questions, attention.output_size, *chosen)))


def _heads_size(num_heads: int, layer: LayerSpec) -> int:
    return num_heads * layer.attention.head_dim


def _packed_words(spec: ModelSpec, size: int) -> int:
    """Return the words of an input, for any format of the weights that read it: dense, and in addition as bytes with scales
    (three words for every 16 values), or twice as bytes."""
    dense = -(-size // 2) if spec.dtype == "bfloat16" else size
    return dense + size // 2 + 8


def _tile_bytes(attention: AttentionSpec) -> int:
    """Return the bytes of one thread for a tile: rows, scores, runs of keys and values, a path of a tree, and two results."""
    return (64 << 10) + 2048 * (attention.head_dim + 16)


def _cut_bytes(attention: AttentionSpec, max_model_len: int) -> int:
    """Return the results of the chunks of a tile whose chunks are shared by threads."""
    seen = max_model_len if attention.window is None else min(max_model_len, attention.window + _TILE_ROWS + _TREE_TOKENS)
    return (-(-seen // _CHUNK_TOKENS) + 1) * _TILE_ROWS * (attention.head_dim + 16 + 2) * 4


def _stride(size: int) -> int:
    """Return the floats from one row to the next, see row_stride in csrc/plan.h."""
    return (size + 31) // 32 * 32 + 16
