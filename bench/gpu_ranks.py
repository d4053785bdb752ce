"""What a tensor-parallel rank costs on one GPU, for bench/gpu.py: decode steps with the collectives of a group of one rank,
captured with the rest of the step, beside steps without; and the sum of the ranks' parts by itself. Two ranks, where there are
two GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from gpu_kernels import Case, time_case
from gpu_launches import stamped_capturer
from gpu_model import (
    Options,
    Place,
    Row,
    Shape,
    decode_cases,
    engine_decode_rows,
    engine_options,
    make_model,
    release_memory,
    time_steps,
    write_random_model,
)

from quire import LLM
from quire.kernels.triton.adding import add_parts_launch
from quire.kernels.triton.launching import Launch
from quire.parallel.torch_communicator import TorchCommunicator

_STEPS = 32
_MOST_SEQUENCES = 64


def rank_rows(place: Place, shape: Shape, until_s: float) -> Iterator[Row]:
    """Yield the times of sums of parts, those of decode steps without ranks and as a rank of one, and engines of two ranks."""
    yield from _sum_rows(place)
    store = torch.distributed.HashStore()
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
        communicator = TorchCommunicator.nccl(store, 0, 1)
    else:
        communicator = TorchCommunicator.gloo(store, 0, 1, interface="lo")
    try:
        for is_in_order in (False,) if place.is_tiny else (False, True):
            for own in (None, communicator):
                compiled: list[Row] = []
                model = make_model(place, shape, Options(is_in_order=is_in_order), compiled, own)
                yield from compiled
                capturer = stamped_capturer(place.device)
                stepper = model.stepper(place, capturer)
                for count, length in decode_cases(place):
                    if time.perf_counter() > until_s or count > _MOST_SEQUENCES:
                        break
                    seconds = time_steps(stepper, count, length, 2 if place.is_tiny else _STEPS)
                    row: Row = {"section": "ranks", **model.common, "has_collectives": own is not None, "batch": count}
                    row |= {"context": length, "step_us": seconds * 1e6, "num_not_captured": len(capturer.errors)}
                    yield row | ({"error": capturer.errors[0]} if capturer.errors else {})
                stepper.close()
                del model, stepper
                release_memory(place.device)
    finally:
        communicator.close()
    yield from _several_rows(place, shape, until_s)


def _sum_rows(place: Place) -> Iterator[Row]:
    sizes = [(2, 3, 96)] if place.is_tiny else [(ranks, tokens, 4096) for ranks in (1, 2, 8) for tokens in (1, 8, 64)]
    for num_ranks, num_tokens, width in sizes:

        def make(size: tuple[int, int, int] = (num_ranks, num_tokens, width)) -> list[Launch]:
            parts = torch.randn(size, device=place.device).to(torch.bfloat16)
            return [add_parts_launch(torch.zeros_like(parts[0]), parts, 1.0)]

        case = Case(f"add parts {num_ranks} x {num_tokens} x {width}", make, 2 * (num_ranks + 2) * num_tokens * width)
        row: Row = {"section": "ranks", "case": case.name}
        if place.is_tiny:
            make()[0].run()
            yield row | {"us": None}
        else:
            us, spread_us = time_case(case)
            yield row | {"us": us, "spread_us": spread_us}


def _several_rows(place: Place, shape: Shape, until_s: float) -> Iterator[Row]:
    """Yield how fast engines of two GPUs decode: by tensor parallelism, and with the tokens of sequences shared, too."""
    options = {"tensor_parallel_size": 2}
    num_gpus = torch.cuda.device_count()
    for name, more in (("tensor parallel", {}), ("context parallel", {"decode_context_parallel_size": 2})):
        if num_gpus < 2:
            yield {"section": "ranks", "what": name, "skipped": f"needs 2 GPUs, not {num_gpus}"}
        elif time.perf_counter() < until_s:
            folder = write_random_model(shape, place.folder / shape.name)
            llm = LLM(str(folder), **engine_options(place) | options | more)
            for row in engine_decode_rows(place, shape, llm, until_s):
                yield row | {"section": "ranks", "what": name}
            llm.close()
