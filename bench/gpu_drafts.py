"""Drafts of an EAGLE-3 head with random weights on a GPU, for bench/gpu.py: a given share of them is accepted.

The drafts are replaced before they are verified (quire/speculate/oracle_proposer.py), which `quire bench speculate` does, too.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from gpu_model import Place, Row, Shape, engine_options, release_memory, stored_shapes, write_checkpoint, write_random_model

from quire.bench.speculate import Trial, measure_speculation
from quire.contracts.config import EngineConfig

_SHARE = 0.8
_DRAFT_VOCAB = 32000  # of published heads


def draft_rows(place: Place, shape: Shape, until_s: float) -> Iterator[Row]:
    """Yield how many times as fast one sequence is decoded with drafts.

    decoding   of the time per token after the first, median of pairs of runs
    at_share   the same if all outputs were those without drafts: steps with drafts round otherwise, and behind a token that
               differs all drafts are wrong
    """
    folder = write_random_model(shape, place.folder / shape.name)
    head = _write_head(place, shape)
    generator = random.Random(0)
    length, num_tokens, rounds = (5, 8, 1) if place.is_tiny else (928, 64, 5)
    prompts = tuple(tuple(generator.randrange(shape.vocab_size - 1) for _ in range(length)) for _ in range(rounds))
    # Few blocks: engines follow each other in this process.
    own = {"max_num_seqs": 1, "num_kv_blocks": 16 if place.is_tiny else 256}
    config = EngineConfig(model=str(folder), **engine_options(place) | own)
    for num_drafts in (2,) if place.is_tiny else (4, 3, 6):
        if time.perf_counter() > until_s:
            return
        method = {"method": "eagle3", "model": head, "num_speculative_tokens": num_drafts, "draft_p_min": 0.0}
        trial = Trial((json.dumps(method),), (1,), prompts, num_tokens, 0.0, num_drafts, rounds, False, forced_share=_SHARE)
        (line,) = measure_speculation(config, trial).lines
        release_memory(place.device)
        forced = (1 - _SHARE ** (num_drafts + 1)) / (1 - _SHARE)
        per_step = (num_tokens - 1) / (num_tokens / line.tokens_per_step - 1)  # without the step of the prompt
        row: Row = {"section": "drafts", "model": shape.name, "drafts": num_drafts, "share": _SHARE, "decoding": line.decoding}
        row |= {"at_share": line.decoding * forced / per_step, "tokens_per_step": per_step}
        yield row | {"same_outputs": line.same_outputs, "acceptance": line.acceptance}


def _write_head(place: Place, shape: Shape) -> str:
    vocab_size, hidden = min(_DRAFT_VOCAB, shape.vocab_size), shape.hidden
    shapes = {"fc.weight": (hidden, min(3, shape.num_layers) * hidden), "norm.weight": (hidden,)}
    shapes |= {"lm_head.weight": (vocab_size, hidden), "midlayer.hidden_norm.weight": (hidden,)}
    for name, size in stored_shapes(replace(shape, num_layers=1)):
        _, is_layer, rest = name.partition("layers.0.")
        if is_layer and not rest.endswith(("q_norm.weight", "k_norm.weight")):
            is_doubled = rest.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            shapes[f"midlayer.{rest}"] = (size[0], 2 * hidden) if is_doubled else size
    config = shape.config() | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    offsets = torch.zeros(vocab_size, dtype=torch.int64)  # its tokens are the model's first ones
    return str(write_checkpoint(place.folder / "eagle3", config | {"draft_vocab_size": vocab_size}, shapes, 1, d2t=offsets))
