"""Times of one model as one process, ranks, pipeline stages and replicas, measured in turn; and what idle ranks cost.

    python bench/parallel_layouts.py MODEL one1,one2,tp2,pp2,dp2 decode1=16,33,1 decode16=16,17,16 prefill512=512,1,1

Each workload is prompt tokens, output tokens (greedy, no end of sequence) and requests. Every layout is an engine in a process
of its own; all are loaded first, and the rounds alternate between them, so that the machine's speed changes for all alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LAYOUTS: dict[str, dict[str, Any]] = {
    "one1": {"num_threads": 1},
    "one2": {"num_threads": 2},
    "tp2": {"num_threads": 2, "tensor_parallel_size": 2},
    "pp2": {"num_threads": 2, "pipeline_parallel_size": 2},
    "dp2": {"data_parallel_size": 2, "data_parallel_threads": (1, 1)},
}
_IDLE_S = 10.0


def serve(model: str, layout: str, max_num_seqs: int) -> None:
    """Load a layout, and time the workloads that come on standard input."""
    from quire import LLM, SamplingParams

    options = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "max_model_len": 640, "num_kv_blocks": 1400}
    llm = LLM(model, **options, max_num_seqs=max_num_seqs, **LAYOUTS[layout])
    pids: list[int] = []
    if layout.startswith(("tp", "pp")):
        runner = llm.llm_engine.runner
        pids = list(getattr(runner, "executor", runner).worker_pids.values())
    print(json.dumps(pids), flush=True)
    for line in sys.stdin:
        num_prompt, num_output, count = map(int, line.split(","))
        prompts = [{"prompt_token_ids": [5 + (7 * i + j) % 9000 for j in range(num_prompt)]} for i in range(count)]
        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False)
        began_s = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        print(json.dumps(time.perf_counter() - began_s), flush=True)
    llm.close()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print the median time of each workload and layout, and the share of a core that idle worker processes take."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("layouts", help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("workloads", nargs="*", help="NAME=PROMPT_TOKENS,OUTPUT_TOKENS,REQUESTS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.model, args.layouts, args.max_num_seqs)
        return
    workloads = dict(each.split("=") for each in args.workloads)
    command = [sys.executable, __file__, args.model, "--serve", "--max-num-seqs", str(args.max_num_seqs)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    engines = {name: subprocess.Popen([*command, name], **pipes) for name in args.layouts.split(",")}
    pids = {name: json.loads(engine.stdout.readline()) for name, engine in engines.items()}
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.rounds + 1):
        for workload, sizes in workloads.items():
            for name, engine in engines.items():
                engine.stdin.write(sizes + "\n")
                engine.stdin.flush()
                found.setdefault((workload, name), []).append(json.loads(engine.stdout.readline()))
    for (workload, name), times in found.items():
        print(f"{workload:12} {name:6} median {statistics.median(times[1:]):.3f} s, best {min(times[1:]):.3f} s")
    before = {name: sum(map(_cpu_s, own)) for name, own in pids.items() if own}
    time.sleep(_IDLE_S)
    for name, seconds in before.items():
        print(f"idle         {name:6} {(sum(map(_cpu_s, pids[name])) - seconds) / _IDLE_S:.2%} of a core")
    for engine in engines.values():
        engine.stdin.close()
        engine.wait()


if __name__ == "__main__":
    main()
