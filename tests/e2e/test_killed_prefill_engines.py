"""Prefill and decode engines are killed in random states: each request gets the right tokens, and nothing is held."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import time

import pytest

from quire.base.environment import environment_with_quire
from quire.kernels.native import load_native
from tests.ports import free_port
from tests.prefill_kill_rounds import SIZES
from tests.prefill_thread import PrefillThread
from tests.ranks import assert_nothing_new, left_behind
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.engine.test_kv_transfer import check_nothing_is_held, wait_until

NUM_ROUNDS = int(os.environ.get("QUIRE_PREFILL_KILL_ROUNDS", "12"))
"""Of each transport; a round takes about a second. 500 for a long run."""
NUM_DECODE_ROUNDS = 2
ROUND_S = 25.0
"""Within which a round ends on a machine that others use, too: a request waits for a silent engine for 2 seconds."""


@pytest.mark.slow
@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
@pytest.mark.parametrize("transport", ["unix", "tcp", "nixl"])
def test_killed_prefill_engines_lose_no_request_and_leave_nothing(tmp_path, transport):
    address = f"unix:{tmp_path}/pages" if transport == "unix" else f"tcp://127.0.0.1:{free_port()}"
    if transport == "nixl":
        pytest.importorskip("nixl", reason="the package nixl is not installed")
    before = left_behind("/dev/shm")
    done = subprocess.run(
        [sys.executable, "-m", "tests.prefill_kill_rounds", "1000", str(NUM_ROUNDS), address],
        env={**environment_with_quire(), "OMP_NUM_THREADS": "1", **({"QUIRE_KILL_NIXL": "1"} if transport == "nixl" else {})},
        capture_output=True,
        text=True,
        timeout=120 + ROUND_S * NUM_ROUNDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rounds) == NUM_ROUNDS
    assert [one for one in rounds if one["problems"]] == []
    assert max(one["took_s"] for one in rounds) < ROUND_S
    outcomes = sum((collections.Counter(one["outcomes"]) for one in rounds), collections.Counter())
    assert outcomes["lost"] >= NUM_ROUNDS // 2
    assert outcomes["complete"] > 0
    assert {one["signal"] for one in rounds} == {"SIGKILL", "SIGSTOP"}
    assert sum(one["pages"] > 0 and "lost" in one["outcomes"] for one in rounds) >= NUM_ROUNDS // 4  # between two pages
    assert_nothing_new(before, "/dev/shm")


DECODE = """
import sys
from quire import LLM, SamplingParams
from tests.prefill_kill_rounds import NUM_BLOCKS, SIZES
with_peer = {"role": "decode", "prefill_urls": (sys.argv[2],), "prefill_min_tokens": 32}
llm = LLM(sys.argv[1], num_kv_blocks=NUM_BLOCKS, **with_peer, **SIZES)
params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
for number in range(200):
    prompts = [{"prompt_token_ids": [(number * 7 + index) % 300, *range(200)]} for index in range(3)]
    llm.generate(prompts, params, use_tqdm=False)
"""


@pytest.mark.slow
@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_prefill_engine_frees_all_that_a_killed_decode_engine_had(tmp_path, transport):
    model = str(write_checkpoint(tmp_path / "model", "qwen3"))
    address = f"unix:{tmp_path}/pages" if transport == "unix" else "tcp://127.0.0.1:0"
    options = {"prefill_listen": address, "max_num_batched_tokens": 16, "num_kv_blocks": 64, **SIZES}
    with PrefillThread(model=model, **options) as peer:
        service, step = peer.engine.prefill, peer.engine.step
        peer.engine.step = lambda: (time.sleep(0.01), step())
        for number in range(NUM_DECODE_ROUNDS):
            command = [sys.executable, "-c", DECODE, model, peer.address]
            process = subprocess.Popen(command, env={**environment_with_quire(), "OMP_NUM_THREADS": "1"})
            before = service.num_lent_pages
            assert wait_until(lambda seen=before + 10 * number: service.num_lent_pages > seen and service.num_lendings > 0, 60)
            assert process.poll() is None
            process.kill()
            process.wait()
            assert wait_until(lambda: not service.num_lendings and not peer.engine.has_unfinished_requests(), 30)
            assert wait_until(lambda: service.server.num_connections == 0, 30)
            assert service.tier_stats().num_pages == 0
            check_nothing_is_held(peer.engine)
        assert service.tier_stats().outcomes["aborted"] >= NUM_DECODE_ROUNDS
