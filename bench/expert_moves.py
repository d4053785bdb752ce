"""Measures decode steps while experts move between ranks, next to steps without moves.

    python bench/expert_moves.py [--model demo-moe] [--ranks 2] [--sequences 32] [--steps 300]

The machine has to be idle. Prints the median, the 99th percentile and the longest step of both, and the moved slots. Ends with
status 1 if a step was longer than 1.5 times the median while experts moved, or if no expert has moved.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from quire import EngineConfig, SamplingParams
from quire.engine.inspect import inspect_model
from quire.engine.llm_engine import LLMEngine
from quire.parallel.expert_files import write_placements
from quire.parallel.expert_placement import ExpertPlacement

LIMIT = 1.5
WARM_UP = 20


def skewed_placements(model: str, num_ranks: int, folder: str) -> str:
    """Write a placement of as many experts on each rank whose order changes from layer to layer; return the file."""
    report = inspect_model(EngineConfig(model=model, device="cpu", num_kv_blocks=1))
    rng = np.random.default_rng(1)
    found: dict[int, ExpertPlacement] = {}
    for index, layer in enumerate(report.spec.layers):
        num_experts = getattr(layer.mlp, "num_experts", 0)
        if num_experts:
            parts = np.array_split(rng.permutation(num_experts), num_ranks)
            found[index] = ExpertPlacement(num_experts, tuple(tuple(sorted(map(int, part))) for part in parts))
    path = str(Path(folder) / "placement.json")
    write_placements(path, found)
    return path


def run_steps(engine: LLMEngine, num_steps: int, moves: bool) -> list[float]:
    """Return the times of decode steps; moves: begin to balance the experts whenever none is being moved."""
    times: list[float] = []
    for _ in range(num_steps):
        if moves:
            engine.rebalance_experts()
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    return times


def describe(name: str, times: list[float]) -> dict[str, float]:
    """Print and return the figures of some steps, in milliseconds."""
    median, p99, longest = (float(np.percentile(times, share)) * 1e3 for share in (50, 99, 100))
    num_long = sum(one > LIMIT * statistics.median(times) for one in times)
    print(
        f"{name}: {len(times)} steps, median {median:.3f} ms, p99 {p99:.3f} ms ({p99 / median:.2f} x), longest {longest:.3f} "
        f"ms ({longest / median:.2f} x), {num_long} longer than {LIMIT} x"
    )
    return {"median_ms": median, "p99_ms": p99, "longest_ms": longest, "num_long": num_long}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo-moe")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        total = 2 * args.steps + WARM_UP + 64
        config = EngineConfig(
            model=args.model,
            device="cpu",
            tensor_parallel_size=args.ranks,
            num_threads=args.ranks,
            max_num_seqs=args.sequences,
            max_model_len=total,
            enable_expert_parallel=True,
            expert_placement=skewed_placements(args.model, args.ranks, folder),
            enable_eplb=True,
            eplb_config={"window_size": 16, "step_interval": 1_000_000},
            skip_tokenizer_init=True,
        )
        engine = LLMEngine(config)
        try:
            params = SamplingParams(temperature=1.0, seed=0, max_tokens=total - 32, ignore_eos=True, detokenize=False)
            for index in range(args.sequences):
                prompt = [(7 * index + 13 * place) % 3000 + 5 for place in range(8)]
                engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
            run_steps(engine, WARM_UP, moves=False)
            still = describe("no moves", run_steps(engine, args.steps, moves=False))
            moving = describe("moving", run_steps(engine, args.steps, moves=True))
            num_moved = sum(layer.num_moved for layer in engine.stats.experts)
        finally:
            engine.close()
    print(f"{num_moved} slots moved")
    is_met = num_moved > 0 and moving["num_long"] == 0
    print(
        f"no step longer than {LIMIT} x the median while experts move: {'met' if is_met else 'MISSED'}. Longer ones: "
        f"{moving['num_long']:.0f} of {args.steps} while they move, {still['num_long']:.0f} of {args.steps} while none does"
    )
    print(json.dumps({"no_moves": still, "moving": moving, "num_moved": num_moved}))
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
