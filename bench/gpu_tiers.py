"""KV tiers on a GPU, for bench/gpu.py: rates of copies, time to the first token of later turns, decode steps next to loads."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from gpu_model import Place, Shape, write_random_model

from quire import LLM, SamplingParams
from quire.contracts.kv_spec import KvSpec
from quire.engine.llm_engine import LLMEngine
from quire.kv.device_pages import DevicePages
from quire.kv.device_pool import DeviceKvPool
from quire.kv.tiers.host_slab import HostSlab

Row = dict[str, object]


def tier_rows(place: Place, shape: Shape, until_s: float) -> Iterator[Row]:
    """Yield the rates of DevicePages, and the same conversations, whose histories do not fit in the pool, without and with a
    host tier: the times, whether the tokens are the same, and decode steps while pages are loaded next to them."""
    yield from _rate_rows(place, shape)
    folder = write_random_model(shape, place.folder / shape.name)
    expected: list[tuple[int, ...]] | None = None
    for has_tier in (False, True):
        if time.perf_counter() > until_s:
            return
        llm = _make_llm(place, str(folder), has_tier)
        found, seconds, histories = _talk(llm, place, shape)
        row: Row = {"section": "tiers", "what": "later turns", "has_tier": has_tier}
        row["ttft_ms"] = statistics.median(seconds) * 1e3
        if has_tier:
            tier = llm.llm_engine.stats.tiers[0]
            row |= {"is_same": found == expected, "pages_saved": tier.num_saved, "pages_loaded": tier.num_loaded}
            row |= {name: getattr(tier, name) for name in ("save_s", "load_s", "saved_bytes", "loaded_bytes")}
            row |= _steps_next_to_loads(llm.llm_engine, place, shape, histories)
        yield row
        llm.close()
        expected = found


def _rate_rows(place: Place, shape: Shape) -> Iterator[Row]:
    spec = KvSpec(16 if place.is_tiny else 64, "bfloat16", ((shape.num_kv_heads, shape.head_dim),) * shape.num_layers)
    num_pages = 2 if place.is_tiny else 64
    pool = DeviceKvPool(spec, 2 * num_pages, place.device)
    pool.memory.view(torch.int32).random_(-(2**31), 2**31 - 1)
    started = time.perf_counter()
    slab = HostSlab(None, num_pages, page_bytes=spec.bytes_per_block)
    with torch.inference_mode():
        pages = DevicePages(pool, slab)
        pages.warm_up()
        yield {"section": "tiers", "what": "pin", "bytes": num_pages * slab.stride, "s": time.perf_counter() - started}
        for count in (1, num_pages // 2, num_pages):
            saves = [(index, index) for index in range(count)]
            loads = [(index, num_pages + index) for index in range(count)]
            for name, moves in (("save", (saves, [])), ("load", ([], loads))):
                best = min(_timed_moves(pages, moves) for _ in range(4))
                yield {"section": "tiers", "what": name, "pages": count, "bytes_per_s": count * slab.page_bytes / best}
        is_same = all(
            torch.equal(one.k[:num_pages].view(torch.int16), one.k[num_pages:].view(torch.int16)) for one in pool.caches
        )
        yield {"section": "tiers", "what": "bytes", "is_same": is_same}


def _timed_moves(pages: DevicePages, moves: tuple[list[tuple[int, int]], list[tuple[int, int]]]) -> float:
    started = time.perf_counter()
    pages.move(1, *moves)
    pages.settle()
    seconds = time.perf_counter() - started
    pages.take_done()
    return seconds


def _make_llm(place: Place, folder: str, has_tier: bool) -> LLM:
    options: dict[str, Any] = {
        "device": place.engine_device,
        "skip_tokenizer_init": True,
        "deterministic": True,
        "max_num_seqs": 4 if place.is_tiny else 32,
        "max_model_len": 32 if place.is_tiny else 4608,
        "num_kv_blocks": 4 if place.is_tiny else 200,
        "block_size": 8 if place.is_tiny else 64,
        "max_num_batched_tokens": 32 if place.is_tiny else 8192,
    }
    if has_tier:
        options |= {"kv_host_bytes": (1 << 20) if place.is_tiny else (4 << 30), "kv_save": "all"}
    return LLM(folder, **options)


def _talk(llm: LLM, place: Place, shape: Shape) -> tuple[list[tuple[int, ...]], list[float], list[list[int]]]:
    """Return the tokens of all turns, the times to the first token of the later ones, and the histories of the users."""
    num_users, first, later, answer = (2, 17, 3, 2) if place.is_tiny else (6, 3800, 100, 8)
    rng, found, seconds = random.Random(0), list[tuple[int, ...]](), list[float]()
    histories: list[list[int]] = [[] for _ in range(num_users)]
    for turn in range(2 if place.is_tiny else 3):
        for history in histories:
            history += [rng.randrange(5, shape.vocab_size) for _ in range(later if turn else first)]
            for max_tokens in (1, answer):
                params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
                started = time.perf_counter()
                output = llm.generate([{"prompt_token_ids": history}], params, use_tqdm=False)[0]
                if turn and max_tokens == 1:
                    seconds.append(time.perf_counter() - started)
            found.append(tuple(output.outputs[0].token_ids))
            history += found[-1]
    return found, seconds, histories


def _steps_next_to_loads(engine: LLMEngine, place: Place, shape: Shape, histories: list[list[int]]) -> Row:
    """Return the times of decode steps of eight sequences, alone, and while two histories are loaded."""
    num, num_steps = (1, 1) if place.is_tiny else (8, 40)
    params = SamplingParams(temperature=0.0, max_tokens=3 if place.is_tiny else 200, ignore_eos=True, detokenize=False)
    for index in range(num):
        prompt = [5 + index] * (4 if place.is_tiny else 64)
        engine.add_request(f"decode {index}", {"prompt_token_ids": prompt}, params)
    for _ in range(1 if place.is_tiny else 30):
        engine.step()

    def timed_steps() -> list[float]:
        seconds: list[float] = []
        for _ in range(num_steps):
            started = time.perf_counter()
            engine.step()
            seconds.append((time.perf_counter() - started) * 1e3)
        return seconds

    alone, before = timed_steps(), engine.stats.tiers[0].num_loaded
    for index, history in enumerate(histories[: 1 if place.is_tiny else 2]):
        engine.add_request(f"load {index}", {"prompt_token_ids": history}, SamplingParams(max_tokens=2, detokenize=False))
    loading = timed_steps()
    row: Row = {"num_loaded": engine.stats.tiers[0].num_loaded - before}
    for name, times in (("alone", alone), ("loading", loading)):
        row |= {f"step_ms_{name}": statistics.median(times), f"longest_ms_{name}": max(times)}
    for request_id in [*(f"decode {index}" for index in range(num)), "load 0", "load 1"]:
        engine.abort_request(request_id)
    while engine.has_unfinished_requests():
        engine.step()
    return row
