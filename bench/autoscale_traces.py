"""The autoscaler against fixed numbers of replicas, on recorded loads in the simulator.

    python bench/autoscale_traces.py MODEL TRACE [TRACE ...] --seconds 1800 --fixed 4 5 6 1+3 2+2 3+1 --scaled 4 1+3

The traces are joined, `--seconds` of each. 4 are replicas that compute prompts and outputs, 1+3 a prefill and three decode
replicas. `--scaled` ones begin so, and change with `quire simulate --autoscale`. Attained is the share of the requests within
the objectives; per replica: divided by the replicas in use on average.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from quire.bench.serving.traces import read_trace

_BLOCK_TOKENS = 512


def join_traces(paths: list[Path], seconds: float, to: Path) -> None:
    """Write one trace of some others, one after the other. Prompts without ids of blocks all differ."""
    numbers: dict[tuple[int, ...], int] = {}
    with to.open("w", encoding="utf-8") as file:
        for place, path in enumerate(paths):
            for number, row in enumerate(read_trace(path, seconds).rows):
                num_blocks = -(-row.num_input_tokens // _BLOCK_TOKENS)
                ids = [(place, one) for one in row.hash_ids] or [(place, number, block) for block in range(num_blocks)]
                line = {
                    "timestamp": round(1000 * (place * seconds + row.time_s)),
                    "input_length": row.num_input_tokens,
                    "output_length": row.num_output_tokens,
                    "hash_ids": [numbers.setdefault(one, len(numbers)) for one in ids],
                }
                file.write(json.dumps(line) + "\n")


def simulate(args: argparse.Namespace, trace: Path, words: list[str]) -> tuple[float, float, int]:
    """Return the share of requests within the objectives, the replicas on average, and the actions of the autoscaler."""
    output = trace.with_name("figures.json")
    command = [sys.executable, "-m", "quire", "simulate", args.model, "--hardware", args.hardware, "--trace", str(trace)]
    command += ["--trace-speed", str(args.speed), "--goodput", *args.goodput, "--max-model-len", str(args.max_model_len)]
    command += ["--max-num-batched-tokens", str(args.max_num_batched_tokens)]
    done = subprocess.run([*command, *words, "--output-json", str(output)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}: {done.stderr[-2000:]}")
    figures = json.loads(output.read_text())
    stats, num_requests = figures["simulation"], figures["completed"] + figures["failed"]
    return figures["num_good_requests"] / num_requests, stats["replica_s"] / figures["duration"], len(stats["actions"])


def words_of(arrangement: str) -> list[str]:
    """Return the options of `quire simulate` for N or P+D replicas."""
    prefill, plus, decode = arrangement.rpartition("+")
    return ["--routing", "prefix", "--replicas", decode, *(["--prefill-replicas", prefill] if plus else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--fixed", nargs="+", default=[], metavar="N|P+D")
    parser.add_argument("--scaled", nargs="+", default=[], metavar="N|P+D")
    parser.add_argument("--autoscale", default="1:8", metavar="MIN:MAX", help="replicas of each kind")
    parser.add_argument("--hardware", default="l40s")
    parser.add_argument("--seconds", type=float, default=1800.0, help="of each trace's own time")
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--goodput", nargs="+", default=["ttft:2000", "tpot:100"])
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    args = parser.parse_args()
    print("| replicas | attained | on average | attained per replica | actions |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "joined.jsonl"
        join_traces(args.traces, args.seconds, trace)
        for kind, scaling in (("fixed", []), ("scaled", ["--autoscale", args.autoscale])):
            for arrangement in getattr(args, kind):
                attained, average, num_actions = simulate(args, trace, [*words_of(arrangement), *scaling])
                figures = f"{attained:.1%} | {average:.2f} | {attained / average:.1%} | {num_actions}"
                print(f"| {arrangement} {kind} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
