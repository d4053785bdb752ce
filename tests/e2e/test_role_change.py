"""Running servers change between prefill and decode under load: no request fails, and no token is another."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

pytest.importorskip("uvicorn", reason="needs quire[server]")

from quire.router.autoscale import Flip
from quire.router.autoscale_router import RouterCluster
from tests.e2e.router_process import RouterProcess
from tests.e2e.server_process import serving
from tests.e2e.test_prefill_decode import ask

pytestmark = pytest.mark.slow

NAMES = [f"{number}." for number in range(6)]
MAX_FLIP_S = 60.0
KEY = {"authorization": "Bearer admin"}


def test_roles_change_under_load_without_a_failed_request_or_another_token(tmp_path):
    common = ("--num-threads", "1", "--prefill-min-tokens", "64", "--transfer-secret-file", str(tmp_path / "secret"))
    with serving("--num-threads", "1") as alone:
        expected = {name: ask(alone, name)[0] for name in NAMES}
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(serving("--role", role, "--prefill-listen", f"unix:{tmp_path}/pages{number}", *common))
            for number, role in enumerate(("decode", "both", "prefill"))
        ]
        router = RouterProcess(*servers, options=("--admin-key", "admin", "--retry-ratio", "0"))
        stack.callback(router.kill)
        router.wait_for(lambda: router.num_ready() == 2)
        cluster = RouterCluster(router.url, "admin", ttft_s=30.0)
        names = [server.url.removeprefix("http://") for server in servers]
        is_over, answered = threading.Event(), []

        def send(first):
            number = first
            while not is_over.is_set():
                name = NAMES[number % len(NAMES)]
                answered.append(ask(router, name)[0] == expected[name])  # another status than 200 raises
                number += 1

        def flip(index, role):
            begun_s, num_answered = time.monotonic(), len(answered)
            if role == "both":
                httpx.put(
                    f"{router.url}/router/backends/{names[index]}/role", json={"role": role}, headers=KEY
                ).raise_for_status()
            else:
                assert cluster.carry_out(Flip(names[index], role)) == ""
            assert servers[index].get("/load").json()["role"] == role
            assert time.monotonic() - begun_s < MAX_FLIP_S
            router.wait_for(lambda: len(answered) >= num_answered + 6)

        cluster.read(time.monotonic())
        with ThreadPoolExecutor(3) as pool:
            running = [pool.submit(send, first) for first in range(3)]
            try:
                router.wait_for(lambda: len(answered) >= 6 or any(one.done() for one in running))
                for index, role in ((1, "prefill"), (2, "decode"), (0, "prefill"), (1, "decode"), (0, "both")):
                    flip(index, role)
                demand = cluster.read(time.monotonic()).demand
                # The server alone knows: it is asked directly, and the router has not learned of the change.
                assert servers[1].put("/role", {"role": "prefill"}).status_code == 200
                num_answered = len(answered)
                router.wait_for(lambda: len(answered) >= num_answered + 6)
            finally:
                is_over.set()
            for one in running:
                one.result()
        assert all(answered)
        assert demand["serve"].prompt_tokens_per_s + demand["decode"].prompt_tokens_per_s > 0
        assert demand["decode"].attainment is None
        pid = servers[1].engine_pid()
        servers[1].kill_engine()
        servers[1].wait_for(lambda: servers[1].engine_pid() not in (None, pid) and servers[1].is_ready())
        assert servers[1].get("/load").json()["role"] == "prefill"
