"""A router changes the role of a server, and what the autoscaler reads and does through a router."""

import asyncio
import json
import urllib.error
import urllib.request

import pytest

pytest.importorskip("uvicorn", reason="needs quire[server]")

from quire.base.errors import ConfigError
from quire.cli.main import main
from quire.router.autoscale import Demand, Drain, Flip, Replica, RoleState, Scale, Snapshot, State
from quire.router.autoscale_router import RouterCluster, read_totals
from quire.router.autoscale_source import SourceError
from quire.router.autoscale_targets import Targets, TargetServer
from tests.unit.router.fake_backend import FakeBackend, backends, respond, routing, run
from tests.unit.router.test_admin_and_owners import KEY


class FlippableBackend(FakeBackend):
    """A server that takes PUT /role, unless `refuses`, and has the counters that a test gives it."""

    def __init__(self, role="decode"):
        super().__init__("m", answer=self.take, load={"role": role})
        self.refuses, self.text, self.pause = False, "", None

    async def take(self, request, writer):
        if request["path"] == "/metrics":
            data = self.text.encode()
            writer.write(b"HTTP/1.1 200 X\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))
            await writer.drain()
        elif request["path"] != "/role":
            await self.say_name(request, writer)
        elif self.refuses:
            await respond(writer, {"error": {"message": "not this one"}}, 400)
        elif self.pause is not None and not self.pause.is_set():
            await self.pause.wait()
            await respond(writer, request["json"])
        else:
            self.load["role"] = request["json"]["role"]
            await respond(writer, request["json"])


def test_router_changes_a_role_but_not_that_of_the_last_server():
    async def work():
        first, second = FlippableBackend(), FlippableBackend()
        async with backends(first, second), routing(first, second) as router:

            async def put(fake, body):
                return await router.client.put(f"/router/backends/{fake.name}/role", json=body, headers=KEY)

            await router.until(lambda: router.backend(first).role == router.backend(second).role == "decode")
            changed = await put(first, {"role": "prefill"})
            assert (changed.status_code, changed.json()["role"], changed.json()["is_draining"]) == (200, "prefill", False)
            for _ in range(4):
                assert (await router.post({"model": "m"})).json()["backend"] == second.name
            last = await put(second, {"role": "prefill"})
            assert (last.status_code, last.json()["error"]["code"]) == (409, "last_backend")
            assert (await put(first, {"role": "some"})).status_code == 400
            second.refuses = True
            refused = await put(second, {"role": "both"})
            assert refused.status_code == 400
            assert "not this one" in refused.text
            assert (await put(first, {"role": "decode"})).json()["role"] == "decode"
            assert (await router.post({"model": "m"})).status_code == 200

    run(work())


def test_drain_during_a_change_stays_and_a_second_change_is_refused():
    async def work():
        first, second = FlippableBackend(), FlippableBackend()
        first.pause = asyncio.Event()
        async with backends(first, second), routing(first, second) as router:
            path = f"/router/backends/{first.name}"

            async def put():
                return await router.client.put(f"{path}/role", json={"role": "prefill"}, headers=KEY)

            await router.until(lambda: router.backend(first).role == router.backend(second).role == "decode")
            change = asyncio.create_task(put())
            await router.until(lambda: router.backend(first).is_changing)
            for _ in range(4):
                assert (await router.post({"model": "m"})).json()["backend"] == second.name
            assert (await put()).json()["error"]["code"] == "role_changing"
            assert (await router.client.post(f"{path}/drain", headers=KEY)).status_code == 200
            first.pause.set()
            assert (await change).json()["is_draining"]
            assert router.backend(first).is_draining

    run(work())


def test_request_to_a_server_that_has_just_changed_goes_to_another_without_a_retry_budget():
    async def refuse(request, writer):
        await respond(writer, {"error": {"code": "wrong_role"}}, 503)

    async def work():
        changed, other = FakeBackend(answer=refuse), FakeBackend()
        async with backends(changed, other), routing(changed, other, retry_ratio=0.0) as router:
            for _ in range(6):
                assert (await router.post({"model": "m"})).json()["backend"] == other.name
            assert await router.metric("retries_denied_total") == 0

    run(work())


def metrics_of(prompts, outputs, within, requests, computed=0, refused=0):
    buckets = "".join(
        f'quire:{name}_bucket{{le="{le}"}} {count}\n'
        for name in ("time_to_first_token_seconds", "request_time_per_output_token_seconds")
        for le, count in (("0.5", within), ("1.5", requests), ("+Inf", requests))
    )
    return f"""
quire:prompt_tokens_total{{engine="0"}} {prompts}
quire:generation_tokens_total{{engine="0"}} {outputs}
quire:request_success_total{{finished_reason="stop"}} {requests}
quire:admission_rejections_total{{reason="overloaded"}} {refused}
quire:admission_rejections_total{{reason="invalid"}} 1000
quire:iteration_tokens_total_sum {computed}
quire:queue_prompt_tokens{{class="a"}} 30
quire:queue_prompt_tokens{{class="b"}} 12
{buckets}"""


def test_demand_of_each_role_is_read_from_the_servers_behind_a_router():
    async def work():
        decode, prefill, spare = FlippableBackend(), FlippableBackend("prefill"), FlippableBackend()
        async with backends(decode, prefill, spare), routing(decode, prefill, spare) as router:
            await router.client.post(f"/router/backends/{spare.name}/drain", headers=KEY)
            await router.until(lambda: router.backend(prefill).role == "prefill" and router.backend(decode).role == "decode")
            cluster = RouterCluster(f"http://127.0.0.1:{router.port}", "admin", tpot_s=1.0)
            decode.text, prefill.text = metrics_of(100, 10, 5, 10), metrics_of(0, 0, 0, 0, computed=500)
            first = await asyncio.to_thread(cluster.read, 10.0)
            assert first.replicas == (Replica(decode.name, "decode"), Replica(prefill.name, "prefill"))
            assert set(first.demand) == {"decode", "prefill"}
            decode.text = metrics_of(300, 210, 11, 20, refused=5)
            prefill.text = metrics_of(0, 0, 0, 0, computed=700)
            found = (await asyncio.to_thread(cluster.read, 20.0)).demand
            # Of ten requests six were below 0.5 s and four below 1.5 s: about eight below 1 s. Five more were refused.
            assert found["decode"] == Demand(20 * 1.5, 20 * 1.5, 1.0, 42, pytest.approx(0.8))
            assert found["prefill"] == Demand(20.0, 0.0, 1.0, 42, pytest.approx(0.8))
            decode.text = metrics_of(30, 0, 0, 0)  # started again
            assert (await asyncio.to_thread(cluster.read, 30.0)).demand["decode"].prompt_tokens_per_s == 30 / 20

            assert not await asyncio.to_thread(cluster.carry_out, Flip(prefill.name, "decode"))
            assert prefill.load["role"] == router.backend(prefill).role == "decode"
            assert not await asyncio.to_thread(cluster.carry_out, Drain((prefill.name,)))
            assert router.backend(prefill).is_draining
            left = await asyncio.to_thread(cluster.carry_out, Scale("decode", 4))
            assert "until there are 4" in left
            assert spare.name in left
            assert not router.backend(spare).is_draining
            with pytest.raises(SourceError, match="404"):
                await asyncio.to_thread(cluster.carry_out, Flip("a:1", "decode"))

    run(work())


def test_metrics_of_vllm_names_are_read_once_where_both_are_there():
    both = metrics_of(7, 0, 0, 0)
    assert read_totals(both + both.replace("quire:", "vllm:")) == read_totals(both)
    assert read_totals(both.replace("quire:", "vllm:")) == read_totals(both)


def test_targets_follow_actions_under_way_and_are_told_to_keda():
    replicas = tuple(Replica(name) for name in "abc")
    targets, server = Targets(), TargetServer("0")
    try:

        def ask(path="/replicas"):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=10) as answer:
                    return answer.status, json.load(answer)
            except urllib.error.HTTPError as error:
                return error.code, None

        assert ask()[0] == 503
        for action, number in ((None, 3), (Scale("serve", 5), 5), (Drain(("a",)), 2)):
            state = State(roles={"serve": RoleState(action=action)})
            targets.note(Snapshot(0.0, replicas, {}), state)
            server.show(targets)
            assert ask() == (200, {"serve": number})
        targets.note(Snapshot(0.0, (), {}), State())
        assert targets.by_role == {"serve": 2}
        assert ask("/")[0] == 404
        server.show_error("no answer")
        assert ask()[0] == 503
    finally:
        server.close()
    with pytest.raises(ConfigError, match=r"\[HOST:\]PORT"):
        TargetServer("http")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--router", "http://x:1", "--prometheus", "http://y:1", "--dry-run"], "one of --prometheus and --router"),
        (["--prometheus", "http://x:1"], "give --dry-run, or --apply"),
        (["--prometheus", "http://x:1", "--apply"], "--apply needs --router"),
        (["--prometheus", "http://x:1", "--serve", "0", "--once"], "--serve goes on"),
        (["--prometheus", "http://x:1", "--dry-run", "--tpot", "1"], "--tpot must be"),
        (["--router", "http://x:1", "--dry-run"], "--admin-key"),
        (["--router", "x:1", "--dry-run", "--admin-key", "k"], "http://host:8080"),
    ],
)
def test_options_of_the_command_that_do_not_fit_are_refused(words, match, capsys, monkeypatch):
    monkeypatch.delenv("QUIRE_ROUTER_ADMIN_KEY", raising=False)
    assert main(["autoscale", *words]) != 0
    assert match in capsys.readouterr().err
