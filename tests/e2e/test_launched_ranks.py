"""Ranks that a launcher starts: torchrun, a LeaderWorkerSet, on one host and on two; what they say where something is wrong."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from quire.base.environment import environment_with_quire
from quire.kernels.native import load_native
from tests.ports import free_port
from tests.ranks import assert_nothing_new, left_behind

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(load_native() is None, reason="the native kernels are not built"),
    pytest.mark.usefixtures("temporary_folder"),
]

PROMPT = "It was a cold morning when"
GENERATE = ("-m", "quire", "generate", PROMPT, "--max-tokens", "12", "--temperature", "0", "--num-threads", "1")
TIMEOUT_S = 240
LEADER_ADDRESS, WORKER_ADDRESS = "10.77.41.1", "10.77.41.2"


def _torchrun(rank, size, port, address="127.0.0.1"):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def _lws(rank, size, port, address="127.0.0.1"):
    return {
        "LWS_WORKER_INDEX": str(rank),
        "LWS_GROUP_SIZE": str(size),
        "LWS_LEADER_ADDRESS": address,
        "MASTER_PORT": str(port),
    }


def _start(environment, *arguments, prefix=()):
    command = (*prefix, sys.executable, *arguments)
    return subprocess.Popen(
        command, env={**environment_with_quire(), **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _end(processes):
    """Return (status, output, errors) of each; none is left."""
    try:
        found = [process.communicate(timeout=TIMEOUT_S) for process in processes]
        return [(process.returncode, *texts) for process, texts in zip(processes, found, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@functools.cache
def _expected():
    ((status, text, errors),) = _end([_start({}, *GENERATE)])
    assert status == 0, errors
    assert text.startswith(PROMPT)
    return text


@pytest.mark.parametrize(
    ("launcher", "layout"),
    [(_lws, "-tp 2"), (_torchrun, "-pp 2"), (_torchrun, "-tp 2 -pp 2 --kv-host-bytes 9000000")],
)
def test_ranks_of_one_host_give_the_tokens_of_one_process(launcher, layout):
    before, port, size = left_behind(), free_port(), 2 ** layout.count("2")
    leader, *workers = _end([_start(launcher(rank, size, port), *GENERATE, *layout.split()) for rank in range(size)])
    assert [leader[0], *(worker[0] for worker in workers)] == [0] * size, leader[2] + workers[-1][2]
    assert leader[1] == _expected()
    assert {worker[1] for worker in workers} == {""}
    assert_nothing_new(before)


def test_torchrun_itself_starts_a_script_with_an_llm(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from quire import LLM, SamplingParams\n"
        "llm = LLM('demo', tensor_parallel_size=2, num_threads=1, num_kv_blocks=64, max_num_seqs=2)\n"
        f"outputs = llm.generate([{PROMPT!r}], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)\n"
        "print(outputs[0].prompt + outputs[0].outputs[0].text, flush=True)\n"
        "assert [rank.state for rank in llm.llm_engine.stats.ranks] == ['ready', 'ready']\n"
        "llm.close()\n"
    )
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script))
    ((status, text, errors),) = _end([_start({}, *launch)])
    assert status == 0, errors
    assert text.strip() == _expected().strip()


def test_ranks_that_are_told_other_options_are_named_with_both():
    port = free_port()
    ranks = [_start(_torchrun(0, 2, port), *GENERATE, "-tp", "2")]
    ranks += [_start(_torchrun(1, 2, port), *GENERATE, "-tp", "2", "--quantization", "int8")]
    leader, worker = _end(ranks)
    assert leader[0] != 0
    assert worker[0] != 0
    assert "rank 1 has option quantization 'int8', rank 0 None" in leader[2]


def test_ranks_end_with_the_reason_of_a_leader_that_refuses_an_option():
    port = free_port()
    leader, worker = _end([_start(_lws(rank, 2, port), *GENERATE, "-tp", "2", "--max-model-len", "99999") for rank in (0, 1)])
    assert leader[0] != 0
    assert worker[0] != 0
    assert "max_model_len is 99999" in leader[2]
    assert "cannot begin: max_model_len is 99999" in worker[2]


def test_another_number_of_processes_than_ranks_is_refused():
    ((status, _, errors),) = _end([_start(_torchrun(0, 3, free_port()), *GENERATE, "-tp", "2")])
    assert status != 0
    assert "torchrun has started 3 processes, but tensor_parallel_size asks for 2 ranks" in errors


@pytest.mark.parametrize(("layout", "victim"), [("-tp", 0), ("-pp", 1)])
def test_a_worker_that_is_killed_ends_the_leader_and_a_leader_its_workers(layout, victim):
    port = free_port()
    long = [*GENERATE[:4], "--max-tokens", "900", "--temperature", "0", "--num-threads", "1", "--no-echo", layout, "2"]
    ranks = [_start(_torchrun(rank, 2, port), *long) for rank in (0, 1)]
    assert ranks[0].stdout.read(8)  # it computes
    os.kill(ranks[victim].pid, signal.SIGKILL)
    ranks[1 - victim].wait(timeout=30)
    results = _end(ranks)
    assert results[1 - victim][0] not in (0, None)
    if victim == 1:
        assert f"rank 1 (pid {ranks[1].pid}" in results[0][2]


@pytest.fixture
def two_hosts():
    """Two network namespaces with an address each; returns the words before a command that runs in each."""
    names, made = [f"quire{os.getpid()}{letter}" for letter in "ab"], []

    def ip(*words):
        try:
            return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("needs the command ip")

    try:
        for name in names:
            done = ip("netns", "add", name)
            if done.returncode != 0:
                pytest.skip(f"network namespaces are not permitted here: {done.stderr.strip()}")
            made.append(name)
        ends = [f"q{os.getpid() % 10**6}{letter}" for letter in "ab"]
        done = ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        if done.returncode != 0:
            pytest.skip(f"virtual links are not permitted here: {done.stderr.strip()}")
        for name, end, address in zip(names, ends, (LEADER_ADDRESS, WORKER_ADDRESS), strict=True):
            for words in (
                ("addr", "add", f"{address}/24", "dev", end),
                ("link", "set", end, "up"),
                ("link", "set", "lo", "up"),
            ):
                assert ip("-n", name, *words).returncode == 0
        yield [("ip", "netns", "exec", name) for name in names]
    finally:
        for name in made:
            ip("netns", "del", name)


@pytest.mark.parametrize("layout", ["-tp", "-pp"])
def test_ranks_of_two_hosts_give_the_tokens_of_one_process(two_hosts, layout):
    port = free_port()
    ranks = [
        _start(_lws(rank, 2, port, LEADER_ADDRESS) | {"LOCAL_RANK": "0"}, *GENERATE, layout, "2", prefix=two_hosts[rank])
        for rank in (0, 1)
    ]
    leader, worker = _end(ranks)
    assert (leader[0], worker[0]) == (0, 0), leader[2] + worker[2]
    assert leader[1] == _expected()
    assert "the ranks are on several hosts" in leader[2]


@pytest.mark.parametrize("local_size", [2, 1])
def test_stages_of_two_ranks_need_each_stage_on_one_host(two_hosts, local_size):
    """local_size: ranks that follow each other on a host."""
    port = free_port()
    hosts = [rank // local_size % 2 for rank in range(4)]
    ranks = [
        _start(
            _torchrun(rank, 4, port, LEADER_ADDRESS) | {"LOCAL_RANK": str(hosts[:rank].count(hosts[rank]))},
            *(*GENERATE, "-tp", "2", "-pp", "2"),
            prefix=two_hosts[hosts[rank]],
        )
        for rank in range(4)
    ]
    leader, *workers = _end(ranks)
    if local_size == 2:
        assert [leader[0], *(worker[0] for worker in workers)] == [0] * 4, leader[2] + workers[-1][2]
        assert leader[1] == _expected()
    else:
        assert leader[0] != 0
        assert "rank 1 is on another host than rank 0, but both are of pipeline stage 0" in leader[2]


STAGES = """
import sys
from dataclasses import replace
from quire import LLM, SamplingParams
DRAFTS = {"method": ["eagle3", "medusa"], "model": {"eagle3": "demo-eagle3", "medusa": "demo-medusa"}}
DRAFTS |= {"adaptive": False, "num_speculative_tokens": 4}
options = {"max_num_seqs": 4, "num_kv_blocks": 64, "num_threads": 1, "kv_host_bytes": 16 << 20}
if int(sys.argv[1]) > 1:
    options["speculative_config"] = DRAFTS
llm = LLM("demo", pipeline_parallel_size=int(sys.argv[1]), **options)
prompts = ["It was a cold morning when", "A", "Once upon a time there was", "The cat and the dog"]
for turn in range(2):
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=12, prompt_logprobs=1, logprobs=1)
    for output in llm.generate(prompts, params, use_tqdm=False):
        print(output.prompt_logprobs, output.outputs[0].token_ids, output.outputs[0].logprobs)
    (output,) = llm.generate(prompts[0] * 10, replace(params, prompt_logprobs=None), use_tqdm=False)
    print(output.outputs[0].token_ids)
    assert (output.metrics.num_cached_tokens > 0) == (turn > 0), "from the host tier, as sleeping empties the prefix cache"
    llm.sleep(1)
    llm.wake_up()
print([len(one.outputs.embedding) for one in llm.embed(prompts, use_tqdm=False)])
llm.close()
"""


def test_stages_of_two_hosts_give_the_log_probabilities_of_one_process(two_hosts, tmp_path):
    script, port, size = tmp_path / "script.py", free_port(), 3
    script.write_text(STAGES)
    ((status, expected, errors),) = _end([_start({}, str(script), "1")])
    assert status == 0, errors
    ranks = [
        _start(
            _torchrun(rank, size, port, LEADER_ADDRESS) | {"LOCAL_RANK": str(max(0, rank - 1))},
            *(str(script), str(size)),
            prefix=two_hosts[min(rank, 1)],
        )
        for rank in range(size)
    ]
    leader, *workers = _end(ranks)
    assert [leader[0], *(worker[0] for worker in workers)] == [0] * size, leader[2] + workers[0][2]
    assert leader[1] == expected


def test_a_worker_of_another_host_serves_health_and_names_rank_0_for_the_rest(two_hosts):
    pytest.importorskip("uvicorn", reason="needs quire[server]")
    port, http = free_port(), free_port()
    serve = ("-m", "quire", "serve", "demo", "--port", str(http), "-tp", "2", "--num-threads", "1", "--num-kv-blocks", "64")
    ranks = [
        _start(_torchrun(rank, 2, port, LEADER_ADDRESS) | {"LOCAL_RANK": "0"}, *serve, prefix=two_hosts[rank])
        for rank in (0, 1)
    ]

    def get(host, path):
        ask = (
            "import sys, urllib.error, urllib.request\n"
            "try: print(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())\n"
            "except urllib.error.HTTPError as error: print(error.code, error.read().decode())\n"
            "except urllib.error.URLError as error: print(error)\n"
        )
        command = (*two_hosts[host], sys.executable, "-c", ask, f"http://127.0.0.1:{http}{path}")
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        end_s = time.monotonic() + TIMEOUT_S
        while '"ready"' not in get(0, "/ready"):
            assert all(rank.poll() is None for rank in ranks)
            assert time.monotonic() < end_s
            time.sleep(0.3)
        assert json.loads(get(1, "/health")) == {"status": "ok", "rank": 1, "world_size": 2}
        assert get(1, "/v1/models").startswith("404 ")
        assert "requests go to rank 0" in get(1, "/v1/models")
    finally:
        for rank in reversed(ranks):
            rank.kill()
        _end(ranks)


ENDED = """
import time
from quire import LLM, SamplingParams
sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
llm = LLM("demo", **sizes, num_threads=1, num_kv_blocks=64, distributed_timeout_s=3)
print("ready", flush=True)
try:
    while True:
        llm.generate("A", SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
except Exception as error:
    print(time.monotonic(), error, flush=True)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stage_of_another_host_that_is_killed_or_stopped_is_named_in_time(two_hosts, tmp_path, sent):
    script, port = tmp_path / "script.py", free_port()
    script.write_text(ENDED)
    environments = [_torchrun(rank, 4, port, LEADER_ADDRESS) | {"LOCAL_RANK": str(rank % 2)} for rank in range(4)]
    ranks = [_start(each, str(script), prefix=two_hosts[rank // 2]) for rank, each in enumerate(environments)]
    assert ranks[0].stdout.readline() == "ready\n"
    time.sleep(0.3)
    at = time.monotonic()
    os.kill(ranks[3].pid, sent)  # the second process of the stage
    told_at, _, text = ranks[0].stdout.readline().partition(" ")
    for rank in reversed(ranks):
        rank.kill()
    results = _end(ranks)
    if sent is signal.SIGKILL:
        assert text.startswith("pipeline stage 1 (layers "), results[0][2]
        assert f"rank 3 (pid {ranks[3].pid} on " in text
    else:
        assert text.startswith("pipeline stage 1 (layers 4 to 7), tensor-parallel rank 0: no answer for 3 s"), results[0][2]
    assert float(told_at) - at < 30.0


def test_a_worker_of_another_host_that_is_killed_ends_the_leader(two_hosts):
    port = free_port()
    long = [*GENERATE[:4], "--max-tokens", "900", "--temperature", "0", "--num-threads", "1", "--no-echo", "-tp", "2"]
    ranks = [
        _start(_torchrun(rank, 2, port, LEADER_ADDRESS) | {"LOCAL_RANK": "0"}, *long, prefix=two_hosts[rank]) for rank in (0, 1)
    ]
    assert ranks[0].stdout.read(8)
    os.kill(ranks[1].pid, signal.SIGKILL)  # ip netns exec becomes the command
    ranks[0].wait(timeout=30)
    results = _end(ranks)
    assert results[0][0] != 0
    assert "rank 1" in results[0][2]


def test_a_server_that_torchrun_has_started_serves_and_ends_with_its_worker():
    pytest.importorskip("uvicorn", reason="needs quire[server]")
    import httpx

    port, http = free_port(), free_port()
    serve = ("-m", "quire", "serve", "demo", "--port", str(http), "-tp", "2", "--num-threads", "1", "--num-kv-blocks", "64")
    ranks = [_start(_torchrun(rank, 2, port), *serve) for rank in (0, 1)]

    def get(path, is_enough):
        end_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                response = httpx.get(f"http://127.0.0.1:{http}{path}", timeout=60)
                if is_enough(response):
                    return
                last = response.text
            except httpx.TransportError as error:  # it does not listen yet
                last = repr(error)
            assert all(rank.poll() is None for rank in ranks), last
            assert time.monotonic() < end_s, last
            time.sleep(0.3)

    try:
        get("/ready", lambda response: response.status_code == 200)
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{http}/v1/completions", json=body, timeout=TIMEOUT_S).json()
        assert "choices" in answer, answer
        assert PROMPT + answer["choices"][0]["text"] == _expected().strip("\n")
        get("/metrics", lambda response: 'rank="1"' in response.text and "quire:rank_barrier_waits_total" in response.text)
        os.kill(ranks[1].pid, signal.SIGKILL)
        assert ranks[0].wait(timeout=60) != 0  # the launcher starts both again
    except BaseException:
        for rank in ranks:
            rank.kill()  # otherwise they serve on while _end waits
        raise
    finally:
        results = _end(ranks)
    assert f"rank 1 (pid {ranks[1].pid}" in results[0][2]
