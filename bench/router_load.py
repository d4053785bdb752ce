"""Compares the policies of `quire router`, and measures what a router costs and that no request is lost when replicas end.

    python bench/router_load.py policies TRACE   # prefix hits, TTFT and goodput of prefix against round-robin
    python bench/router_load.py cost             # time to the first token that a router adds; streamed events a second and core
    python bench/router_load.py kills            # a replica is killed every --kill-every seconds: lost requests, wrong outputs

The replicas are servers of this machine with the bundled model. The machine has to be idle. TRACE is JSON lines with `hash_ids`
(see `quire bench serve --dataset-name trace`); its requests arrive at a share of the saturating rate, which is measured first.
Refused and failed requests count as requests that missed their objectives.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from quire.bench.serving.arrivals import Arrivals
from quire.bench.serving.metrics import Goals
from quire.bench.serving.serve import ServeOptions, run_serve
from quire.bench.serving.workload import Dataset

_MODEL = "demo"
_START_S = 60.0


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def _start(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "quire", *words, "--log-level", "error"], start_new_session=True)


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + _START_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise SystemExit(f"{url} ended with status {process.returncode}")
        try:
            _get(url + "/ready")
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"{url} was not ready after {_START_S:g} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Replicas:
    """Servers of the demo model, one thread each."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._options = ["--num-threads", "1", "--num-kv-blocks", str(args.blocks), "--max-num-seqs", str(args.max_num_seqs)]
        self.ports = _free_ports(args.replicas)
        self._event_ports = _free_ports(2 * args.replicas) if args.kv_events else []
        self.processes = [self._serve(port) for port in self.ports]

    def wait_ready(self) -> None:
        """Return when all servers answer."""
        for url, process in zip(self.urls, self.processes, strict=True):
            _wait_ready(url, process)

    @property
    def urls(self) -> list[str]:
        """The address of each server."""
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def event_options(self) -> list[str]:
        """Return the options by which a router follows the KV events of all servers; none without --kv-events."""
        found = []
        for url, (events, replay) in zip(self.urls, self._event_endpoints(), strict=False):
            found += ["--kv-events", f"{url}={events},{replay}"]
        return found

    def _event_endpoints(self) -> list[tuple[str, str]]:
        ends = [f"tcp://127.0.0.1:{port}" for port in self._event_ports]
        return list(zip(ends[::2], ends[1::2], strict=True))

    def _serve(self, port: int) -> subprocess.Popen[bytes]:
        options = list(self._options)
        if self._event_ports:
            events, replay = self._event_endpoints()[self.ports.index(port)]
            options += ["--kv-events-endpoint", events, "--kv-events-replay-endpoint", replay]
        return _start("serve", _MODEL, "--port", str(port), *options)

    def kill(self, index: int) -> None:
        """Kill a server with its processes, as an OOM kill of its container would, and start it again."""
        process = self.processes[index]
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False).stdout.split()
        process.kill()
        process.wait()
        for child in children:
            subprocess.run(["kill", "-KILL", child], check=False, capture_output=True)
        self.processes[index] = self._serve(self.ports[index])

    def hit_rate(self) -> float:
        """Return the share of all prompt tokens that were found in a prefix cache."""
        hits = queries = 0.0
        for url in self.urls:
            for line in _get(url + "/metrics").splitlines():
                series, _, value = line.rpartition(" ")
                hits += float(value) if series.startswith("quire:prefix_cache_hits_total") else 0.0
                queries += float(value) if series.startswith("quire:prefix_cache_queries_total") else 0.0
        return hits / max(1.0, queries)

    def close(self) -> None:
        """Stop all servers."""
        for process in self.processes:
            _stop(process)


@contextmanager
def _running(args: argparse.Namespace, policy: str) -> Generator[tuple[Replicas, str, subprocess.Popen[bytes]]]:
    """Start replicas and a router; yield them with the router's address and process."""
    with ExitStack() as stack:
        replicas = Replicas(args)
        stack.callback(replicas.close)
        replicas.wait_ready()
        (port,) = _free_ports(1)
        backends = [word for url in replicas.urls for word in ("--backend", url)]
        options = ["--policy", policy, "--prefix-chunk-bytes", str(args.prefix_chunk_bytes), "--no-page", *backends]
        options += replicas.event_options() if policy == "prefix" else []
        router = _start("router", "--port", str(port), *options)
        stack.callback(_stop, router)
        _wait_ready(f"http://127.0.0.1:{port}", router)
        yield replicas, f"http://127.0.0.1:{port}", router


def _dataset(args: argparse.Namespace) -> Dataset:
    return Dataset(
        name="trace",
        path=args.trace,
        num_prompts=args.num_prompts,
        input_scale=args.input_scale,
        output_scale=args.output_scale,
        max_input_len=args.max_input_len,
        max_output_len=args.max_output_len,
    )


def _run(args: argparse.Namespace, url: str, arrivals: Arrivals, goals: Sequence[str] = ()) -> dict[str, Any]:
    options = ServeOptions(
        base_url=url,
        model=_MODEL,
        ignore_eos=True,
        vocab_size=1000,
        timeout_s=120.0,
        dataset=_dataset(args),
        arrivals=arrivals,
        goals=Goals.parse(goals),
    )
    return run_serve(options).to_dict()


def compare_policies(args: argparse.Namespace) -> int:
    """Print a row for each policy, rate and round; return 1 where a bar is missed."""
    with _running(args, "round-robin") as (_, url, _router):
        # "poisson" without a rate: all at once, as places allow; else the trace's own times would set the rate.
        closed = Arrivals(process="poisson", max_concurrency=args.replicas * args.max_num_seqs)
        most = _run(args, url, closed)["request_throughput"]
    print(f"saturating rate of round-robin: {most:.1f} requests/s")
    found: dict[tuple[float, str], list[tuple[float, float, float]]] = {}
    for _ in range(args.rounds):
        for share in args.shares:
            for policy in ("round-robin", "prefix"):
                with _running(args, policy) as (replicas, url, _router):
                    figures = _run(args, url, Arrivals(request_rate=share * most), args.goodput)
                    row = (replicas.hit_rate(), figures["mean_ttft_ms"], figures["request_goodput"])
                    rest = f"p90 TTFT {figures['p90_ttft_ms']:.1f} ms  failed {figures['failed']}"
                found.setdefault((share, policy), []).append(row)
                text = f"hits {row[0]:.3f}  mean TTFT {row[1]:8.1f} ms  goodput {row[2]:6.2f} requests/s"
                print(f"{share:g} of it  {policy:12} {text}  {rest}", flush=True)
    is_met = True
    for share in args.shares:
        robin, prefix = ([statistics.median(c) for c in zip(*found[share, p], strict=True)] for p in ("round-robin", "prefix"))
        hits, ttft, goodput = (new / max(old, 1e-9) for new, old in zip(prefix, robin, strict=True))
        print(f"{share:g} of it: prefix / round-robin: hits {hits:.2f}, mean TTFT {ttft:.2f}, goodput {goodput:.2f}")
        is_met &= hits >= 2.0 and ttft <= 0.7 if share <= 0.7 else goodput >= 1.2
    return 0 if is_met else 1


def _ttft_ms(url: str, index: int) -> float:
    """Return the time to the first event of a short streamed completion."""
    body = {"model": _MODEL, "prompt": [5, 6, 7, index % 900 + 1], "max_tokens": 1, "stream": True, "temperature": 0}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    start_s = time.perf_counter()
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.readline()
        took_ms = (time.perf_counter() - start_s) * 1000.0
        answer.read()
    return took_ms


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100.0


def measure_cost(args: argparse.Namespace) -> int:
    """Print the added time to the first token, and streamed events a second and core; return 1 where a bar is missed."""
    args.replicas = 1
    with _running(args, "prefix") as (replicas, url, router):
        times: dict[str, list[float]] = {replicas.urls[0]: [], url: []}
        for index in range(400):
            for one, took in times.items():
                took.append(_ttft_ms(one, index))
        direct, routed = (statistics.median(took[50:]) for took in times.values())
        before_s = _cpu_s(router.pid)
        dataset = Dataset(num_prompts=64, input_len=16, output_len=400)
        arrivals = Arrivals(max_concurrency=args.max_num_seqs)
        options = ServeOptions(base_url=url, model=_MODEL, ignore_eos=True, vocab_size=1000, dataset=dataset, arrivals=arrivals)
        figures = run_serve(options).to_dict()
        cpu_s = _cpu_s(router.pid) - before_s
    events_per_s = figures["total_output_tokens"] / cpu_s
    print(f"median TTFT: {direct:.2f} ms direct, {routed:.2f} ms through the router: {routed - direct:.2f} ms more")
    tokens = figures["total_output_tokens"]
    print(f"{tokens} tokens streamed with {cpu_s:.2f} s of the router's CPU time: {events_per_s:.0f} a second and core")
    return 0 if routed - direct <= 1.0 and events_per_s >= 1500 else 1


def _complete(url: str, prompt: list[int]) -> str:
    """Return the text of a streamed completion, or an error."""
    body = {
        "model": _MODEL,
        "prompt": prompt,
        "max_tokens": 96,
        "stream": True,
        "temperature": 0.8,
        "seed": 7,
        "ignore_eos": True,
    }
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    text = ""
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return f"error: {event['error']['message']}"
                    text += event["choices"][0]["text"] if event["choices"] else ""
    except OSError as error:
        return f"error: {error}"
    return text


def kill_replicas(args: argparse.Namespace) -> int:
    """Kill replicas in turn while clients stream; return 1 where an output is lost or differs."""
    prompts = [[index % 900 + 1, 5, 6, 7, 8, index % 7 + 1] for index in range(40)]
    with _running(args, "prefix") as (replicas, url, _router):
        expected = [_complete(replicas.urls[0], prompt) for prompt in prompts]
        counts = {"equal": 0, "wrong": 0, "lost": 0}
        errors: list[str] = []
        end_s = time.monotonic() + args.seconds

        def client(offset: int) -> None:
            index = offset
            while time.monotonic() < end_s:
                text = _complete(url, prompts[index % len(prompts)])
                is_lost = text.startswith("error: ")
                kind = "lost" if is_lost else "equal" if text == expected[index % len(prompts)] else "wrong"
                counts[kind] += 1
                if kind == "lost":
                    errors.append(text)
                index += 1

        threads = [threading.Thread(target=client, args=(5 * number,)) for number in range(args.clients)]
        for thread in threads:
            thread.start()
        num_kills = 0
        while time.monotonic() + args.kill_every < end_s:
            time.sleep(args.kill_every)
            replicas.kill(num_kills % args.replicas)
            num_kills += 1
        for thread in threads:
            thread.join()
    print(f"{num_kills} kills in {args.seconds:g} s, {args.clients} clients: {counts}")
    for text in sorted(set(errors))[:10]:
        print(f"  {text}")
    return 0 if counts["wrong"] == counts["lost"] == 0 else 1


def main() -> int:
    """Run one of the measurements; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("policies", "cost", "kills"))
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=1600, help="KV blocks of a replica")
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--kv-events", action="store_true", help="the router follows the replicas' KV events")
    parser.add_argument("--prefix-chunk-bytes", type=int, default=256)
    parser.add_argument("--num-prompts", type=int, help="of the trace; default: all")
    parser.add_argument("--input-scale", type=float, default=4.0, help="by which lengths of prompts are multiplied")
    parser.add_argument("--output-scale", type=float, default=1.0)
    parser.add_argument("--max-input-len", type=int, default=950)
    parser.add_argument("--max-output-len", type=int, default=64)
    parser.add_argument("--shares", nargs="+", type=float, default=(0.7, 0.9), help="of the saturating rate")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--goodput", nargs="+", default=("ttft:50",))
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--kill-every", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=6)
    args = parser.parse_args()
    if args.kind == "policies" and args.trace is None:
        parser.error("policies needs TRACE")
    return {"policies": compare_policies, "cost": measure_cost, "kills": kill_replicas}[args.kind](args)


if __name__ == "__main__":
    sys.exit(main())
