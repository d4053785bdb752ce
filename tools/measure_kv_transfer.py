"""Measure what the KV transfer adds to the time to the first token, over a link of limited bandwidth.

    python tools/measure_kv_transfer.py MODEL --length 4000 --link-bits 1e9

A prefill engine (one thread) computes prompts for a decode engine (one thread) of this process, over a link of so many bits a
second. Then one engine with one thread computes prompts of the same length: an ideal transfer takes no time.

The link is that to a network namespace, in which the prefill engine runs (root, with `ip` and `tc`); elsewhere it is a relay of
this process that delays.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import select
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from quire import LLM, LLMEngine, SamplingParams
from quire.bench.provenance import find_provenance

_CHUNK = 1 << 16


def main() -> None:
    """Print the median times to the first token with and without the transfer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=4000, help="tokens of each prompt")
    parser.add_argument("--num-prompts", type=int, default=5)
    parser.add_argument("--link-bits", type=float, default=1e9, help="bits per second from the prefill server")
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens in one step of either engine")
    parser.add_argument("--host-bytes", type=int, default=1 << 30, help="host memory for pages on either side")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is None:
        _measure(args)
    else:
        _serve_pages(args)


def _measure(args: argparse.Namespace) -> None:
    has_namespace = os.geteuid() == 0 and bool(shutil.which("ip") and shutil.which("tc"))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        secret = str(Path(folder) / "secret")
        namespace = stack.enter_context(_namespace(args.link_bits)) if has_namespace else None
        host = "127.0.0.1" if namespace is None else namespace.host
        port = stack.enter_context(_prefill_engine(args, secret, host, namespace))
        if namespace is None:
            port = _Relay(port, args.link_bits / 8).port
        apart, num_pulled, num_bytes = _first_token_s(
            args,
            role="decode",
            prefill_urls=(f"tcp://{host}:{port}",),
            transfer_secret_file=secret,
            kv_host_bytes=args.host_bytes,
        )
    alone, _, _ = _first_token_s(args)
    print(f"link of {args.link_bits / 1e6:g} Mbit/s: {'a relay' if namespace is None else 'to a network namespace'}")
    print(f"{num_pulled} of {args.num_prompts + 1} prompts transferred, {num_bytes / 1e6 / max(1, num_pulled):.1f} MB each")
    print(f"first token: one engine {alone:.3f} s, with the transfer {apart:.3f} s, {apart / alone - 1:+.1%}")
    print(find_provenance())


def _first_token_s(args: argparse.Namespace, **options: object) -> tuple[float, int, int]:
    """Return the median seconds to the first token, and how many prompts and bytes were transferred."""
    rng, times = random.Random(1), list[float]()
    sizes = {"max_num_batched_tokens": args.chunk, "max_model_len": args.length + 16, "max_num_seqs": 1, "num_threads": 1}
    with contextlib.closing(LLM(args.model, skip_tokenizer_init=True, **sizes, **options)) as llm:
        vocab_size = llm.llm_engine.report.spec.vocab_size
        for number in range(args.num_prompts + 1):  # the first one is to warm up
            prompt = [rng.randrange(vocab_size) for _ in range(args.length)]
            started_s = time.perf_counter()
            llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
            if number:
                times.append(time.perf_counter() - started_s)
        peer = next((tier for tier in llm.llm_engine.stats.tiers if tier.tier == "peer"), None)
    num_pulled, num_bytes = (0, 0) if peer is None else (peer.outcomes.get("complete", 0), peer.loaded_bytes)
    return statistics.median(times), num_pulled, num_bytes


class _Namespace(NamedTuple):
    """A network namespace: its name, and the address that it has on its link to this one."""

    name: str
    host: str


@contextlib.contextmanager
def _namespace(bits_per_s: float) -> Iterator[_Namespace]:
    """Yield a network namespace with a link on which both ends send so many bits a second."""
    name, ends = f"quire-{os.getpid()}", [f"q{os.getpid()}{side}" for side in "ab"]
    inside = f"ip netns exec {name} "
    shape = f"root tbf rate {int(bits_per_s)}bit burst 128kb latency 100ms"
    run = functools.partial(subprocess.run, check=True)
    run(["ip", "netns", "add", name])
    try:
        for command in (
            f"ip link add {ends[0]} type veth peer name {ends[1]}",
            f"ip link set {ends[1]} netns {name}",
            f"ip addr add 169.254.77.1/30 dev {ends[0]}",
            f"ip link set {ends[0]} up",
            f"{inside}ip addr add 169.254.77.2/30 dev {ends[1]}",
            f"{inside}ip link set {ends[1]} up",
            f"tc qdisc add dev {ends[0]} {shape}",
            f"{inside}tc qdisc add dev {ends[1]} {shape}",
        ):
            run(command.split())
        yield _Namespace(name, "169.254.77.2")
    finally:
        run(["ip", "netns", "del", name])


@contextlib.contextmanager
def _prefill_engine(args: argparse.Namespace, secret: str, host: str, namespace: _Namespace | None) -> Iterator[int]:
    """Yield the port of a prefill engine in a process of its own. Raises RuntimeError if it ends."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [] if namespace is None else ["ip", "netns", "exec", namespace.name]
    address = f"tcp://{host}:{port}"
    sizes = ["--length", args.length, "--chunk", args.chunk, "--host-bytes", args.host_bytes, "--serve", address, secret]
    process = subprocess.Popen([*command, sys.executable, __file__, args.model, *map(str, sizes)])
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError):
                socket.create_connection((host, port), timeout=1).close()
                yield port
                return
            time.sleep(0.1)
        raise RuntimeError(f"the prefill engine ended with status {process.returncode}")
    finally:
        process.kill()
        process.wait()


def _serve_pages(args: argparse.Namespace) -> None:
    address, secret = args.serve
    engine = LLMEngine(
        args.model,
        role="prefill",
        prefill_listen=address,
        transfer_secret_file=secret,
        kv_host_bytes=args.host_bytes,
        max_num_batched_tokens=args.chunk,
        max_model_len=args.length + 16,
        max_num_seqs=1,
        num_threads=1,
        skip_tokenizer_init=True,
    )
    assert engine.prefill is not None
    while True:
        select.select([engine.prefill.wake_fd], [], [], 0.05)
        while engine.has_unfinished_requests():
            engine.step()


class _Relay:
    """Passes connections on to a port of this machine, its answers with at most so many bytes a second together."""

    def __init__(self, target: int, bytes_per_s: float) -> None:
        self._target, self._bytes_per_s = target, bytes_per_s
        self._lock, self._free_s = threading.Lock(), 0.0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listening.accept()
            far = socket.create_connection(("127.0.0.1", self._target))
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for pair in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_limited: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                if is_limited:
                    with self._lock:
                        self._free_s = max(self._free_s, time.monotonic()) + len(data) / self._bytes_per_s
                        left_s = self._free_s - time.monotonic()
                    time.sleep(max(0.0, left_s))
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main()
