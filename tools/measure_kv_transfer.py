"""Measure what the KV transfer adds to the time to the first token, over a link of limited bandwidth.

    python tools/measure_kv_transfer.py MODEL --length 4000 --link-bits 1e9

A prefill engine (one thread) computes prompts for a decode engine (one thread) of this process, through a relay that passes on
so many bits a second. Then one engine with one thread computes prompts of the same length: an ideal transfer takes no time.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import select
import socket
import statistics
import threading
import time
from collections.abc import Iterator

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
    args = parser.parse_args()
    with _prefill_engine(args) as port:
        relay = _Relay(port, args.link_bits / 8)
        urls = (f"tcp://127.0.0.1:{relay.port}",)
        apart, num_pulled, num_bytes = _first_token_s(args, role="decode", prefill_urls=urls, kv_host_bytes=args.host_bytes)
    alone, _, _ = _first_token_s(args)
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


@contextlib.contextmanager
def _prefill_engine(args: argparse.Namespace) -> Iterator[int]:
    """Yield the port of a prefill engine in a process of its own. Raises RuntimeError if it ends."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=_serve_pages, args=(args, port), daemon=True)
    process.start()
    try:
        while process.is_alive():
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                yield port
                return
            time.sleep(0.1)
        raise RuntimeError(f"the prefill engine ended with status {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _serve_pages(args: argparse.Namespace, port: int) -> None:
    engine = LLMEngine(
        args.model,
        role="prefill",
        prefill_listen=f"tcp://127.0.0.1:{port}",
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
