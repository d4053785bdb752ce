"""Checks what `quire plan` says against runs on this machine: the memory of the process, and the speed of prefill and decode.

    python bench/planner_bars.py memory           # demo and demo-moe in each precision and KV format; --quick: three of these;
                                                  # --big: Qwen3-0.6B
    python bench/planner_bars.py speed            # decode and prefill of demo by a record of steps of the same minute

Memory is what a process takes beyond one that has only imported the engine, with every block of the KV pool written. Speed
needs an idle machine. Ends with status 1 where a figure is off by more than 10 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from quire import EngineConfig, SamplingParams
from quire.bench.steps import StepsTrial, measure_steps
from quire.engine.inspect import inspect_model, weight_bytes_by_precision
from quire.engine.llm_engine import LLMEngine
from quire.planner.hardware import find_hardware
from quire.planner.memory import Limits, choose_kv_format, divide_memory
from quire.planner.model_shape import ModelShape
from quire.planner.step_time import StepWork
from quire.worker.cpu_executor import CpuStepExecutor
from quire.worker.step_driver import StepDriver

LIMIT = 0.10
POOL_BYTES = 100 << 20
BIG_POOL_BYTES = 1 << 30
"""For Qwen3-0.6B: 64 sequences fit."""
MAX_NUM_SEQS = 64
PRECISIONS = ("bfloat16", "int8", "int4")
KV_FORMATS = ("auto", "int8", "k8v4", "turboquant_4bit")
QUICK = (("demo", "bfloat16", "auto"), ("demo", "int8", "int8"), ("demo-moe", "int4", "turboquant_4bit"))
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def pool_bytes(model: str) -> int:
    """Return the size of the pool: large against what a process takes anyway."""
    return POOL_BYTES if model.startswith("demo") else BIG_POOL_BYTES


def engine_config(model: str, precision: str, kv_format: str) -> EngineConfig:
    """Return the engine's options."""
    return EngineConfig(
        model=model,
        device="cpu",
        dtype="bfloat16",
        quantization=None if precision == "bfloat16" else precision,  # type: ignore[arg-type]
        kv_cache_dtype=kv_format,  # type: ignore[arg-type]
        kv_cache_memory_bytes=pool_bytes(model),
        num_threads=1,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )


def planned_bytes(model: str, precision: str, kv_format: str, num_blocks: int) -> float:
    """Return what the plan says such a process takes: weights, activations, and so many blocks."""
    plain = inspect_model(EngineConfig(model=model, device="cpu", num_kv_blocks=1, dtype="bfloat16", skip_tokenizer_init=True))
    sizes = weight_bytes_by_precision(plain)
    shape = ModelShape.of(model, plain, sizes, max(0, plain.memory.weight_bytes - 2 * plain.num_parameters))
    hardware = find_hardware("xeon-8480")
    limits = Limits.usual(hardware, shape, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=512)
    wanted = choose_kv_format(shape, kv_format, is_gpu=False)
    memory = divide_memory(shape, hardware, limits, precision, wanted)
    kv_bytes = num_blocks * shape.kv_bytes_per_token(wanted) * limits.block_size
    return memory.weight_bytes + memory.activation_bytes + memory.runtime_bytes + kv_bytes


def resident_bytes() -> int:
    """Return the resident memory of this process at its peak, and start to count anew."""
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return int(peak.split()[1]) * 1024


def taken_bytes(model: str, precision: str, kv_format: str) -> tuple[int, int]:
    """Return what this process takes at its peak beyond what it took before, and the blocks of its pool.

    The whole pool is written, as it is after a while, and then a step of sampled sequences and one with the log probabilities
    of a prompt are run, which take the most.
    """
    resident_bytes()
    before = resident_bytes()
    engine = LLMEngine(engine_config(model, precision, kv_format))
    driver = engine.runner
    assert isinstance(driver, StepDriver)
    assert isinstance(driver.executor, CpuStepExecutor)
    for array in driver.executor.target.kv.arrays():
        array.zero_()
    sampled = SamplingParams(max_tokens=80, ignore_eos=True, temperature=0.8, logprobs=5, detokenize=False)
    for number in range(MAX_NUM_SEQS - 1):
        prompt = [(7 * number + place) % 250 for place in range(64)]
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampled)
    for _ in range(12):
        engine.step()
    ranked = SamplingParams(prompt_logprobs=1, max_tokens=1, temperature=0.0, detokenize=False)
    engine.add_request("ranked", {"prompt_token_ids": list(range(448))}, ranked)
    while not any(output.request_id == "ranked" and output.finished for output in engine.step()):
        pass
    return resident_bytes() - before, engine.scheduler.config.num_kv_blocks


def compare(name: str, planned: float, measured: float) -> bool:
    """Print a line; return whether the plan is near enough."""
    ratio = planned / measured
    print(f"{name:44} measured {measured:10.4g}  planned {planned:10.4g}  ratio {ratio:.3f}", flush=True)
    return abs(ratio - 1) <= LIMIT


def random_checkpoint(folder: Path, num_layers: int = 28, vocab_size: int = 151936) -> str:
    """Write a checkpoint with the shapes of Qwen3-0.6B, perhaps with fewer layers, and random weights; return its folder."""
    import torch
    from safetensors.torch import save_file

    config = {**QWEN3_06B, "num_hidden_layers": num_layers, "vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps(config))
    hidden, inner, heads, kv_heads, dim = 1024, 3072, 16, 8, 128
    shapes = {"model.embed_tokens.weight": (vocab_size, hidden), "model.norm.weight": (hidden,)}
    for layer in range(num_layers):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}self_attn.q_proj.weight": (heads * dim, hidden),
            f"{at}self_attn.k_proj.weight": (kv_heads * dim, hidden),
            f"{at}self_attn.v_proj.weight": (kv_heads * dim, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, heads * dim),
            f"{at}self_attn.q_norm.weight": (dim,),
            f"{at}self_attn.k_norm.weight": (dim,),
            f"{at}mlp.gate_proj.weight": (inner, hidden),
            f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
        }
    torch.manual_seed(0)
    save_file({name: (torch.randn(shape) * 0.02).bfloat16() for name, shape in shapes.items()}, folder / "model.safetensors")
    return str(folder)


def check_memory(is_big: bool, is_quick: bool) -> bool:
    """Compare the memory of a process of its own for each model, precision and KV format."""
    with tempfile.TemporaryDirectory() as folder:
        models = [random_checkpoint(Path(folder))] if is_big else ["demo", "demo-moe"]
        is_near = True
        cases = [case for case in itertools.product(models, PRECISIONS, KV_FORMATS) if not is_quick or case in QUICK]
        for model, precision, kv_format in cases:
            command = [sys.executable, __file__, "one", model, precision, kv_format]
            words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
            measured, num_blocks = int(words[-2]), int(words[-1])
            name = f"{'qwen3-0.6b' if is_big else model} {precision}, KV {kv_format}, bytes"
            is_near &= compare(name, planned_bytes(model, precision, kv_format, num_blocks), measured)
    return is_near


def check_speed() -> bool:
    """Compare decode steps and prompts of demo with the fit of a record that is measured first."""
    config = EngineConfig(
        model="demo", device="cpu", num_threads=1, num_kv_blocks=2000, enable_prefix_caching=False, skip_tokenizer_init=True
    )
    fit = measure_steps(config, StepsTrial(seconds=20.0)).fit()
    engine = LLMEngine(config)
    is_near = True
    for batch, length in ((1, 100), (1, 500), (4, 300), (16, 300), (32, 100)):
        prompt_s, decode_s = run_batch(engine, batch, length)
        context = [(length + 16, 1)] * batch
        work = StepWork.of_spans(context, (None,), batch)
        is_near &= compare(f"decode, {batch} x {length}, tokens/s", batch / fit.mean_s(work), batch / decode_s)
        if batch == 1:
            work = StepWork.of_spans([(0, length)], (None,), 1)
            is_near &= compare(f"prefill of {length}, tokens/s", length / fit.mean_s(work), length / prompt_s)
    engine.close()
    return is_near


def run_batch(engine: LLMEngine, batch: int, length: int) -> tuple[float, float]:
    """Return the median seconds of the step with the prompts, and of a decode step, over seven runs."""
    params = SamplingParams(max_tokens=33, ignore_eos=True, temperature=0.0, detokenize=False)
    prompts_s: list[float] = []
    decodes_s: list[float] = []
    for run in range(7):
        for number in range(batch):
            prompt = [(7 * number + 31 * run + place) % 4000 for place in range(length)]
            engine.add_request(f"{run}-{number}", {"prompt_token_ids": prompt}, params)
        times: list[float] = []
        while engine.has_unfinished_requests():
            begin_s = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - begin_s)
        prompts_s.append(times[0])
        decodes_s += times[-30:]
    return statistics.median(prompts_s), statistics.median(decodes_s)


def main() -> int:
    """Run what is asked for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    sizes = kinds.add_parser("memory", help="memory of processes").add_mutually_exclusive_group()
    sizes.add_argument("--big", action="store_true", help="Qwen3-0.6B's shapes")
    sizes.add_argument("--quick", action="store_true", help="three cases")
    kinds.add_parser("speed", help="decode and prefill")
    one = kinds.add_parser("one", help="print the bytes that one engine takes, and the blocks of its pool in use")
    for name in ("model", "precision", "kv_format"):
        one.add_argument(name)
    args = parser.parse_args()
    if args.kind == "one":
        print(*taken_bytes(args.model, args.precision, args.kv_format))
        return 0
    return 0 if (check_speed() if args.kind == "speed" else check_memory(args.big, args.quick)) else 1


if __name__ == "__main__":
    sys.exit(main())
