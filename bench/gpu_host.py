"""What the host does for a step with prompt tokens on a GPU, without one: `python -m bench.gpu_host` prints a row a kind.

The model lies on torch's meta device, has the shapes of Qwen3-0.6B, and nothing is launched: neither the packing of arguments,
about 5 us a launch one by one, nor CUDA's launch is in the figures. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable

import numpy as np
import torch

from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec
from quire.kernels.triton.launching import collected_launches
from quire.kv.device_pool import DeviceKvPool
from quire.model.device_decoder import DeviceDecoder
from quire.model.parameters import parameter_shapes
from quire.worker.device.gpu_executor import BlockTableUpdates, GpuStepExecutor
from quire.worker.device.graphs import StepGraphs
from quire.worker.device.host_step import HostStep
from quire.worker.device.launched_step import StepSizes

_META = torch.device("meta")
_SIZES = StepSizes(256, 8192, 40960)


class _NothingLaunched:
    """Stands for a capturer: what it returns launches nothing."""

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """See GraphCapturer."""
        return lambda: None


def make_stepper(num_layers: int, is_captured: bool) -> GpuStepExecutor:
    """Return a stepper of a model without memory."""
    rms = NormSpec("rms", 1e-6)
    attention = AttentionSpec(16, 8, 128, 128**-0.5, RopeSpec(128, 1e6), qk_norm=rms)
    layer = LayerSpec(attention, MlpSpec(3072, "silu"), attn_in=rms, mlp_in=rms)
    spec = ModelSpec("bench", "bfloat16", 151936, 1024, (layer,) * num_layers, rms, 40960, is_tied=True)
    parameters = {
        name: torch.empty(shape, dtype=torch.bfloat16, device=_META) for name, shape in parameter_shapes(spec).items()
    }
    decoder = DeviceDecoder(spec, parameters, _SIZES.max_model_len, _META)
    pool = DeviceKvPool(KvSpec.of(spec, 64, "bfloat16"), 1000, _META)
    return GpuStepExecutor(decoder, pool, _SIZES, StepGraphs(_NothingLaunched() if is_captured else None))


def mixed_step(num_decodes: int, prompts: list[int], context_len: int) -> HostStep:
    """Return a step of so many sequences with one token behind context_len others, and of whole prompts."""
    counts = [1] * num_decodes + prompts
    lines = np.arange(len(counts), dtype=np.int32)
    num_tokens = sum(counts)
    places = np.concatenate([np.arange(count) for count in counts])
    lengths = np.array([context_len] * num_decodes + prompts, np.int32)
    ends = np.cumsum(counts) - 1
    slots = np.arange(num_tokens)
    ids = np.ones(num_tokens, np.int64)
    return HostStep(tuple(counts), lines, lengths, ids, places, slots, ends, lines, lengths.astype(np.int64))


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    cases = ((0, [64]), (0, [512]), (63, [193]), (200, [1000, 848]), (0, [4096]))
    for is_captured, (num_decodes, prompts) in itertools.product((False, True), cases):
        stepper = make_stepper(options.layers, is_captured)
        step, changes = mixed_step(num_decodes, prompts, 700), BlockTableUpdates([])
        times: list[float] = []
        counts: list[int] = []
        with torch.inference_mode():
            for _ in range(options.steps):
                with collected_launches() as launches:
                    started = time.perf_counter()
                    stepper.launch(step, "plain", changes)
                    times.append(time.perf_counter() - started)
                counts.append(len(launches))
        row = {"is_captured": is_captured, "decodes": num_decodes, "prompts": prompts, "launches": counts[-1]}
        times = sorted(times[2:])
        shown = {"median_ms": times[len(times) // 2] * 1e3, "best_ms": times[0] * 1e3}
        print(json.dumps({**row, **{name: round(value, 3) for name, value in shown.items()}}), flush=True)


if __name__ == "__main__":
    main()
