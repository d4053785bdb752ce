"""The router finds prefill servers by their role: they get no requests, and the decode servers are told where they listen."""

import pytest

pytest.importorskip("uvicorn", reason="needs quire[server]")

from quire.router.config import parse_backend
from quire.router.prefill_servers import is_reachable, reachable_url
from tests.unit.router.fake_backend import FakeBackend, backends, respond, routing, run

KEY = {"authorization": "Bearer admin"}


def prefill(port, *models):
    return FakeBackend(*models, load={"role": "prefill", "prefill_listen": f"tcp://0.0.0.0:{port}"})


class Decode(FakeBackend):
    """Takes prefill servers as `quire serve --role decode` does."""

    def __init__(self, *models):
        super().__init__(*models, answer=self.take, load={"role": "decode", "prefill_urls": []})

    async def take(self, request, writer):
        if (request["method"], request["path"]) != ("PUT", "/prefill_urls"):
            return await self.say_name(request, writer)
        self.load["prefill_urls"] = request["json"]["urls"]
        return await respond(writer, request["json"])

    @property
    def urls(self):
        return self.load["prefill_urls"]


def test_decode_servers_are_told_the_prefill_servers_that_are_added_drained_and_removed():
    async def work():
        first, second, other = prefill(7001), prefill(7002), prefill(7003, "n")
        decode, fixed = Decode(), FakeBackend(load={"role": "decode"})
        async with backends(first, second, other, decode, fixed), routing(first, other, decode, fixed) as router:
            client = router.client
            await router.until(lambda: decode.urls == ["tcp://127.0.0.1:7001"])  # and not that of another model
            assert (await client.get("/health")).json()["num_backends_ready"] == 2
            await client.post("/router/backends", json={"url": second.url}, headers=KEY)
            await router.until(lambda: decode.urls == ["tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002"])
            decode.load["prefill_urls"] = []  # it was started again
            await router.until(lambda: len(decode.urls) == 2)
            await client.post(f"/router/backends/{first.name}/drain", headers=KEY)
            await router.until(lambda: decode.urls == ["tcp://127.0.0.1:7002"])
            await client.delete(f"/router/backends/{second.name}", headers=KEY)
            await router.until(lambda: decode.urls == [])
            await client.post(f"/router/backends/{first.name}/resume", headers=KEY)
            await router.until(lambda: len(decode.urls) == 1)
            await first.stop()
            await router.until(lambda: decode.urls == [])
            assert all(one["method"] == "PUT" for one in decode.requests)
            assert not fixed.requests

    run(work())


def test_prefill_servers_get_no_requests():
    async def work():
        apart, decode = prefill(7001), Decode()
        async with backends(apart, decode), routing(apart, decode) as router:
            for _ in range(4):
                assert (await router.post({"model": "m", "prompt": "x"})).json()["backend"] == decode.name
            assert (await router.post({"prompt": "x"})).json()["backend"] == decode.name
            await router.client.delete(f"/router/backends/{decode.name}", headers=KEY)
            answer = await router.post({"model": "m", "prompt": "x"})
            assert answer.status_code == 503
            assert "only prefill servers have 'm'" in answer.json()["error"]["message"]
            assert (await router.client.get("/v1/models")).json()["data"] == []
            assert not apart.requests

    run(work())


def test_a_decode_server_that_refuses_is_told_again_and_serves():
    async def work():
        apart, decode = prefill(7001), Decode()
        decode.answer = lambda request, writer: respond(writer, {"error": "an admin key is needed"}, 403)
        async with backends(apart, decode), routing(apart, decode) as router:
            await router.until(lambda: len(decode.requests) >= 2)
            decode.answer = decode.take
            await router.until(lambda: decode.urls == ["tcp://127.0.0.1:7001"])
            assert (await router.post({"model": "m", "prompt": "x"})).status_code == 200

    run(work())


def test_addresses_of_every_interface_stand_for_the_host_of_the_server():
    address = parse_backend("http://gpu1:8001")
    assert reachable_url("tcp://0.0.0.0:7000", address) == "tcp://gpu1:7000"
    assert reachable_url("tcp://[::]:7000", parse_backend("http://[fd00::1]:80")) == "tcp://[fd00::1]:7000"
    assert reachable_url("tcp://10.0.0.2:7000", address) == "tcp://10.0.0.2:7000"
    assert reachable_url("unix:/run/pages", address) == "unix:/run/pages"
    assert reachable_url(None, address) is None


@pytest.mark.parametrize(
    ("url", "server", "other", "expected"),
    [
        ("unix:/run/pages", "http://a:1", "http://a:2", True),
        ("unix:/run/pages", "http://localhost:1", "http://127.0.0.1:2", True),
        ("unix:/run/pages", "http://a:1", "http://b:2", False),
        ("tcp://127.0.0.1:7", "http://a:1", "http://b:2", False),
        ("tcp://10.0.0.2:7", "http://a:1", "http://b:2", True),
    ],
)
def test_addresses_of_one_machine_are_told_to_its_servers_only(url, server, other, expected):
    assert is_reachable(url, parse_backend(server), parse_backend(other)) == expected


def test_files_and_conversations_of_all_keys_are_kept_by_servers_that_answer():
    async def work():
        first, decode = prefill(7001), Decode()
        async with backends(first, decode), routing(first, decode) as router:
            await router.until(lambda: decode.urls == ["tcp://127.0.0.1:7001"])
            for number in range(12):
                key = {"authorization": f"Bearer k{number}"}
                await router.client.get("/v1/files", headers=key)
                await router.client.post("/v1/conversations", json={}, headers=key)
            paths = {request["path"] for request in first.requests}
            assert not paths & {"/v1/files", "/v1/conversations"}

    run(work())
