"""Compile for sm_90 what the steps of a model launch: `python -m ...step_launches KIND...` prints JSON.

In a process of its own: where kernels are interpreted none can be compiled.
"""

import dataclasses
import json
import sys

import numpy as np
import torch

from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec
from quire.kernels.triton.compiling import compile_launch
from quire.kernels.triton.launching import Launch
from quire.kv.device_pool import DeviceKvPool
from quire.model.parameters import parameter_shapes
from quire.model.token_runs import TreePlaces
from quire.quant.float8 import Float8Weight
from quire.quant.weight import QuantizedWeight
from quire.worker.device.block_table_updates import BlockTableUpdates
from quire.worker.device.gpu_executor import GpuStepExecutor
from quire.worker.device.graphs import StepGraphs
from quire.worker.device.host_step import full_step
from quire.worker.device.launched_step import StepSizes
from quire.worker.device.staging import Readback
from quire.worker.device.variants import ServedModel, meta_decoder
from quire.worker.step_executor import Moves

META = torch.device("meta")
OF_SHARED_KEYS = {"attend_chunks": ("chunks_ptr", torch.int32), "merge_items": ("sums_ptr", torch.float32)}
"""What these launches have in addition where ranks share the keys of sequences."""
RMS = NormSpec("rms", 1e-6)


def parameter(name, shape, kind):
    """Return a parameter without data, its linear weights of a kind."""
    if kind in ("plain", "in-order", "ranks", "in-order-ranks") or len(shape) < 2 or not name.startswith("layers."):
        return torch.empty(shape, dtype=torch.bfloat16, device=META)
    rows, columns = shape
    if kind == "fp8":
        codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=META)
        return Float8Weight(codes, torch.empty(rows // 128, columns // 128, device=META), (128, 128))
    codes = torch.empty(shape, dtype=torch.int8, device=META)
    return QuantizedWeight(codes, torch.empty(rows, columns // 128, device=META), None, tuple(range(-8, 8)))


def add_launches_of_steps(kind, found):
    """Add to `found` the distinct launches of decode steps and of one with prompts, in the shapes of Qwen3-0.6B."""
    layer = LayerSpec(
        AttentionSpec(16, 8, 128, 128**-0.5, RopeSpec(128, 1e6), qk_norm=RMS), MlpSpec(3072, "silu"), attn_in=RMS, mlp_in=RMS
    )
    spec = ModelSpec("test", "bfloat16", 151936, 1024, (layer,), RMS, 40960, is_tied=True)
    parameters = {name: parameter(name, shape, kind) for name, shape in parameter_shapes(spec).items()}
    is_in_order = kind.startswith("in-order")
    shares = (1.0, 1.0) if kind.endswith("ranks") else (1.0,)
    decoder = meta_decoder(ServedModel(spec, parameters, None, is_in_order, shares), 40960)
    pool = DeviceKvPool(KvSpec.of(decoder.spec, 64, "bfloat16"), 1000, META)
    stepper = GpuStepExecutor(decoder, pool, StepSizes(256, 2048, 40960, 110), StepGraphs())

    def note(launch):
        shown = [(name, value.dtype if isinstance(value, torch.Tensor) else value) for name, value in launch.arguments.items()]
        found.setdefault(repr((launch.kernel.fn.__name__, shown, sorted(launch.constants.items(), key=str))), launch)

        name, dtype = OF_SHARED_KEYS.get(launch.kernel.fn.__name__, ("", None))
        if kind.endswith("ranks") and name and launch.arguments[name] is None:
            note(launch._replace(arguments={**launch.arguments, name: torch.empty(8, dtype=dtype, device=META)}))

    Launch.run = note
    Readback.start = lambda self, count: None
    for count, length in ((1, 77), (64, 3000)):
        stepper.launch(full_step(count, count, length, 256), "cuts", BlockTableUpdates([]))
    stepper.run_full(2048, 64, 3000)
    if kind == "plain":
        # Sequences with five drafts each, first as chains; and what was accepted is moved.
        drafts = full_step(48, 8, 3000, 256, 6, 40)
        stepper.launch(drafts, "plain", BlockTableUpdates([], (), Moves([7], [6], [0, 1])))
        trees = TreePlaces(np.zeros(48, np.int64), np.full(8, 5, np.int32), np.zeros(48, np.uint64))
        stepper.launch(dataclasses.replace(drafts, trees=trees), "plain", BlockTableUpdates([]))


if __name__ == "__main__":
    launches: dict[str, Launch] = {}
    for chosen in sys.argv[1:]:
        add_launches_of_steps(chosen, launches)
    for launch in launches.values():
        compiled = compile_launch(launch)
        described = {"registers": compiled.num_registers, "stack": compiled.stack_bytes, "shared": compiled.shared_bytes}
        described["spills"] = compiled.count("LDL") + compiled.count("STL")
        print(json.dumps({"name": launch.kernel.fn.__name__, **described}), flush=True)
