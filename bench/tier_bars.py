"""Measures what KV tiers, prefill on another engine and 4-bit KV are to reach, and prints each figure with its bar.

    python -m bench.tier_bars            # under four minutes on two idle cores; --only NAME ... for some; --tiny to try it

demo, shapes   time to the first token of turns 2 to 8 (shapes: 2 and 3) with tiers, and after a restart and kill -9 with pages
               from disk, as a share of that without tiers; the working set is four times the pool
no-reuse       throughput of prompts that never come again with a disk tier, as a share of that without; and the same of
               tokens per CPU second, which other programs disturb less
transfer       what a prefill engine adds to the time to the first token over a link of 1 Gbit/s, see
               tools/measure_kv_transfer.py
decode         steps of 16 sequences with 4,000 cached tokens, turboquant_4bit and bfloat16, see tools/measure_decode.py

Weights of shapes, transfer and decode are random: Qwen3-0.6B with 7 of its 28 layers and a quarter of its vocabulary.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from bench.planner_bars import random_checkpoint
from quire import LLM, SamplingParams
from quire.bench.conversations import ConversationOptions, measure_conversations
from quire.bench.provenance import find_provenance
from quire.contracts.config import EngineConfig

NAMES = ("demo", "shapes", "no-reuse", "transfer", "decode")
TOOLS = Path(__file__).parents[1] / "tools"
DISK_BYTES = 2 << 30


class Run(NamedTuple):
    """Where files go, and whether sizes are those of a try, whose figures mean nothing."""

    folder: Path
    is_tiny: bool

    @property
    def model(self) -> str:
        """The checkpoint with random weights, written at first use."""
        path = self.folder / "model"
        if not path.exists():
            path.mkdir()
            random_checkpoint(path, *((1, 1000) if self.is_tiny else (7, 151936 // 4)))
        return str(path)

    def disk(self, name: str) -> dict[str, object]:
        """Return the options of a new disk tier."""
        return {"kv_disk_dir": str(self.folder / name), "kv_disk_bytes": DISK_BYTES}


def measure_turns(run: Run, name: str) -> None:
    """Print the share of each case of the conversations."""
    sizes = {"num_kv_blocks": 128, "kv_save": "write_through"}
    model, turns, bar = "demo", ConversationOptions(first_tokens=600, output_tokens=8), 0.35
    if name == "shapes":
        model, bar = run.model, 0.1
        turns = ConversationOptions(num_turns=3, first_tokens=3800, turn_tokens=100, output_tokens=8)
        sizes |= {"num_kv_blocks": 264, "max_model_len": 4096, "kv_host_bytes": 600_000_000}
    if run.is_tiny:
        turns = ConversationOptions(num_turns=2, first_tokens=80, output_tokens=2)
        sizes |= {"num_kv_blocks": 12, "max_model_len": 256, "kv_host_bytes": 8 << 20}
    config = EngineConfig(model=model, num_threads=2, **sizes, **run.disk(name))
    print(f"{name}: bar {bar}\n{measure_conversations(config, turns).describe()}", flush=True)


def measure_no_reuse(run: Run) -> None:
    """Print the throughput with a disk tier as a share of that without, in pairs of runs of the same new prompts."""
    num_pairs, num_prompts = (1, 4) if run.is_tiny else (15, 64)
    options = {"model": "demo", "num_threads": 2, "num_kv_blocks": 512, "skip_tokenizer_init": True}
    engines = [LLM(**options), LLM(**options, **run.disk("no-reuse"))]
    rng, ratios, cpu_ratios = random.Random(0), list[float](), list[float]()
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False)
    vocab_size = engines[0].llm_engine.report.spec.vocab_size
    for pair in range(num_pairs + 1):  # the first one is to warm up
        prompts = [{"prompt_token_ids": [rng.randrange(vocab_size) for _ in range(256)]} for _ in range(num_prompts)]
        seconds: dict[int, float] = {}
        cpu_seconds: dict[int, float] = {}
        for index in (0, 1) if pair % 2 else (1, 0):
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            engines[index].generate(prompts, params, use_tqdm=False)
            seconds[index], cpu_seconds[index] = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        ratios += [seconds[0] / seconds[1]] * (pair > 0)
        cpu_ratios += [cpu_seconds[0] / cpu_seconds[1]] * (pair > 0)
    num_written = engines[1].llm_engine.stats.tiers[-1].num_saved
    for engine in engines:
        engine.close()
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    median, of_cpu = statistics.median(ratios), statistics.median(cpu_ratios)
    print(f"no-reuse: bar 0.99\nthroughput {median:.3f} of that without tiers ({low:.3f} to {high:.3f}, {num_pairs} pairs), "
          f"tokens per CPU second {of_cpu:.3f}; {num_written} pages written meanwhile", flush=True)  # fmt: skip


def run_tool(name: str, bar: str, *arguments: str) -> None:
    """Run a script of tools/."""
    print(f"{name}: bar {bar}", flush=True)
    subprocess.run([sys.executable, *arguments], check=True)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--tiny", action="store_true", help="sizes of a try, whose figures mean nothing")
    args = parser.parse_args()
    length = "400" if args.tiny else "4000"
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), args.tiny)
        for name in args.only:
            began_s = time.perf_counter()
            if name in ("demo", "shapes"):
                measure_turns(run, name)
            elif name == "no-reuse":
                measure_no_reuse(run)
            elif name == "transfer":
                script = str(TOOLS / "measure_kv_transfer.py")
                run_tool(name, "+15 %", script, run.model, "--length", length, "--num-prompts", "2" if args.tiny else "4")
            else:
                script, sizes = str(TOOLS / "measure_decode.py"), ("2", "3") if args.tiny else ("16", "24")
                sizes = ("--length", length, "--num-sequences", sizes[0], "--num-steps", sizes[1], "--num-threads", "2")
                run_tool(name, "1.5 x", script, run.model, *sizes, "--kv-cache-dtype", "auto", "turboquant_4bit")
            print(f"({time.perf_counter() - began_s:.0f} s)\n", flush=True)
    print(find_provenance())


if __name__ == "__main__":
    main()
