"""The memory profile of one worker: what is free, what the model takes, and how many KV blocks that leaves."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from quire.base.errors import ConfigError
from quire.base.gguf_file import is_gguf, read_gguf
from quire.base.host_memory import available_memory_bytes
from quire.contracts.config import ATTENTION_LIBRARIES, EngineConfig
from quire.contracts.kv_spec import MAX_DEFAULT_BLOCKS, KvDtype, KvSpec, PoolDivision, check_kv_format, head_dims_of
from quire.contracts.memory import CONTEXT_CHUNK_TOKENS, HostPart, MemoryPlan, format_bytes
from quire.contracts.model_spec import DTYPE_BYTES, ModelSpec, MoeSpec
from quire.kernels.reference.kv_formats import KV_CODES
from quire.model.build import runs_natively
from quire.model.checkpoint import distinct_shapes, quantized_weights
from quire.model.config_reader import read_quantization_config
from quire.model.native_model import int8_head_bytes
from quire.model.native_scratch import adapter_scratch_bytes, home_scratch_bytes, scratch_bytes
from quire.model.native_weights import is_made_exact, is_stored_made_exact, packed_bytes_of
from quire.model.stored_tensors import stored_bytes
from quire.quant.gguf_blocks import packed_bytes
from quire.quant.policy import POLICIES, quantized_bytes
from quire.sampling.logprobs import MAX_NATIVE_TOP
from quire.speculate.memory import DraftBytes
from quire.worker.lora import planned_adapter_bytes
from quire.worker.prompt_results import MAX_LOGIT_ELEMENTS
from quire.worker.state_table import num_state_rows

_KV_SHARE = 0.5
"""Default share of the memory that weights and activations leave which the KV pool may take: other processes need the rest."""

_SCORE_BYTES = (1 << 24) * 4 * 3
"""Scores, their softmax and the mask of the reference attention, which holds this many at most."""


_DEFAULT_BATCHED_TOKENS = 2048
_DEFAULT_BATCHED_TOKENS_OF_GPU = 8192
"""So many that the products of a small model take longer than the host takes to launch them."""

_SPARE_CHECKPOINTS = 16
"""Recurrent states of prefixes that are kept, in addition to one for each running sequence."""

_ROWS_OF_A_RANK = 4
"""Rows of the hidden size that each tensor-parallel rank has for a token: hidden states, their norm, and both packed."""

_PARTIAL_BYTES = 16 << 20
"""Of partial results of attention that ranks exchange at once, MAX_CONTEXT_BYTES in csrc/plan.cpp; a tile may need more."""

_CPU_BLOCK_SIZE = 16
"""Default tokens in a KV block."""


def cpu_block_size(config: EngineConfig) -> int:
    """Return the tokens in a KV block on a CPU."""
    return config.block_size or _CPU_BLOCK_SIZE


def uses_native_kernels(config: EngineConfig, spec: ModelSpec) -> bool:
    """Return whether the native kernels run a model on the CPU."""
    return runs_natively(spec, cpu_block_size(config))


def max_num_batched_tokens(config: EngineConfig, device: str = "cpu") -> int:
    """Return the token budget of a step; device: ModelReport.device."""
    default = _DEFAULT_BATCHED_TOKENS_OF_GPU if device.startswith("cuda") else _DEFAULT_BATCHED_TOKENS
    return config.max_num_batched_tokens or max(default, config.max_num_seqs)


def activation_bytes(
    config: EngineConfig, spec: ModelSpec, max_model_len: int, num_batched_tokens: int, num_ranks: int = 1
) -> int:
    """Estimate the peak of one step: what the decoder that will run it takes, and the logits.

    num_ranks  tensor-parallel ranks on this host, of each stage
    """
    if not uses_native_kernels(config, spec):
        return _reference_bytes(spec, num_batched_tokens, config.max_num_seqs)
    scratch = scratch_bytes(spec, num_batched_tokens, max_model_len, config.num_threads or torch.get_num_threads())
    if config.enable_lora:
        scratch += num_ranks * adapter_scratch_bytes(spec, num_batched_tokens, config.max_lora_rank)
    # Ranks divide the scratch, but each of them has the rows of the hidden size, and packs them.
    scratch += (num_ranks - 1) * num_batched_tokens * _ROWS_OF_A_RANK * spec.hidden_size * 4
    if config.enable_dp_attention:
        scratch += (num_ranks - 1) * home_scratch_bytes(spec, num_batched_tokens)
    scratch += _context_bytes(config, spec, num_batched_tokens)
    logits = config.max_num_seqs * spec.vocab_size * 4
    if config.pipeline_parallel_size > 1:  # each stage has its own, and each step in flight its rows
        rows = num_batched_tokens * (spec.hidden_size + 48) * 4 + logits
        scratch = config.pipeline_parallel_size * (scratch + rows)
    # Prompt tokens whose log probabilities are asked for come in parts, before the sampler copies the rows that it changes. The
    # kernels find the most likely tokens in place, but copies are sorted for more of them than the kernels' limit.
    num_copies = 1 if 0 <= config.max_logprobs <= MAX_NATIVE_TOP else 3
    prompt = min(num_batched_tokens * spec.vocab_size, MAX_LOGIT_ELEMENTS) * 4 * num_copies
    return scratch + logits + max(2 * logits, prompt)


def _context_bytes(config: EngineConfig, spec: ModelSpec, num_batched_tokens: int) -> int:
    """Return the bytes that context-parallel ranks share: rows of heads, partial results of attention, hidden states."""
    attentions = [layer.attention for layer in spec.layers]
    if config.decode_context_parallel_size > 1:
        row = max((one.num_heads + 2 * one.num_kv_heads) * one.head_dim for one in attentions)
        num_groups = config.tensor_parallel_size // config.decode_context_parallel_size
        return num_batched_tokens * row * 4 + 2 * num_groups * _PARTIAL_BYTES
    if config.parallel.home_size > 1:
        # Results of all heads; of latent attention before or after the last projection.
        values = [one.head_dim if one.latent is None else max(one.head_dim, one.latent.value_dim) for one in attentions]
        return num_batched_tokens * max(one.num_heads * size for one, size in zip(attentions, values, strict=True)) * 4
    if config.prefill_context_parallel_size > 1:
        # With tensor ranks, those of each shard share rows with its heads, of which the last may be on several ranks.
        heads = max(max(one.num_kv_heads, config.tensor_parallel_size) * one.head_dim for one in attentions)
        row = 4 * heads + config.tensor_parallel_size * spec.hidden_size
        return num_batched_tokens * row * 4
    return 0


def _reference_bytes(spec: ModelSpec, num_batched_tokens: int, num_seqs: int) -> int:
    """Return the widest layer's tensors of every token, the attention scores and the logits."""
    width = DTYPE_BYTES[spec.dtype]
    per_token = 0
    for layer in spec.layers:
        attention, mlp = layer.attention, layer.mlp
        qkv = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
        inner = 3 * (mlp.expert.intermediate_size if isinstance(mlp, MoeSpec) else mlp.intermediate_size)
        if isinstance(mlp, MoeSpec) and mlp.shared is not None:
            inner = max(inner, 3 * mlp.shared.intermediate_size)
        if layer.mixer is not None:
            # About six copies, in f32, of what the mixer's convolution reads.
            inner = max(inner, 6 * layer.mixer.state_shapes[0].shape[0] * 4 // width)
        # Norms and MLP keep about six copies of the residual alive, some of them in f32.
        per_token = max(per_token, (2 * qkv + inner + 4 * spec.hidden_size) * width + 2 * spec.hidden_size * 4)
    if spec.per_layer_inputs is not None:  # two of them are there while they are made
        per_token += 3 * len(spec.layers) * spec.per_layer_inputs.size * width
    if spec.altup is not None:
        per_token += 3 * spec.altup.num_streams * spec.hidden_size * width
    if spec.hyper is not None:  # what is normed and projected is f32
        per_token += 3 * spec.hyper.num_streams * spec.hidden_size * (width + 4)
    logits = num_seqs * spec.vocab_size * (width + 3 * 4)
    return num_batched_tokens * per_token + _SCORE_BYTES + logits


def weight_bytes(config: EngineConfig, spec: ModelSpec, shapes: dict[str, tuple[int, ...]], folder: Path) -> int:
    """Return the bytes that the weights take as they are run, with the copy of a head that is dense, or may be.

    LoRA adapters are counted as `planned_adapter_bytes` says.
    Quantised weights stay so in the native kernels, but for integers in float32 (`is_made_exact`); torch runs them dense.
    """
    return planned_adapter_bytes(config, spec, shapes, config.tensor_parallel_size) + _base_bytes(config, spec, shapes, folder)


def _base_bytes(config: EngineConfig, spec: ModelSpec, shapes: dict[str, tuple[int, ...]], folder: Path) -> int:
    """Return weight_bytes without adapters."""
    if any(layer.shared_block is not None for layer in spec.layers):
        shapes = dict(distinct_shapes(folder, spec, shapes))
    dense = sum(math.prod(shape) for shape in shapes.values()) * DTYPE_BYTES[spec.dtype]
    if not uses_native_kernels(config, spec):
        return dense
    if config.quantization is not None:
        policy = POLICIES[config.quantization]
        has_dense_head = (policy.embedding if spec.is_tied else policy.head) is None
        return quantized_bytes(shapes, spec, policy) + has_dense_head * int8_head_bytes(spec)
    width, copy = DTYPE_BYTES[spec.dtype], int8_head_bytes(spec)
    if is_gguf(folder):
        is_dense = is_made_exact(spec.dtype)
        return copy + (dense if is_dense else min(dense, packed_bytes(read_gguf(folder).tensors.values(), width)))
    if read_quantization_config(folder) is None or not stored_bytes(folder):
        return dense + copy
    quantized = [weight for weight in quantized_weights(folder, spec) if not is_stored_made_exact(weight, spec.dtype)]
    return dense + copy + sum(packed_bytes_of(weight, width) - math.prod(weight.shape) * width for weight in quantized)


def kv_dtype(config: EngineConfig, spec: ModelSpec) -> KvDtype:
    """Return how the cache keeps keys and values. Raises ConfigError for quantised formats that this model cannot have."""
    is_native = uses_native_kernels(config, spec)
    if config.kv_cache_dtype in KV_CODES:
        if not is_native:
            raise ConfigError(
                f"kv_cache_dtype {config.kv_cache_dtype!r} needs the native kernels, which do not run this model here; leave "
                "it at 'auto'"
            )
        if any(layer.attention.latent is not None and layer.attention.latent.indexer is not None for layer in spec.layers):
            raise ConfigError(
                f"kv_cache_dtype is {config.kv_cache_dtype!r}, but an indexer of keys needs the model's own: choose 'auto'"
            )
        check_kv_format(config.kv_cache_dtype, head_dims_of(spec), spec.has_recurrent_state, is_gpu=False)
        return config.kv_cache_dtype
    # The native kernels have no float16 arithmetic: such a model computes in float32.
    return "float32" if is_native and spec.dtype == "float16" else spec.dtype


def kv_spec_of(config: EngineConfig, spec: ModelSpec, is_limited: bool) -> KvSpec:
    """Return the cache shape of a model on a CPU, with the dtype of each layer; is_limited: with a window group.

    Raises ConfigError for formats, and layers of kv_cache_dtype_skip_layers, that this model cannot have.
    """
    kv = KvSpec.of(spec, cpu_block_size(config), kv_dtype(config, spec), is_limited)
    if config.kv_cache_dtype_skip_layers is None:
        return kv
    kept = skipped_layers(config.kv_cache_dtype_skip_layers, spec)
    wide = replace(config, kv_cache_dtype="auto", kv_cache_dtype_skip_layers=None)
    return kv.with_layers(kept, kv_dtype(wide, spec))


def skipped_layers(layers: Collection[int], spec: ModelSpec) -> frozenset[int]:
    """Return the layers of kv_cache_dtype_skip_layers, counted from 0. Raises ConfigError for those that a model has not."""
    num_layers = len(spec.layers)
    for layer in layers:
        if not -num_layers <= layer < num_layers:
            raise ConfigError(
                f"kv_cache_dtype_skip_layers must be from {-num_layers} to {num_layers - 1} for this model, which has "
                f"{num_layers} layers, got {layer}"
            )
        source = spec.layers[layer].attention.kv_source
        if source is not None:
            raise ConfigError(
                f"kv_cache_dtype_skip_layers: layer {layer} of this model has no keys and values of its own, it reads those of "
                f"layer {source}, got {layer}: give {source}"
            )
    return frozenset(layer % num_layers for layer in layers)


def plan_memory(
    config: EngineConfig,
    spec: ModelSpec,
    num_weight_bytes: int,
    max_model_len: int,
    num_batched_tokens: int,
    gpu: torch.device | None = None,
    host: HostPart | None = None,
) -> MemoryPlan:
    """Decide the number of KV blocks; check_fits says whether the whole fits.

    gpu   where the transformers library computes the model; the pool may then take all that is left of gpu_memory_utilization
    host  what the ranks on this host hold, where tensor-parallel ranks share the model: only that has to fit here

    By default the pool takes what max_num_seqs sequences of max_model_len need, but at most half of the memory that
    weights and activations leave.
    """
    is_limited = limits_windows(config, spec, max_model_len)
    kv = kv_spec_of(config, spec, is_limited)
    # 0 where no layer has attention
    block_bytes = max(1, kv.pool_bytes(1, 1) if host is None else host.bytes_per_block + host.window_bytes_per_block)
    available = available_memory_bytes() if gpu is None else _gpu_bytes(config, gpu)
    share = _KV_SHARE if gpu is None else 1.0
    if gpu is None and config.host_memory_bytes is not None:
        available = min(available, config.host_memory_bytes)
    if gpu is None:
        available = max(0, available - config.host_tier_bytes)
    num_states, num_checkpoints = count_states(config, kv)
    state_bytes = num_states * (kv if host is None else host).bytes_per_state
    num_weight_and_state_bytes = (num_weight_bytes if host is None else host.weight_bytes) + state_bytes
    given = given_blocks(config, kv, block_bytes)
    unit = block_unit(config)
    wanted = -(-config.max_num_seqs * -(-max_model_len // kv.block_size) // unit) * unit
    most = max(unit, min(wanted, int(available * share) // block_bytes, MAX_DEFAULT_BLOCKS)) if given is None else given
    # No sequence is longer than the pool.
    longest = min(max_model_len, most * kv.block_size)
    activations = activation_bytes(
        config,
        spec,
        longest,
        num_batched_tokens,
        1 if host is None else host.num_ranks if config.pipeline_parallel_size == 1 else config.tensor_parallel_size,
    )
    room = available - num_weight_and_state_bytes - activations
    num_blocks = max(1, min(most, int(room * share) // block_bytes)) if given is None else given
    plan = MemoryPlan(
        available,
        num_weight_bytes,
        activations,
        kv,
        max(unit, num_blocks // unit * unit),
        max_model_len,
        num_states,
        num_checkpoints,
        host=host,
        num_block_places=config.decode_context_parallel_size,
        num_homes=config.parallel.num_homes,
    )
    return divide_blocks(config, plan, num_batched_tokens) if is_limited else plan


DEVICE_BLOCK_SIZE = 64
"""Default tokens in a KV block on a GPU: a multiple of what attention takes at once."""


def block_unit(config: EngineConfig, block_size: int | None = None) -> int:
    """Return what the number of KV blocks must be a multiple of: a block for each home, or a chunk for each rank that shares
    the tokens of sequences; block_size: None: the CPU's."""
    if config.enable_dp_attention:
        return config.parallel.num_homes
    size = config.decode_context_parallel_size
    return 1 if size == 1 else size * max(1, CONTEXT_CHUNK_TOKENS // (block_size or cpu_block_size(config)))


def limits_windows(config: EngineConfig, spec: ModelSpec, max_model_len: int) -> bool:
    """Return whether layers with a window keep only the KV of their window, in a pool of their own.

    Not with KV tiers, whose pages have all layers; nor with drafts by layer skipping, which run some layers of the model; nor
    with a library's attention, which may read what is before the window; nor where the window is as long as a sequence, ranks
    share its tokens, or sequences have homes.
    """
    windows = [layer.attention.kept_window for layer in spec.layers if layer.attention.kept_window is not None]
    drafts = config.speculative_config
    return (
        bool(windows)
        and max(windows) < max_model_len
        and spec.implementation == "quire"
        and spec.is_causal
        and not spec.has_recurrent_state
        and config.host_tier_bytes == 0
        and config.decode_context_parallel_size == 1
        and not config.enable_dp_attention
        and config.attention_backend not in ATTENTION_LIBRARIES
        and (drafts is None or "self" not in drafts.methods)
    )


def divide_blocks(
    config: EngineConfig,
    plan: MemoryPlan,
    num_batched_tokens: int,
    draft_bytes_per_block: int = 0,
    takes_all: bool = False,
) -> MemoryPlan:
    """Return a plan with a pool for the window group, and a larger one for the other layers in the memory that this leaves.

    plan       has as many blocks as the memory suffices for if all layers keep all tokens
    takes_all  see PoolDivision

    A given num_kv_blocks is not changed. See PoolDivision.
    """
    kv, num_blocks = plan.kv, plan.num_kv_blocks
    limits = config.max_num_seqs, num_batched_tokens, plan.max_model_len
    division = PoolDivision(kv.window_tokens or 0, kv.block_size, *limits, takes_all)
    if config.num_kv_blocks is not None:
        return replace(plan, num_window_blocks=division.num_window_blocks(num_blocks))
    bytes_per_block = plan.host_bytes_per_block + draft_bytes_per_block
    num_full, num_window_blocks = division.divide(num_blocks, bytes_per_block, plan.host_window_bytes_per_block)
    return replace(plan, num_kv_blocks=num_full, num_window_blocks=num_window_blocks)


def max_state_drafts(config: EngineConfig) -> int:
    """Return how many drafts of a sequence a step may verify where the state after each of them must be held."""
    return 0 if config.speculative_config is None else config.speculative_config.max_tokens


def count_states(config: EngineConfig, kv: KvSpec) -> tuple[int, int]:
    """Return how many recurrent states the worker holds, and how many of them are checkpoints of prefixes; 0 where there is no
    such state. There are as many checkpoints as sequences that run, and some more for prompts that are over."""
    if kv.bytes_per_state == 0:
        return 0, 0
    num_checkpoints = config.max_num_seqs + _SPARE_CHECKPOINTS
    # With pipeline stages a sequence that ends has its batch slot until the step in flight is collected.
    num_batch_slots = config.max_num_seqs * (2 if config.pipeline_parallel_size > 1 else 1)
    return num_state_rows(num_batch_slots, num_checkpoints, max_state_drafts(config)), num_checkpoints


def _gpu_bytes(config: EngineConfig, gpu: torch.device) -> int:
    """Return what an engine may take of a GPU now."""
    free, total = torch.cuda.mem_get_info(gpu)
    return max(0, int(total * config.gpu_memory_utilization) - (total - free))


def leave_room(config: EngineConfig, plan: MemoryPlan, drafts: DraftBytes) -> MemoryPlan:
    """Return a plan whose pool, unless its size was given, leaves room for what drafts take with the pool of `plan`.

    Their caches have its blocks: both together take the pool's share of what weights, activations and drafts leave.
    """
    if config.num_kv_blocks is not None or config.kv_cache_memory_bytes is not None:
        return plan
    taken = plan.host_weight_bytes + plan.activation_bytes + plan.state_bytes + drafts.weights + drafts.work
    room = plan.available_bytes - taken
    draft_bytes = -(-drafts.kv // plan.num_kv_blocks)
    is_limited = plan.kv.window_tokens is not None
    bytes_per_block = max(1, plan.host_bytes_per_block + plan.host_window_bytes_per_block + draft_bytes)
    unit = block_unit(config)
    num_blocks = max(1, min(plan.num_kv_blocks, int(room * _KV_SHARE) // bytes_per_block))
    found = replace(plan, num_kv_blocks=max(unit, num_blocks // unit * unit))
    return divide_blocks(config, found, max_num_batched_tokens(config), draft_bytes) if is_limited else found


def given_blocks(config: EngineConfig, kv: KvSpec, bytes_per_block: int) -> int | None:
    """Return how many blocks the options ask for, if they do. Raises ConfigError where they give less than one.

    bytes_per_block  on this host
    """
    if config.num_kv_blocks is not None or config.kv_cache_memory_bytes is None:
        return config.num_kv_blocks
    num_blocks = config.kv_cache_memory_bytes // bytes_per_block
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_memory_bytes is {config.kv_cache_memory_bytes}, but one block of {kv.block_size} tokens "
            f"takes {bytes_per_block} bytes; raise it or lower block_size"
        )
    return num_blocks if kv.bytes_per_block > 0 else min(num_blocks, MAX_DEFAULT_BLOCKS)


def check_fits(plan: MemoryPlan) -> None:
    """Raise ConfigError, with the numbers, when the machine has not the memory for a plan."""
    if not plan.fits:
        raise ConfigError(
            f"the model does not fit: {format_bytes(plan.available_bytes)} are available{_describe_host(plan)}, weights take "
            f"{format_bytes(plan.host_weight_bytes)}, activations up to {format_bytes(plan.activation_bytes)} and the KV cache "
            f"{format_bytes(plan.kv_bytes)} ({plan.num_kv_blocks} blocks){_describe_states(plan)}; lower num_kv_blocks, "
            "kv_cache_memory_bytes or max_num_batched_tokens, or take a smaller model or dtype"
        )


def _describe_host(plan: MemoryPlan) -> str:
    """Return which ranks a plan is of; empty where one process has the model."""
    return "" if plan.host is None else f" for {plan.host.num_ranks} of {plan.host.num_all_ranks} ranks on this host"


def _describe_states(plan: MemoryPlan) -> str:
    """Return what recurrent states take, and what makes it less; empty where there are none."""
    if plan.state_bytes == 0:
        return ""
    return f" and {plan.num_states} recurrent states {format_bytes(plan.state_bytes)} (max_num_seqs and drafts make them many)"
