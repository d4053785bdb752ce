"""Build the runner of a device: load the model there, see what a step takes, and give the rest to the KV pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from quire.base.errors import ConfigError
from quire.base.logging import get_logger
from quire.contracts.config import EngineConfig
from quire.contracts.memory import MemoryPlan, ModelReport
from quire.kernels.triton.arithmetic import INTERPRETED
from quire.kernels.triton.libraries import load_library
from quire.kernels.triton.tile_table import active_table, choose_table
from quire.kv.device_pool import DeviceKvPool
from quire.model.checkpoint import open_parameters
from quire.model.device_decoder import DeviceDecoder
from quire.quant.parameters import Parameter, StoredParameter
from quire.quant.policy import DEVICE_POLICIES
from quire.worker.device.ahead import CompilationAhead, Order
from quire.worker.device.faults import is_out_of_memory
from quire.worker.device.graphs import CudaGraphRecorder, StepGraphs
from quire.worker.device.memory import (
    HOW_TO_SAVE,
    CudaMemory,
    DeviceMemory,
    MemoryBefore,
    Recordings,
    measure_usage,
    plan_device_memory,
)
from quire.worker.device.runner import DeviceRunner
from quire.worker.device.stepper import DeviceStepper, StepSizes

logger = get_logger(__name__)


def build_device_runner(
    config: EngineConfig, device: torch.device, report: ModelReport, num_batched_tokens: int
) -> tuple[DeviceRunner, ModelReport]:
    """Load a model on a device and return its runner, with the report of what it takes there.

    Raises ConfigError where it does not fit, or where the device is the CPU and kernels are not interpreted.
    """
    if device.type != "cuda" and not INTERPRETED:
        raise ConfigError("triton was imported before TRITON_INTERPRET=1 was set: set it in the environment of the process")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        major, minor = torch.cuda.get_device_capability(device)
        choose_table(torch.cuda.get_device_name(device), f"{major}.{minor}", config.tile_table)
    elif config.tile_table is not None:
        raise ConfigError("tile_table is for a GPU; leave it out")
    memory = CudaMemory(device) if device.type == "cuda" else None
    before = MemoryBefore(0, 0) if memory is None else MemoryBefore(memory.free_and_total()[0], memory.allocated())
    max_model_len, kv = report.memory.max_model_len, report.memory.kv
    sizes = StepSizes(config.max_num_seqs, num_batched_tokens, max_model_len)
    recorder = CudaGraphRecorder(device) if device.type == "cuda" and not config.enforce_eager else None
    try:
        parameters = open_parameters(report.folder, report.spec)
        compilation = _compile_ahead(device, config, report, sizes, parameters)
        policy = None if config.quantization is None else DEVICE_POLICIES[config.quantization]
        decoder = DeviceDecoder(report.spec, parameters, max_model_len, device, policy, config.deterministic)
        pool = DeviceKvPool(kv, 1, device)
        specs = [layer.attention for layer in report.spec.layers]
        library = load_library(config.attention_backend, specs, decoder.dtype, pool.caches[0].k.dtype, kv.block_size)
        stepper = DeviceStepper(decoder, pool, sizes, StepGraphs(recorder), library)
        if compilation is not None:
            compilation.wait()
        plan = report.memory if memory is None else _measured_plan(config, memory, stepper, sizes, report, before)
        stepper.give_pool(DeviceKvPool(kv, plan.num_kv_blocks, device))
        if recorder is not None:
            stepper.record_largest()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(f"the model does not fit on the device: {HOW_TO_SAVE} ({error})") from error
    for line in plan.describe().splitlines():
        logger.info(line)
    return DeviceRunner(decoder, stepper, plan, config.max_num_seqs), replace(report, memory=plan)


def _compile_ahead(
    device: torch.device,
    config: EngineConfig,
    report: ModelReport,
    sizes: StepSizes,
    parameters: Mapping[str, Parameter | StoredParameter],
) -> CompilationAhead | None:
    """Begin to compile what serving will launch, while weights are loaded."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    chosen = report.folder, report.spec, config.quantization, config.deterministic
    return CompilationAhead(Order(*chosen, report.memory.kv, sizes, 10 * major + minor, active_table()), parameters)


def _measured_plan(
    config: EngineConfig,
    memory: DeviceMemory,
    stepper: DeviceStepper,
    sizes: StepSizes,
    report: ModelReport,
    before: MemoryBefore,
) -> MemoryPlan:
    def run_full() -> None:
        stepper.run_full(sizes.max_num_batched_tokens, sizes.max_num_seqs, sizes.max_model_len)

    recordings = Recordings(stepper.record_samples, stepper.record_copies, len(stepper.keys))
    usage = measure_usage(memory, before, run_full, None if config.enforce_eager else recordings)
    return plan_device_memory(config, report.memory.kv, usage, sizes.max_model_len)
