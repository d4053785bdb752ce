"""Build a model from a checkpoint folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quire.base.errors import ConfigError
from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import ModelSpec
from quire.kernels.reference.attention import AttentionInput
from quire.kv.pool import KvPool
from quire.model.checkpoint import load_parameters
from quire.model.config_reader import read_model_spec
from quire.model.decoder import Decoder


def effective_max_model_len(spec: ModelSpec, max_model_len: int | None) -> int:
    """Return the longest sequence to serve; raises ConfigError when more is asked for than the model can take."""
    if max_model_len is None:
        return spec.max_positions
    ropes = [layer.attention.rope for layer in spec.layers if layer.attention.rope is not None]
    can_stretch = bool(ropes) and all(rope.kind == "dynamic" for rope in ropes)
    if max_model_len > spec.max_positions and not can_stretch:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the model takes at most {spec.max_positions} positions; lower it"
        )
    return max_model_len


def load_model(folder: Path, dtype: str = "auto", max_model_len: int | None = None) -> Decoder:
    """Read spec and weights of a checkpoint folder. Raises ModelFormatError, UnsupportedError or ConfigError."""
    spec = read_model_spec(folder, dtype)
    return Decoder(spec, load_parameters(folder, spec), effective_max_model_len(spec, max_model_len))


def whole_prompt_logits(decoder: Decoder, token_ids: list[int], block_size: int = 16) -> Tensor:
    """Return the logits [T, vocab_size] after every token of one prompt, computed at once in a cache of its own."""
    num_tokens = len(token_ids)
    num_blocks = -(-num_tokens // block_size)
    kv = KvPool(KvSpec.of(decoder.spec, block_size, decoder.spec.dtype), num_blocks)
    positions = torch.arange(num_tokens)
    step = AttentionInput(positions, [0, num_tokens], [num_tokens], torch.arange(num_blocks)[None])
    return decoder.logits(decoder.forward(torch.tensor(token_ids), positions, step, kv))
