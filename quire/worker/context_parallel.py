"""What context parallelism and attention data parallelism refuse: options and models that their ranks do not run."""

from __future__ import annotations

from quire.base.errors import ConfigError
from quire.contracts.config import ATTENTION_LIBRARIES, EngineConfig
from quire.contracts.kv_spec import QUANTIZED_KV_BITS
from quire.contracts.memory import CONTEXT_CHUNK_TOKENS
from quire.contracts.model_spec import ModelSpec
from quire.contracts.speculative import SpeculativeConfig
from quire.model.native_model import native_refusal
from quire.parallel.barrier import native_extension
from quire.worker.memory import DEVICE_BLOCK_SIZE, block_unit, cpu_block_size

_DRAFT_METHODS = {
    "decode_context_parallel_size": ("ngram", "suffix", "draft_model", "mtp", "eagle3"),
    "prefill_context_parallel_size": ("ngram", "suffix", "lookahead", "draft_model", "medusa", "mtp"),
}
"""Layer skipping ("self") runs the model on rank 0 only. Lookahead and Medusa draft trees. With divided rows no rank has the
inputs of the layers of all tokens, which EAGLE-3 reads."""

_GPU_METHODS = {
    "decode_context_parallel_size": ("ngram", "suffix"),
    "prefill_context_parallel_size": ("ngram", "suffix", "lookahead", "draft_model"),
}
"""On GPUs draft heads read hidden states of all tokens, on rank 0, and draft models have its block ids."""


def check_context_parallel(config: EngineConfig, spec: ModelSpec, device: str) -> None:
    """Raise ConfigError where the model cannot run with the context parallelism of the configuration; device:
    ModelReport.device."""
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(config, name)
        if size == 1:
            continue
        native_extension()  # raises UnsupportedError
        if device == "cpu":
            refusal = native_refusal(spec, cpu_block_size(config))
            if refusal is not None:
                raise ConfigError(f"{name} is {size}: it needs the native kernels, which do not run {refusal}")
        else:
            _check_on_gpus(config, spec, name, size)
        _check_layers(name, size, spec)
        _check_tiers(config, name, size)
        if config.speculative_config is not None:
            _check_drafts(config.speculative_config, name, size, (_DRAFT_METHODS if device == "cpu" else _GPU_METHODS)[name])
    if config.decode_context_parallel_size > 1:
        block_size = cpu_block_size(config) if device == "cpu" else config.block_size or DEVICE_BLOCK_SIZE
        _check_blocks(config, config.decode_context_parallel_size, block_size)


def _check_on_gpus(config: EngineConfig, spec: ModelSpec, name: str, size: int) -> None:
    """Raise ConfigError for what GPU ranks do not support with context parallelism, beyond what CPU ranks do not."""
    refused: list[str] = []
    if config.attention_backend in ATTENTION_LIBRARIES:
        refused.append(f"attention_backend {config.attention_backend!r} (choose 'auto' or 'triton')")
    if name == "decode_context_parallel_size":
        if 4 in QUANTIZED_KV_BITS.get(config.kv_cache_dtype, ()):
            refused.append(f"kv_cache_dtype {config.kv_cache_dtype!r} (choose 'auto', 'int8' or 'fp8')")
        if any(layer.attention.qk_norm_over == "each" for layer in spec.layers):
            refused.append(f"norms of each head of q and k ({spec.model_type})")
        if any(layer.attention.alibi_slopes or not layer.attention.has_plain_values for layer in spec.layers):
            refused.append(f"ALiBi, and values that are smaller than keys or scaled ({spec.model_type})")
    if refused:
        raise ConfigError(
            f"{name} is {size}, but on GPUs it does not support {'; '.join(refused)}: change that, or set it to 1"
        )


def check_dp_attention(config: EngineConfig, spec: ModelSpec, device: str) -> None:
    """Raise ConfigError where the model cannot run with homes of sequences; device: ModelReport.device."""
    name, unit = "enable_dp_attention", config.parallel.num_homes
    native_extension()  # raises UnsupportedError
    refusal = native_refusal(spec, cpu_block_size(config)) if device == "cpu" else None
    if refusal is not None:
        raise ConfigError(f"{name} needs the native kernels, which do not run {refusal}: leave it out")
    if device != "cpu":
        _check_device_homes(config, device)
    _check_layers(name, True, spec)
    if not spec.is_causal:
        raise ConfigError(
            f"{name} does not fit the model ({spec.model_type}), whose tokens attend in both directions: leave it out"
        )
    is_normed = any(layer.attention.qk_norm is not None and layer.attention.qk_norm_over == "all" for layer in spec.layers)
    if config.parallel.home_size > 1 and is_normed:
        raise ConfigError(
            f"dp_attention_size is {unit}, but the model ({spec.model_type}) norms q and k over all heads, which the ranks of "
            f"a home would divide: leave it at None, so that each of the {config.tensor_parallel_size} ranks is a home"
        )
    _check_tiers(config, name, True)
    if config.num_kv_blocks is not None and config.num_kv_blocks % unit != 0:
        raise ConfigError(
            f"num_kv_blocks is {config.num_kv_blocks}, but with {name} and {unit} homes it must be a multiple of {unit}: each "
            "home holds as many blocks"
        )


def _check_device_homes(config: EngineConfig, device: str) -> None:
    if config.parallel.home_size > 1:
        raise ConfigError(
            f"dp_attention_size is {config.dp_attention_size}, but the model runs on {device}, where a home is one rank: leave "
            f"it at None, so that each of the {config.tensor_parallel_size} ranks is a home"
        )
    drafts = () if config.speculative_config is None else config.speculative_config.methods
    if "eagle3" in drafts:
        raise ConfigError(
            f"speculative_config: eagle3 reads the inputs of layers, of which a rank on {device} has those of the sequences at "
            "home there only; choose another method, or leave enable_dp_attention out"
        )


def _check_layers(name: str, size: int, spec: ModelSpec) -> None:
    attentions = [layer.attention for layer in spec.layers]
    if any(one.block_indexer is not None or (one.latent is not None and one.latent.indexer is not None) for one in attentions):
        raise ConfigError(
            f"{name} is {size}, but the indexer of a {spec.model_type!r} model chooses among the keys of all tokens, on each "
            "rank: leave it out"
        )
    if name != "prefill_context_parallel_size" and any(one.has_output_gate for one in attentions):
        raise ConfigError(
            f"{name} is {size}, but the attention of a {spec.model_type!r} model has an output gate: leave it out"
        )
    if spec.has_recurrent_state:
        raise ConfigError(
            f"{name} is {size}, but a {spec.model_type!r} model has a recurrent state, which takes the tokens of a sequence in "
            "order, on all ranks: leave it out"
        )


def _check_tiers(config: EngineConfig, name: str, size: int) -> None:
    for option, value, allowed in (
        ("kv_host_bytes", config.kv_host_bytes, None),
        ("kv_disk_dir", config.kv_disk_dir, None),
        ("role", config.role, "both"),
        ("prefill_listen", config.prefill_listen, None),
    ):
        if value != allowed:
            raise ConfigError(
                f"{option} is {value!r} and {name} {size}: KV tiers and transfer of such ranks are not supported; "
                f"leave {option} at {allowed!r}, or {name} at {False if size is True else 1}"
            )


def _check_drafts(drafts: SpeculativeConfig, name: str, size: int, allowed: tuple[str, ...]) -> None:
    for method in drafts.methods:
        if method not in allowed:
            raise ConfigError(
                f"{name} is {size}, but the speculative method {method!r} is not supported with it; choose one of "
                f"{', '.join(allowed)}, or {name}=1"
            )
    if name != "decode_context_parallel_size":
        return
    for option, value, is_tree in (
        ("suffix_decoding_use_tree_spec", drafts.suffix_decoding_use_tree_spec, drafts.suffix_decoding_use_tree_spec),
        ("draft_top_k", drafts.draft_top_k, drafts.top_k > 1),
        ("method", drafts.method, len(drafts.methods) > 1),
    ):
        if is_tree:
            raise ConfigError(
                f"speculative_config: {option} is {value!r} and {name} {size}: draft trees are not supported with it, as their "
                "tokens may be on several ranks; draft chains with one method"
            )


def _check_blocks(config: EngineConfig, size: int, block_size: int) -> None:
    unit = block_unit(config, block_size)
    if CONTEXT_CHUNK_TOKENS % block_size != 0:
        raise ConfigError(
            f"block_size is {block_size} and decode_context_parallel_size {size}: it must be a divisor of "
            f"{CONTEXT_CHUNK_TOKENS}, as so many consecutive tokens are on one rank; choose 16, 32, 64, 128 or 256"
        )
    if config.num_kv_blocks is not None and config.num_kv_blocks % unit != 0:
        raise ConfigError(
            f"num_kv_blocks is {config.num_kv_blocks}, but with decode_context_parallel_size {size} and blocks of "
            f"{block_size} tokens it must be a multiple of {unit}: each rank holds as many chunks of {CONTEXT_CHUNK_TOKENS} "
            "tokens"
        )
