"""Where the time of a step goes, for bench/gpu.py: the kernels of decode steps and of a prompt, by torch's profiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import gpu_model
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Row = dict[str, object]
_STEPS = 8
_PROMPTS = 3


class KernelTotal(Protocol):
    """An entry of torch's `key_averages`, as far as it is read here."""

    key: str
    count: int
    device_type: DeviceType
    self_device_time_total: float
    self_cpu_time_total: float


def profile_rows(place: gpu_model.Place, shape: gpu_model.Shape, until_s: float) -> Iterator[Row]:
    """Yield the kernels of decode steps of 1, 8 and 64 sequences, and of a prompt, with their time and share."""
    compiled: list[Row] = []
    model = gpu_model.make_model(place, shape, gpu_model.Options(), compiled)
    stepper = model.stepper(place, None if place.is_tiny else gpu_model.stamped_capturer(place.device))
    cases = [(2, 40)] if place.is_tiny else [(1, 960), (8, 960), (64, 960)]
    num_steps = 1 if place.is_tiny else _STEPS
    for count, length in cases:
        if time.perf_counter() > until_s:
            return

        def decode(count: int = count, length: int = length) -> None:
            gpu_model.time_steps(stepper, count, length, num_steps)

        what = f"decode {count} x {length}"
        yield from traced_rows(what, place, decode, num_steps + gpu_model.WARM_UP_STEPS)
    num_tokens, num_prompts = gpu_model.prompt_lengths(place)[0], 1 if place.is_tiny else _PROMPTS
    if time.perf_counter() <= until_s:
        prompt = f"prompt of {num_tokens}"
        yield from traced_rows(prompt, place, lambda: gpu_model.time_prompt(stepper, num_tokens, num_prompts), num_prompts + 1)
    stepper.close()


def traced_rows(what: str, place: gpu_model.Place, run: Callable[[], object], num_steps: int) -> Iterator[Row]:
    """Yield the kernels of a run of so many steps, which is run once before."""
    run()  # compiles and captures
    is_cuda = place.device.type == "cuda"
    # CPU activities too: they tell the profiler which kernels belong to the run.
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities) as profiled:
        run()
    yield from kernel_rows(what, profiled.key_averages(), num_steps, DeviceType.CUDA if is_cuda else DeviceType.CPU)


def kernel_rows(what: str, totals: Iterable[KernelTotal], num_steps: int, device_type: DeviceType) -> list[Row]:
    """Return a row for each kernel of a device, what takes most first: launches and microseconds a step, and its share.

    An error where nothing ran there, as without the right to profile.
    """
    own = [total for total in totals if total.device_type == device_type]
    is_cpu = device_type == DeviceType.CPU
    times = {total.key: total.self_cpu_time_total if is_cpu else total.self_device_time_total for total in own}
    all_us = sum(times.values())
    if all_us <= 0:
        return [{"section": "profile", "what": what, "error": f"the profiler saw nothing on {device_type.name}"}]
    return [
        {
            "section": "profile",
            "what": what,
            "kernel": total.key,
            "launches": total.count / num_steps,
            "us": times[total.key] / num_steps,
            "share": times[total.key] / all_us,
        }
        for total in sorted(own, key=lambda total: -times[total.key])
        if times[total.key] > 0
    ]
