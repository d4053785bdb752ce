"""Engines of golden checkpoints, and the tokens that they generate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire import LLM, SamplingParams


def cpu_engine(folder: Path, **options: object) -> LLM:
    """Return an engine on the CPU with room for a few sequences of 128 tokens."""
    options = {"max_num_seqs": 3, "num_kv_blocks": 60, **options}
    return LLM(model=str(folder), skip_tokenizer_init=True, device="cpu", **options)


def generate_tokens(llm: LLM, prompts: Sequence[list[int]], num_tokens: int, **params: object) -> list[list[list[int]]]:
    """Return the tokens of each choice of each prompt, num_tokens of them, greedy if nothing else is asked for."""
    params = {"temperature": 0.0, **params}
    sampling = SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens, detokenize=False, **params)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [[list(choice.token_ids) for choice in output.outputs] for output in outputs]
