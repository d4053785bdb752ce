"""A whole workload that was measured on an H100: 256 sequences of 100 to 1,024 tokens in and out, Qwen3-0.6B in bf16."""

import pytest

from quire.bench.serving.workload import Dataset
from quire.contracts.scheduler_config import SchedulerConfig
from quire.planner.hardware import find_hardware
from quire.planner.memory import Limits, divide_memory
from quire.planner.step_time import RooflineTime
from quire.simulate.run import SimulateOptions, simulate
from tests.unit.planner.shapes import qwen3_06b

MEASURED_OUTPUT_TOKENS_PER_S = 19_429


def test_mixed_workload_on_an_h100_is_within_10_percent_of_the_measured_throughput():
    shape, hardware = qwen3_06b(), find_hardware("h100")
    limits = Limits.usual(hardware, shape, max_num_seqs=256, max_model_len=4096)
    memory = divide_memory(shape, hardware, limits, "bfloat16", "bfloat16")
    options = SimulateOptions(
        model=shape.name,
        machine=hardware.label,
        scheduler=SchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            num_kv_blocks=memory.num_kv_blocks,
            enable_prefix_caching=False,
        ),
        times=RooflineTime(shape, hardware, "bfloat16", "bfloat16"),
        windows=shape.windows,
        dataset=Dataset(num_prompts=256, input_len=562, output_len=562, range_ratio=0.822),
    )
    figures = simulate(options).report.to_dict()
    assert figures["completed"] == 256
    assert figures["output_throughput"] == pytest.approx(MEASURED_OUTPUT_TOKENS_PER_S, rel=0.10)
