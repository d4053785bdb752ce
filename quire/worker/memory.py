"""The memory profile of one worker: what is free, what the model takes, and how many KV blocks that leaves."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from quire.base.errors import ConfigError
from quire.base.gguf_file import is_gguf, read_gguf
from quire.base.host_memory import available_memory_bytes
from quire.contracts.config import EngineConfig
from quire.contracts.kv_spec import KvDtype, KvSpec
from quire.contracts.memory import MemoryPlan, format_bytes
from quire.contracts.model_spec import DTYPE_BYTES, ModelSpec, MoeSpec
from quire.model.build import runs_natively
from quire.model.checkpoint import quantized_weights
from quire.model.config_reader import read_quantization_config
from quire.model.native_model import screen_bytes
from quire.model.native_scratch import scratch_bytes
from quire.model.native_weights import is_made_exact, is_stored_made_exact, packed_bytes_of
from quire.model.stored_tensors import stored_bytes
from quire.quant.gguf_blocks import packed_bytes
from quire.quant.policy import POLICIES, quantized_bytes
from quire.speculate.memory import DraftBytes
from quire.worker.prompt_results import MAX_LOGIT_ELEMENTS
from quire.worker.state_table import num_state_rows

_KV_SHARE = 0.5
"""Share of the memory left beside weights and activations that the KV pool may take by default: the rest of the machine is
not ours."""

MAX_DEFAULT_BLOCKS = 1 << 18
"""Blocks of a pool whose size nobody gave: the scheduler's own record of a block takes time and memory too."""

_SCORE_BYTES = (1 << 24) * 4 * 3
"""Scores, their softmax and the mask of the reference attention, which holds this many at most."""


_DEFAULT_BATCHED_TOKENS = 2048
_DEFAULT_BATCHED_TOKENS_OF_GPU = 8192
"""So many that the products of a small model take longer than the host takes to launch them."""

_SPARE_CHECKPOINTS = 16
"""Recurrent states of prefixes that are kept besides one for each sequence that runs."""

_CPU_BLOCK_SIZE = 16
"""Tokens in a KV block where nobody says."""


def cpu_block_size(config: EngineConfig) -> int:
    """Return the tokens in a KV block on a CPU."""
    return config.block_size or _CPU_BLOCK_SIZE


def max_num_batched_tokens(config: EngineConfig, device: str = "cpu") -> int:
    """Return the token budget of a step; device: ModelReport.device."""
    default = _DEFAULT_BATCHED_TOKENS_OF_GPU if device.startswith("cuda") else _DEFAULT_BATCHED_TOKENS
    return config.max_num_batched_tokens or max(default, config.max_num_seqs)


def activation_bytes(config: EngineConfig, spec: ModelSpec, max_model_len: int, num_batched_tokens: int) -> int:
    """Estimate the peak of one step: what the decoder that will run it takes, and the logits."""
    if not runs_natively(spec, cpu_block_size(config)):
        return _reference_bytes(spec, num_batched_tokens, config.max_num_seqs)
    scratch = scratch_bytes(spec, num_batched_tokens, max_model_len, config.num_threads or torch.get_num_threads())
    logits = config.max_num_seqs * spec.vocab_size * 4
    if config.pipeline_parallel_size > 1:  # each stage has its own, and each step in flight its rows
        rows = num_batched_tokens * (spec.hidden_size + 48) * 4 + logits
        scratch = config.pipeline_parallel_size * (scratch + rows)
    # Prompt tokens whose log probabilities are asked for come in parts, before the sampler copies the rows that it changes.
    prompt = min(num_batched_tokens * spec.vocab_size, MAX_LOGIT_ELEMENTS) * 4 * 3
    return scratch + logits + max(2 * logits, prompt)


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
    logits = num_seqs * spec.vocab_size * (width + 3 * 4)
    return num_batched_tokens * per_token + _SCORE_BYTES + logits


def weight_bytes(config: EngineConfig, spec: ModelSpec, shapes: dict[str, tuple[int, ...]], folder: Path) -> int:
    """Return the bytes that the weights take as they are run, with the copy of a head that is dense, or may be.

    Quantised weights stay so in the native kernels, but for integers in float32 (`is_made_exact`); torch runs them dense.
    """
    dense = sum(math.prod(shape) for shape in shapes.values()) * DTYPE_BYTES[spec.dtype]
    if not runs_natively(spec, cpu_block_size(config)):
        return dense
    if config.quantization is not None:
        policy = POLICIES[config.quantization]
        has_dense_head = (policy.embedding if spec.is_tied else policy.head) is None
        return quantized_bytes(shapes, spec, policy) + has_dense_head * screen_bytes(spec)
    width, copy = DTYPE_BYTES[spec.dtype], screen_bytes(spec)
    if is_gguf(folder):
        is_dense = is_made_exact(spec.dtype)
        return copy + (dense if is_dense else min(dense, packed_bytes(read_gguf(folder).tensors.values(), width)))
    if read_quantization_config(folder) is None or not stored_bytes(folder):
        return dense + copy
    quantized = [weight for weight in quantized_weights(folder, spec) if not is_stored_made_exact(weight, spec.dtype)]
    return dense + copy + sum(packed_bytes_of(weight, width) - math.prod(weight.shape) * width for weight in quantized)


def kv_dtype(config: EngineConfig, spec: ModelSpec) -> KvDtype:
    """Return how the cache keeps keys and values. Raises ConfigError for int8 without native kernels."""
    is_native = runs_natively(spec, cpu_block_size(config))
    if config.kv_cache_dtype == "int8":
        if not is_native:
            raise ConfigError(
                "kv_cache_dtype 'int8' needs the native kernels, which do not run this model here; leave it at 'auto'"
            )
        return "int8"
    # The native kernels have no float16 arithmetic: such a model computes in float32.
    return "float32" if is_native and spec.dtype == "float16" else spec.dtype


def plan_memory(
    config: EngineConfig,
    spec: ModelSpec,
    num_weight_bytes: int,
    max_model_len: int,
    num_batched_tokens: int,
    gpu: torch.device | None = None,
) -> MemoryPlan:
    """Decide the number of KV blocks; check_fits says whether the whole fits.

    gpu  where the transformers library computes the model; the pool may then take all that is left of gpu_memory_utilization

    By default the pool takes what max_num_seqs sequences of max_model_len need, but at most half of the memory that
    weights and activations leave.
    """
    kv = KvSpec.of(spec, cpu_block_size(config), kv_dtype(config, spec))
    block_bytes = max(1, kv.bytes_per_block)  # 0 where no layer has attention
    available = available_memory_bytes() if gpu is None else _gpu_bytes(config, gpu)
    share = _KV_SHARE if gpu is None else 1.0
    if gpu is None and config.host_memory_bytes is not None:
        available = min(available, config.host_memory_bytes)
    if gpu is None:
        available = max(0, available - config.host_tier_bytes)
    num_states, num_checkpoints = count_states(config, kv)
    num_weight_and_state_bytes = num_weight_bytes + num_states * kv.bytes_per_state
    given = given_blocks(config, kv)
    wanted = config.max_num_seqs * -(-max_model_len // kv.block_size)
    most = max(1, min(wanted, int(available * share) // block_bytes, MAX_DEFAULT_BLOCKS)) if given is None else given
    # No sequence is longer than the pool.
    longest = min(max_model_len, most * kv.block_size)
    activations = activation_bytes(config, spec, longest, num_batched_tokens)
    room = available - num_weight_and_state_bytes - activations
    num_blocks = max(1, min(most, int(room * share) // block_bytes)) if given is None else given
    return MemoryPlan(available, num_weight_bytes, activations, kv, num_blocks, max_model_len, num_states, num_checkpoints)


def max_state_drafts(config: EngineConfig) -> int:
    """Return how many drafts of a sequence a step may verify where the state after each of them must be held."""
    return 0 if config.speculative_config is None else config.speculative_config.max_tokens


def count_states(config: EngineConfig, kv: KvSpec) -> tuple[int, int]:
    """Return how many recurrent states the worker holds, and how many of them are checkpoints of prefixes; 0 where there is no
    such state. There are as many checkpoints as sequences that run, and some more for prompts that are over."""
    if kv.bytes_per_state == 0:
        return 0, 0
    num_checkpoints = config.max_num_seqs + _SPARE_CHECKPOINTS
    return num_state_rows(config.max_num_seqs, num_checkpoints, max_state_drafts(config)), num_checkpoints


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
    room = plan.available_bytes - plan.weight_bytes - plan.activation_bytes - plan.state_bytes - drafts.weights - drafts.work
    bytes_per_block = max(1, plan.kv.bytes_per_block + -(-drafts.kv // plan.num_kv_blocks))
    return replace(plan, num_kv_blocks=max(1, min(plan.num_kv_blocks, int(room * _KV_SHARE) // bytes_per_block)))


def given_blocks(config: EngineConfig, kv: KvSpec) -> int | None:
    """Return how many blocks the options ask for, if they do. Raises ConfigError where they give less than one."""
    if config.num_kv_blocks is not None or config.kv_cache_memory_bytes is None:
        return config.num_kv_blocks
    num_blocks = config.kv_cache_memory_bytes // max(1, kv.bytes_per_block)
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_memory_bytes is {config.kv_cache_memory_bytes}, but one block of {kv.block_size} tokens "
            f"takes {kv.bytes_per_block} bytes; raise it or lower block_size"
        )
    return num_blocks


def check_fits(plan: MemoryPlan) -> None:
    """Raise ConfigError, with the numbers, when the machine has not the memory for a plan."""
    if not plan.fits:
        raise ConfigError(
            f"the model does not fit: {format_bytes(plan.available_bytes)} are available, weights take "
            f"{format_bytes(plan.weight_bytes)}, activations up to {format_bytes(plan.activation_bytes)} and the KV cache "
            f"{format_bytes(plan.kv_bytes)} ({plan.num_kv_blocks} blocks){_describe_states(plan)}; lower num_kv_blocks, "
            "kv_cache_memory_bytes or max_num_batched_tokens, or take a smaller model or dtype"
        )


def _describe_states(plan: MemoryPlan) -> str:
    """Return what recurrent states take, and what makes it less; empty where there are none."""
    if plan.state_bytes == 0:
        return ""
    return f" and {plan.num_states} recurrent states {format_bytes(plan.state_bytes)} (max_num_seqs and drafts make them many)"
