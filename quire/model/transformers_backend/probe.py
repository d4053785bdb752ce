"""Inspects a model of the transformers library by running it once without weights and recording its attention calls."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from quire.base.errors import ConfigError, UnsupportedError
from quire.base.logging import get_logger
from quire.contracts.model_spec import DTYPE_BYTES, AttentionSpec, Dtype, LayerSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec
from quire.model.config_reader import read_json_object, read_quantization_config, stored_dtype
from quire.model.transformers_backend.library import (
    PROBE,
    MaskRecorder,
    causal_class,
    first_line,
    read_config,
    register_probe,
    set_handler,
)

logger = get_logger(__name__)

_NUM_PROBE_TOKENS = 3
_KNOWN_OPTIONS = ("dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal")
_HARMLESS_OPTIONS = ("position_ids", "use_cache", "output_attentions", "cache_position", "layer_idx", "logits_to_keep")


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of the attention interface in a forward pass; the calls of a model are numbered in order.

    module     qualified name of the attention module
    attention  head_dim is that of the cache: the larger of those of keys and values
    value_dim  head size of the values
    """

    module: str
    attention: AttentionSpec
    value_dim: int


@dataclass(frozen=True, slots=True)
class TransformersModelInfo:
    """A model of the library: its spec, with one layer for each call of attention, and its parameters.

    parameters    the library's name -> shape; the embedding is `embed.weight`, as in other models
    weight_bytes  of parameters and buffers, in the dtypes that they have
    """

    spec: ModelSpec
    calls: tuple[AttentionCall, ...]
    parameters: dict[str, tuple[int, ...]]
    weight_bytes: int


def read_transformers_model(folder: Path, dtype: str = "auto") -> TransformersModelInfo:
    """Return what the checkpoint in a folder is, without reading its weights.

    Raises ConfigError where the library is missing, ModelFormatError, or UnsupportedError with the reason why the model cannot
    run on the paged cache.
    """
    config = read_config(folder)
    if read_quantization_config(folder) is not None:
        raise UnsupportedError(f"{folder}: model_impl 'transformers' does not run quantised checkpoints; get one in bfloat16")
    kind = causal_class(config, folder)
    chosen = _choose_dtype(config, folder, dtype)
    recorder = MaskRecorder()
    register_probe(recorder)
    with _naming(folder, config.model_type):
        model = _make_empty(kind, config, getattr(torch, chosen))
        calls, vocab_size = _probe(model, recorder)
        spec = _make_spec(folder, config, chosen, calls, vocab_size)
    return TransformersModelInfo(spec, calls, _shapes(model), _num_bytes(model))


@contextmanager
def _naming(folder: Path, model_type: str) -> Iterator[None]:
    """Put the folder and the model type before errors about a model, those of the library too."""
    where = f"{folder}: model_impl 'transformers' cannot run model_type {model_type!r}"
    try:
        yield
    except UnsupportedError as error:
        raise UnsupportedError(f"{where}: {error}") from error
    except Exception as error:
        name = type(error).__name__
        raise UnsupportedError(f"{where}: the library fails on this config.json: {name}: {first_line(error)}") from error


def _choose_dtype(config: Any, folder: Path, dtype: str) -> Dtype:
    if dtype not in ("auto", *DTYPE_BYTES):
        raise ConfigError(f"dtype must be one of auto, {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    if dtype != "auto":
        return cast("Dtype", dtype)
    stated = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return cast("Dtype", stated) if stated in DTYPE_BYTES else stored_dtype(folder)


def _make_empty(kind: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """Return the model on the meta device. Its experts are computed without a look at which ones are chosen."""
    config._experts_implementation = "batched_mm"
    with torch.device("meta"):
        return kind._from_config(config, dtype=dtype, attn_implementation=PROBE).eval()


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    embedding = model.get_input_embeddings().weight
    return {
        "embed.weight" if parameter is embedding else name: tuple(parameter.shape)
        for name, parameter in model.named_parameters()
    }


def _num_bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


def _probe(model: nn.Module, recorder: MaskRecorder) -> tuple[tuple[AttentionCall, ...], int]:
    """Run a model without weights; return its calls of attention, and its vocabulary size."""
    _refuse_modules(model)
    names = {module: name for name, module in model.named_modules()}
    calls: list[AttentionCall] = []

    def record(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        calls.append(_read_call(names[module], q, k, v, _window_of(mask, recorder, options), options))
        return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])

    for module in names:
        set_handler(module, record)
    try:
        vocab_size = _run(model, torch.device("meta"))
    except (NotImplementedError, RuntimeError):
        # What it computes depends on values, such as the experts that are chosen: run it on zeros that take no memory.
        calls.clear()
        _fill_with_zeros(model)
        vocab_size = _run(model, torch.device("cpu"))
    _check_layers(model, calls)
    return tuple(calls), vocab_size


def _refuse_modules(model: nn.Module) -> None:
    inputs = inspect.signature(model.base_model.forward).parameters
    if "position_ids" not in inputs:
        raise UnsupportedError("its forward takes no position_ids")
    state = next((name for name, module in model.named_modules() if isinstance(module, nn.Conv1d)), None)
    if state is not None:
        raise UnsupportedError(f"{state} is a convolution over tokens, which keeps a state besides keys and values")


def _run(model: nn.Module, device: torch.device) -> int:
    shape = (1, _NUM_PROBE_TOKENS)
    token_ids = torch.zeros(shape, dtype=torch.int64, device=device)
    positions = torch.arange(shape[1], device=device)[None]
    mask = torch.ones(shape, dtype=torch.int64, device=device)  # so that the library does not look for packed sequences
    with torch.inference_mode(), torch.device(device):
        return model(input_ids=token_ids, position_ids=positions, attention_mask=mask, use_cache=False).logits.shape[-1]


def _fill_with_zeros(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                zero = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                module._parameters[name] = nn.Parameter(zero, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)


def _window_of(mask: Tensor | None, recorder: MaskRecorder, options: dict[str, Any]) -> int | None:
    """Return the window of a call, as its mask has it."""
    if mask is None or id(mask) not in recorder.windows:
        raise UnsupportedError("it makes or changes the mask of its attention by itself, as with a bias on the scores")
    window = recorder.windows[id(mask)]
    given = options.get("sliding_window")
    if given is not None and given != window:
        raise UnsupportedError(f"its attention has a sliding window of {given}, but its mask has {window or 'none'}")
    return window


def _read_call(name: str, q: Tensor, k: Tensor, v: Tensor, window: int | None, options: dict[str, Any]) -> AttentionCall:
    known = (*_KNOWN_OPTIONS, *_HARMLESS_OPTIONS)
    unknown = [key for key, value in options.items() if value is not None and value is not False and key not in known]
    if unknown:
        raise UnsupportedError(f"its attention has options that quire does not know: {', '.join(unknown)}")
    if options.get("is_causal") is False:
        raise UnsupportedError("its attention is not causal")
    if options.get("dropout"):
        raise UnsupportedError(f"its attention has a dropout of {options['dropout']}")
    num_heads, num_kv_heads, dim = q.shape[1], k.shape[1], k.shape[3]
    if k.shape[2] != _NUM_PROBE_TOKENS or v.shape[:3] != k.shape[:3] or q.shape[3] != dim or num_heads % num_kv_heads:
        raise UnsupportedError(
            f"its attention has q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: not one row a token"
        )
    scale, has_sinks = options.get("scaling"), options.get("s_aux") is not None
    attention = AttentionSpec(
        num_heads,
        num_kv_heads,
        max(dim, v.shape[3]),
        dim**-0.5 if scale is None else float(scale),
        window=window,
        softcap=options.get("softcap"),
        is_softmax_f32=not has_sinks,
        has_sinks=has_sinks,
    )
    return AttentionCall(name, attention, v.shape[3])


def _check_layers(model: nn.Module, calls: list[AttentionCall]) -> None:
    modules = [name for name, _ in groupby(call.module for call in calls)]
    num_layers, num_attending = model.config.num_hidden_layers, len(set(modules))
    if len(modules) > num_attending:
        raise UnsupportedError("it runs its layers more than once, in loops")
    if num_attending != num_layers:
        raise UnsupportedError(
            f"{num_attending} of its {num_layers} layers attend through the attention interface; "
            "the others may keep another state"
        )


def _make_spec(folder: Path, config: Any, dtype: Dtype, calls: tuple[AttentionCall, ...], vocab_size: int) -> ModelSpec:
    """Return a spec with what the engine, attention and the memory plan need; the library knows the rest."""
    generation_file = folder / "generation_config.json"
    generation = read_json_object(generation_file) if generation_file.is_file() else {}
    inner = getattr(config, "intermediate_size", None)
    mlp = MlpSpec(inner if isinstance(inner, int) else 4 * config.hidden_size, "silu")
    num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    top_k = getattr(config, "num_experts_per_tok", None)
    is_mixture = isinstance(num_experts, int) and isinstance(top_k, int) and num_experts >= top_k >= 1
    block = MoeSpec(num_experts, top_k, mlp) if is_mixture else mlp
    bos = _token_ids(generation.get("bos_token_id", getattr(config, "bos_token_id", None)))
    return ModelSpec(
        model_type=config.model_type,
        dtype=dtype,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        layers=tuple(LayerSpec(call.attention, block) for call in calls),
        final_norm=NormSpec("rms", 1e-6),
        max_positions=_max_positions(config),
        is_tied=bool(getattr(config, "tie_word_embeddings", False)),
        bos_token_id=min(bos, default=None),
        eos_token_ids=_token_ids(getattr(config, "eos_token_id", None)) | _token_ids(generation.get("eos_token_id")),
        implementation="transformers",
    )


def _token_ids(value: object) -> frozenset[int]:
    values = value if isinstance(value, list | tuple) else [value]
    return frozenset(one for one in values if isinstance(one, int))


def _max_positions(config: Any) -> int:
    """Return the longest sequence; where frequencies depend on the longest sequence of a batch, the length up to which not."""
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or most < 2:
        raise UnsupportedError(f"its config.json says no max_position_embeddings (got {json.dumps(most, default=str)})")
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            limit = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", most)
            logger.warning(
                "%s rope: transformers changes the frequencies of a whole batch when one sequence becomes longer than %d "
                "tokens: sequences are limited to that",
                rope["rope_type"],
                limit,
            )
            most = min(most, limit)
    return most


def _ropes(parameters: object) -> list[dict[str, Any]]:
    """Return the rope options of a configuration, which may have some for each type of layer."""
    if not isinstance(parameters, dict):
        return []
    inner = [part for part in parameters.values() if isinstance(part, dict)]
    return [parameters] if "rope_type" in parameters or not inner else inner
