"""Kills prefill engines again and again: `python -m tests.prefill_kill_rounds SEED NUM_ROUNDS ADDRESS`.

It writes one line of JSON for each round. One decode engine lives through all rounds. Each round has a new prefill engine on
the same address, which is killed or stopped in a random state, while prompts are transferred from it. Prefill engines are
forked by a fork server, a process that has loaded everything but no model, so that a round takes a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from quire import LLM, SamplingParams
from quire.engine import remote_prefill
from quire.transfer import page_client
from tests.prefill_thread import PrefillThread
from tests.tiny_checkpoint import write_checkpoint

SIZES = {"num_threads": 1, "max_model_len": 256, "skip_tokenizer_init": True, "max_num_seqs": 4, "kv_host_bytes": 1 << 20}
NUM_BLOCKS = 48
"""Of the decode engine: of three prompts with their outputs, and no more."""
NUM_PAGES = 13
ROUND_S = 25.0
"""A round that takes longer hangs. A request waits for a silent peer for 2 seconds; the machine may be busy."""


def _prefill(model: str, address: str, seed: int, told: int) -> None:
    """Be a prefill engine until killed; tell when it listens. Steps take up to 20 ms, so that kills meet them."""
    choose = random.Random(seed)
    with PrefillThread(
        model=model, prefill_listen=address, max_num_batched_tokens=16, num_kv_blocks=64, **SIZES, **backend_of()
    ) as peer:
        step = peer.engine.step

        def slow_step() -> object:
            time.sleep(choose.random() * 0.02)
            return step()

        peer.engine.step = slow_step
        os.write(told, b"r")
        time.sleep(600)


class ForkServer:
    """A process that forks prefill engines: a line "SEED" starts one, whose process id it answers."""

    def __init__(self, model: str, address: str) -> None:
        self._ask, answer = os.pipe(), os.pipe()
        self.ready, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(self._ask[1])
            with contextlib.suppress(BaseException):
                self._serve(model, address, self._ask[0], answer[1], told)
            os._exit(0)
        self.pid, self._answer = pid, answer[0]
        for fd in (self._ask[0], answer[1], told):
            os.close(fd)

    def start(self, seed: int) -> int:
        """Start a prefill engine and return its process id; a byte in `ready` says that it listens."""
        os.write(self._ask[1], f"{seed}\n".encode())
        return int(os.read(self._answer, 32))

    def close(self) -> None:
        """End the process."""
        os.close(self._ask[1])
        os.waitpid(self.pid, 0)

    def _serve(self, model: str, address: str, ask: int, answer: int, told: int) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that are killed
        while seed := os.read(ask, 32):
            pid = os.fork()
            if pid == 0:
                os.close(ask)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                try:
                    _prefill(model, address, int(seed), told)
                finally:
                    os._exit(70)
            os.write(answer, str(pid).encode())


def backend_of() -> dict[str, str]:
    """Return the option for pages by NIXL, if the environment asks for it; UCX then uses the loopback device only."""
    if "QUIRE_KILL_NIXL" not in os.environ:
        return {}
    os.environ.update(UCX_TLS="tcp,self", UCX_NET_DEVICES="lo", UCX_LOG_LEVEL="fatal", NIXL_LOG_LEVEL="FATAL")
    return {"kv_transfer_backend": "nixl"}


class Rounds:
    """The decode engine, one that computes all itself, and what is held between rounds."""

    def __init__(self, model: str, address: str) -> None:
        page_client._FIRST_PAUSE_S = page_client._MAX_PAUSE_S = 0.01  # each round is to transfer again
        remote_prefill._MAX_SLOWDOWN = 1e9
        self._fork_server = ForkServer(model, address)
        options = {"model": model, "num_kv_blocks": NUM_BLOCKS, **SIZES}
        self._cold = LLM(**{**options, "kv_host_bytes": None, "enable_prefix_caching": False})
        self._decode = LLM(**options, role="decode", prefill_urls=(address,), prefill_min_tokens=32, **backend_of()).llm_engine
        self._num_threads = threading.active_count()
        self._num_fds = _num_fds()

    def play(self, seed: int) -> dict[str, object]:
        """Play one round; return what was killed, when, and what went wrong."""
        choose, began_s = random.Random(seed), time.monotonic()
        before = dict(self._decode.stats.tiers[-1].outcomes)
        pid = self._fork_server.start(seed)
        sent = choose.choice((signal.SIGKILL,) * 7 + (signal.SIGSTOP,))
        if choose.random() < 0.9:  # else it is killed while it loads
            assert select.select([self._fork_server.ready], [], [], 60)[0], "the prefill engine does not start"
            os.read(self._fork_server.ready, 1)
        num_prompts, when = choose.randint(1, 3), choose.randint(0, 3 * NUM_PAGES)
        prompts = [[choose.randrange(300) for _ in range(16 * NUM_PAGES + choose.randrange(1, 16))] for _ in range(num_prompts)]
        params = [
            SamplingParams(temperature=choose.choice((0.0, 0.9)), seed=seed, max_tokens=6, ignore_eos=True, detokenize=False)
            for _ in prompts
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        expected = [list(output.outputs[0].token_ids) for output in self._cold.generate(inputs, params, use_tqdm=False)]
        found, at = self._run(inputs, params, lambda pages: pages >= when, lambda: os.kill(pid, sent))
        problems = [] if found == expected else [f"found {found}, expected {expected}"]
        if sent == signal.SIGSTOP:
            os.kill(pid, signal.SIGKILL)
        while select.select([self._fork_server.ready], [], [], 0)[0]:
            os.read(self._fork_server.ready, 1)
        problems += self._find_leaks()
        took_s = time.monotonic() - began_s
        after = self._decode.stats.tiers[-1].outcomes
        outcomes = {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
        return {"seed": seed, "signal": sent.name, "pages": at, "outcomes": outcomes, "took_s": took_s, "problems": problems}

    def _run(self, inputs, params, is_time, kill) -> tuple[list[list[int]], int]:
        """Return the tokens of each prompt, and the number of pages that had come when `kill` was called."""
        engine, remote, at = self._decode, self._decode.remote_prefill, None
        names = [str(number) for number in range(len(inputs))]
        for name, prompt, one in zip(names, inputs, params, strict=True):
            engine.add_request(name, prompt, one)
        pulls = list(remote.pulls.values())
        deadline_s, tokens = time.monotonic() + ROUND_S, {}
        while engine.has_unfinished_requests() and time.monotonic() < deadline_s:
            if at is None and (is_time(pages := sum(pull.num_done for pull in pulls)) or all(pull.is_over for pull in pulls)):
                at = pages
                kill()
            for output in engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        if at is None:
            at = sum(pull.num_done for pull in pulls)
            kill()
        return [tokens.get(name, []) for name in names], at

    def _find_leaks(self) -> list[str]:
        """Return what the decode engine still holds, after it had the time to let go of connections."""
        engine = self._decode
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:
            engine.remote_prefill.take_ready(time.monotonic())
            found = self._held()
            if not found:
                return []
            time.sleep(0.05)
        return found

    def _held(self) -> list[str]:
        engine, tier = self._decode, self._decode.scheduler.kv.host_tier
        pool = engine.scheduler.kv.pool
        counts = {
            "unfinished requests": engine.num_unfinished_requests(),
            "pinned slots": tier.num_pinned,
            "used blocks": pool.num_blocks - pool.num_free,
            "transfers": engine.remote_prefill.num_under_way,
            "mapped slots": _num_mapped(),
            "threads": threading.active_count() - self._num_threads - 1,  # one watches connections
            "file descriptors": _num_fds() - self._num_fds - bool(backend_of()),  # NIXL opens one with the first peer
        }
        problem = tier.find_problem()
        return [f"{count} {name}" for name, count in counts.items() if count > 0] + ([] if problem is None else [problem])

    def close(self) -> None:
        """End the engines."""
        self._decode.close()
        self._cold.close()
        self._fork_server.close()


def _num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def _num_mapped() -> int:
    """Return how many mappings of other engines' slots this process has; its own are anonymous."""
    return Path("/proc/self/maps").read_text().count("memfd:quire-kv-slots")


def main(seed: int, num_rounds: int, address: str) -> None:
    """Play rounds."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_checkpoint(Path(folder) / "model", "qwen3"))
        rounds = Rounds(model, address)
        for number in range(seed, seed + num_rounds):
            print(json.dumps(rounds.play(number)), flush=True)
        rounds.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
