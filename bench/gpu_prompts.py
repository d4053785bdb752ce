"""Captured steps with a prompt on a GPU, for bench/gpu.py: by both kernels of attention, with few and many empty tiles."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

from gpu_launches import stamped_capturer
from gpu_model import Options, Place, RandomModel, Row, Shape, make_model, release_memory, time_prompt
from gpu_profile import traced_rows

from quire.kernels.triton.tile_table import TileRule, TileTable, active_table, using

_BY_RUNS = TileTable("any", "any", {"attention-prefill-hopper": (TileRule({}, {"is_specialized": False}),)})


def prompt_rows(place: Place, shape: Shape, until_s: float) -> Iterator[Row]:
    """Yield the time of each step, of its kernels and of those of attention, by the kernel that is chosen and by attend_runs.

    A step has an empty tile for each further sequence that there may be. With more of them than others, attend_runs is chosen.
    """
    compiled: list[Row] = []
    model = make_model(place, shape, Options(), compiled)
    yield from compiled
    for num_seqs, is_forced in itertools.product((4,) if place.is_tiny else (1, 7, 31, 256), (False, True)):
        with using(_BY_RUNS.over(active_table())) if is_forced else nullcontext():
            common: Row = {"section": "captured-prompts", "max_num_seqs": num_seqs, "is_forced": is_forced}
            sizes = model.sizes._replace(max_num_seqs=num_seqs)
            yield from (common | row for row in _rows(place, model._replace(sizes=sizes), until_s))
        release_memory(place.device)


def _rows(place: Place, model: RandomModel, until_s: float) -> Iterator[Row]:
    capturer, times = stamped_capturer(place.device), 1 if place.is_tiny else 5
    stepper = model.stepper(place, capturer)
    for num_tokens in (9,) if place.is_tiny else (512, 2048):
        if time.perf_counter() > until_s:
            break
        row: Row = {"tokens": num_tokens, "is_captured": num_tokens <= stepper.prompts.max_tokens}
        run = partial(time_prompt, stepper, num_tokens, times)
        row["step_us"] = run() * 1e6
        kernels = list(traced_rows(f"prompt of {num_tokens}", place, run, times + 1))
        attention = [one for one in kernels if str(one.get("kernel")).startswith(("attend", "merge"))]
        for name, rows in (("kernels_us", kernels), ("attention_us", attention)):
            row[name] = sum(float(str(one.get("us", 0))) for one in rows)
        row["attention"] = [one["kernel"] for one in attention]
        yield row | ({"error": capturer.errors[0]} if capturer.errors else {})
    stepper.close()
