"""Decode through the public engine with every way of sampling, for bench/gpu.py: on the device, and from logits by the host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from gpu_launches import DeviceCapturer, measured_idle_share
from gpu_model import Place, Row, Shape, generate, random_prompts, stamp_captures, write_random_model

from quire import LLM

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs 5": {"logprobs": 5},
    "logprobs 20": {"logprobs": 20},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1},
    "penalties, top_p, logprobs 5": {"repetition_penalty": 1.2, "top_p": 0.9, "logprobs": 5},
}


def sampling_rows(place: Place, shape: Shape, until_s: float) -> Iterator[Row]:
    """Yield tokens a second and the idle share of the device for each of WAYS, and the same sampled by the host."""
    folder = write_random_model(shape, place.folder / shape.name)
    num_seqs, length, num_tokens = (2, 5, 2) if place.is_tiny else (64, 128, 96)
    options: dict[str, Any] = {"max_num_seqs": num_seqs, "max_model_len": 96 if place.is_tiny else 1024}
    options |= {"device": place.engine_device, "skip_tokenizer_init": True, "enable_prefix_caching": False}
    options |= {"num_kv_blocks": 16} if place.is_tiny else {}
    prompts = random_prompts(num_seqs, (length, length), shape, 0)
    capturers = stamp_captures()
    llm = LLM(str(folder), **options)
    batch = llm.llm_engine.runner.batch
    processor = batch.row_processor
    for name, way in list(WAYS.items())[: 2 if place.is_tiny else None]:
        for is_on_host in (False, True) if way else (False,):
            if time.perf_counter() > until_s:
                break
            batch.row_processor = None if is_on_host else processor
            for _ in range(1 if place.is_tiny else 2):  # the first time, steps are captured
                seconds = generate(llm, prompts, [num_tokens] * num_seqs, **way)
            row: Row = {"section": "sampling", "sequences": num_seqs, "way": name, "is_on_host": is_on_host}
            yield row | {"tokens_per_s": num_seqs * num_tokens / seconds} | _idle_share(capturers, num_tokens - 8)
    llm.close()


def _idle_share(capturers: list[DeviceCapturer], num_steps: int) -> Row:
    return measured_idle_share(capturers[-1], num_steps) if capturers and num_steps > 1 else {}
