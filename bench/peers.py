"""Run quire and other engines in turn on the workloads of ../shared/bench/peers, and print each figure as it comes.

    python bench/peers.py DIR [--rounds 2] [--only decode1,mix16] [--precision bf16,int8,int4]

DIR holds the engines and checkpoints that setup.sh, make_checkpoint.py and make_gguf.py of that folder have made. An engine
that does not start, for example because it is compiled for another processor, is named with the reason and left out.
ik_llama.cpp takes part if DIR/ikllama is an environment with ik-llama-cpp-python (0.1.5 was tried).
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GGUF = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
Figures = dict[tuple[str, str, str], list[float]]


class EngineFailure(Exception):
    """An engine gave no figures."""


def has_avx512() -> bool:
    """Return whether this processor has AVX-512."""
    return "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8")


def stream(command: list[str], limit_s: float | None = None) -> Iterator[dict[str, Any]]:
    """Yield the JSON lines that a command prints, as they come. Raises EngineFailure if it fails or takes too long."""
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert child.stdout is not None
        is_late = threading.Event()

        def stop() -> None:
            is_late.set()
            child.kill()

        timer = threading.Timer(limit_s or 0.0, stop)
        if limit_s is not None:
            timer.start()
        yield from (json.loads(line) for line in child.stdout if line.startswith("{"))
        status = child.wait()
        timer.cancel()
        if is_late.is_set():
            raise EngineFailure(f"it was stopped after {limit_s:g} s")
        errors.seek(0)
        if status:
            raise EngineFailure(reason_of(status, errors.read()))


def reason_of(status: int, text: str) -> str:
    """Return in words why a process has ended."""
    if status == -signal.SIGILL:
        return "illegal instruction: it is compiled for another processor"
    lines = text.strip().splitlines()
    return f"status {status}" + (f": {lines[-1][:300]}" if lines else "")


def run_quire(command: str, checkpoint: Path, precision: str, workload: tuple[int, int, int, str]) -> float:
    """Return the tokens per second of what the workload counts. Raises EngineFailure."""
    sequences, prompt, output, counted = workload
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        argv = [*shlex.split(command), "bench", "throughput", "--model", str(checkpoint), "--num-prompts", str(sequences)]
        argv += ["--random-input-len", str(prompt), "--random-output-len", str(output), "--seed", "0", "--ignore-eos"]
        argv += ["--no-enable-prefix-caching", "--output-json", out.name]
        argv += [] if precision == "bf16" else ["--quantization", precision]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EngineFailure(reason_of(done.returncode, done.stderr or done.stdout))
        elapsed = json.loads(Path(out.name).read_text())["elapsed_time"]
    return sequences * (output if counted == "output" else prompt) / elapsed


class Comparison:
    """The figures so far, and the engines that do not run here."""

    def __init__(self, peers: Path, folder: Path, quire: str) -> None:
        sys.path.insert(0, str(peers))
        from workloads import WORKLOADS

        self.workloads: dict[str, tuple[int, int, int, str]] = WORKLOADS
        self._peers, self._folder, self._quire = peers, folder, quire
        self.figures: Figures = {}
        self.absent: set[str] = set()

    def note(self, precision: str, name: str, engine: str, tokens_per_s: float) -> None:
        """Keep and print a figure."""
        self.figures.setdefault((precision, name, engine), []).append(tokens_per_s)
        print(f"{precision:9} {name:12} {engine:12} {tokens_per_s:9.1f} tokens/s", flush=True)

    def leave_out(self, engine: str, reason: object) -> None:
        """Say why an engine is not in the comparison."""
        self.absent.add(engine)
        print(f"{engine} is left out: {reason}", flush=True)

    def peer(self, engine: str, precision: str, command: list[str], limit_s: float | None = None) -> None:
        """Run a peer on workloads, for limit_s seconds at most."""
        if engine in self.absent:
            return None
        if not Path(command[0]).exists():
            return self.leave_out(engine, f"{command[0]} is missing, run setup.sh")
        try:
            for line in stream(command, limit_s):
                if "tokens_per_s" in line:
                    self.note(precision, line["workload"], engine, line["tokens_per_s"])
                elif "error" in line:
                    print(f"{precision:9} {line['workload']:12} {engine:12} {line['error']}", flush=True)
        except EngineFailure as failure:
            self.leave_out(engine, failure)

    def ik_llama(self, precision: str, gguf: str, name: str) -> None:
        """Run ik_llama.cpp, which is optional, on a workload of one sequence: with several it ends with a failed assertion."""
        python = self._folder / "ikllama/bin/python"
        if python.exists() and self.workloads[name][0] == 1:
            script = Path(__file__).with_name("run_ik_llama.py")
            self.peer("ik_llama.cpp", precision, [str(python), str(script), str(self._peers), gguf, name])

    def round(self, names: list[str], precisions: list[str]) -> None:
        """Run all engines on all workloads once."""
        checkpoint = self._folder / "qwen3-0.6b"
        for precision in precisions:
            for name in names:
                try:
                    self.note(precision, name, "quire", run_quire(self._quire, checkpoint, precision, self.workloads[name]))
                except EngineFailure as failure:
                    print(f"{precision:9} {name:12} quire        {failure}", flush=True)
                gguf = f"{checkpoint}-{GGUF[precision]}.gguf"
                python = str(self._folder / "llamacpp/bin/python")
                self.peer("llama.cpp", precision, [python, str(self._peers / "run_llamacpp.py"), gguf, name])
                self.ik_llama(precision, gguf, name)
            if precision == "bf16":  # it starts for a minute: once for all workloads
                python = str(self._folder / "vllm/bin/python")
                # Its bf16 takes minutes without AVX-512.
                limit_s = None if has_avx512() else 60.0 * (1 + len(names))
                self.peer("vllm", precision, [python, str(self._peers / "run_vllm.py"), str(checkpoint), *names], limit_s)

    def table(self, names: list[str], precisions: list[str]) -> None:
        """Print medians, and the ratio to the best peer."""
        for precision in precisions:
            for name in names:
                found = {
                    engine: statistics.median(rates)
                    for (p, n, engine), rates in self.figures.items()
                    if (p, n) == (precision, name)
                }
                own, best = found.pop("quire", None), max(found.values(), default=None)
                ratio = f"{own / best:.2f}" if own and best else "-"
                print(f"{precision:9} {name:12} quire {own or 0:9.1f}  best peer {best or 0:9.1f}  ratio {ratio}")


def choices(text: str, name: str, allowed: list[str]) -> list[str]:
    """Return the parts of a list with commas; ends the program if one is not allowed."""
    parts = text.split(",")
    wrong = [part for part in parts if part not in allowed]
    if wrong:
        raise SystemExit(f"{name}: got {wrong[0]!r}, allowed are {', '.join(allowed)}")
    return parts


def main(argv: list[str]) -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument(
        "--peers", type=Path, default=ROOT.parent / "shared/bench/peers", help="the folder of the peers' scripts"
    )
    parser.add_argument("--quire", default=f"{sys.executable} -m quire", help="the command of quire")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="decode1,decode4,decode16,prefill512,mix16", help="workloads")
    parser.add_argument("--precision", default="bf16,int8,int4")
    args = parser.parse_args(argv)
    if not (args.peers / "workloads.py").is_file():
        raise SystemExit(f"--peers: {args.peers} has no workloads.py")
    comparison = Comparison(args.peers, args.dir, args.quire)
    names = choices(args.only, "--only", list(comparison.workloads))
    precisions = choices(args.precision, "--precision", list(GGUF))
    for _ in range(args.rounds):
        comparison.round(names, precisions)
    comparison.table(names, precisions)


if __name__ == "__main__":
    main(sys.argv[1:])
