"""Build a model from a checkpoint folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quire.base.errors import ConfigError
from quire.base.logging import get_logger
from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import ModelSpec
from quire.kernels.native import load_native
from quire.kernels.reference.attention import AttentionMetadata
from quire.kv.pool import KvPool
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.decoder import Decoder
from quire.model.lora.deltas import LoraDeltas
from quire.model.native_decoder import NativeDecoder
from quire.model.native_model import native_refusal
from quire.model.transformers_backend.decoder import TransformersDecoder
from quire.quant.parameters import Parameter, StoredParameter
from quire.quant.policy import QuantizationPolicy, parameter_quantizer, quantize_parameters

logger = get_logger(__name__)


def effective_max_model_len(spec: ModelSpec, max_model_len: int | None) -> int:
    """Return the longest sequence to serve; raises ConfigError if max_model_len exceeds the model's limit."""
    if max_model_len is None:
        return spec.max_positions
    ropes = [layer.attention.rope for layer in spec.layers if layer.attention.rope is not None]
    can_stretch = bool(ropes) and all(rope.kind == "dynamic" for rope in ropes)
    if max_model_len > spec.max_positions and not can_stretch:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the model takes at most {spec.max_positions} positions; lower it"
        )
    return max_model_len


Model = Decoder | NativeDecoder | TransformersDecoder
"""The decoders: the torch reference, the native kernels or the transformers library, with the same `step`, `logits_at` and
`hidden_states`."""


def runs_natively(spec: ModelSpec, block_size: int) -> bool:
    """Return whether build_model uses the native kernels."""
    return load_native() is not None and native_refusal(spec, block_size) is None


def build_model(
    spec: ModelSpec,
    parameters: dict[str, Parameter | StoredParameter],
    max_model_len: int,
    block_size: int,
    policy: QuantizationPolicy | None = None,
    has_adapters: bool = False,
) -> Decoder | NativeDecoder:
    """Return the native decoder if the extension is built and supports the model, otherwise the reference; logs the choice.

    parameters  emptied by the native decoder, which packs one at a time
    policy      how the parameters are quantised; the native decoder quantises one at a time
    has_adapters  LoRA adapters can be loaded into `adapters` of the decoder

    Raises ConfigError if the parameters are already quantised and a policy is given.
    """
    native = load_native()
    if native is None:
        logger.info("native CPU kernels are not built, or turned off by QUIRE_NATIVE=0: torch runs the model, slower")
        return _reference(spec, parameters, max_model_len, policy, has_adapters)
    refusal = native_refusal(spec, block_size)
    if refusal is not None:
        logger.warning("the native kernels do not cover %s: torch runs this model, slower", refusal)
        return _reference(spec, parameters, max_model_len, policy, has_adapters)
    logger.info("native CPU kernels: %s", native.isa())
    quantize = None if policy is None else parameter_quantizer(parameters, spec, policy).quantized
    return NativeDecoder(native, spec, parameters, max_model_len, quantize)


def _reference(
    spec: ModelSpec,
    parameters: dict[str, Parameter | StoredParameter],
    max_model_len: int,
    policy: QuantizationPolicy | None,
    has_adapters: bool,
) -> Decoder:
    loaded = parameters if policy is None else quantize_parameters(parameters, spec, policy)
    return Decoder(spec, loaded, max_model_len, LoraDeltas() if has_adapters else None)


def load_model(folder: Path, dtype: str = "auto", max_model_len: int | None = None) -> Decoder:
    """Read spec and weights of a checkpoint folder for the reference kernels.

    Raises ModelFormatError, UnsupportedError or ConfigError.
    """
    spec = read_model_spec(folder, dtype)
    return Decoder(spec, open_parameters(folder, spec), effective_max_model_len(spec, max_model_len))


def whole_prompt_logits(decoder: Model, token_ids: list[int], block_size: int = 16) -> Tensor:
    """Return the logits [T, vocab_size] after every token of one prompt, computed at once with its own cache."""
    num_tokens = len(token_ids)
    num_blocks = -(-num_tokens // block_size)
    is_half = isinstance(decoder, NativeDecoder) and decoder.spec.dtype == "float16"
    kv = KvPool(KvSpec.of(decoder.spec, block_size, "float32" if is_half else decoder.spec.dtype), num_blocks)
    positions = torch.arange(num_tokens)
    step = AttentionMetadata(positions, [0, num_tokens], [num_tokens], torch.arange(num_blocks)[None])
    return decoder.step(torch.tensor(token_ids), positions, step, kv, list(range(num_tokens)), keeps_all=True)
