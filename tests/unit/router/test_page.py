"""The router serves the page, marked as a router's, and passes on what the page asks of a model."""

import pytest

pytest.importorskip("uvicorn", reason="needs quire[server]")

from quire.serving.page.static_files import POLICY
from tests.unit.router.fake_backend import FakeBackend, backends, respond, routing, run


def test_page_is_served_with_its_policy_and_tag():
    async def work():
        async with backends(FakeBackend()) as (fake,), routing(fake) as router:
            page = await router.client.get("/")
            assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
            assert page.headers["content-security-policy"] == POLICY
            assert '<html lang="en" data-site="router">' in page.text
            again = await router.client.get("/", headers={"if-none-match": page.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            script = await router.client.get("/ui/router.mjs")
            assert script.headers["content-type"].startswith("text/javascript")
            assert (await router.client.get("/ui/nothing.mjs")).status_code == 404
            assert (await router.client.get("/ui/events")).status_code == 404
            assert fake.requests == []

    run(work())


def test_model_of_the_page_comes_from_a_backend_that_serves_it():
    async def answer(request, writer):
        await respond(writer, {"path": request["path"], "key": request["headers"].get("authorization")})

    async def work():
        first, second = FakeBackend("m", answer=answer), FakeBackend("n", answer=answer)
        async with backends(first, second), routing(first, second, aliases={"fast": "n"}) as router:
            for name in ("n", "fast"):
                path = f"/ui/model?model={name}"
                found = await router.client.get(path, headers={"authorization": "Bearer k"})
                assert found.json() == {"path": path, "key": "bearer k"}
            await router.client.get("/ui/tokens?ids=1,2&model=m")
            assert [request["path"] for request in first.requests] == ["/ui/tokens?ids=1,2&model=m"]
            assert len(second.requests) == 2
            assert (await router.client.get("/ui/model?model=other")).status_code == 404
            assert (await router.client.post("/ui/model", json={})).status_code == 404

    run(work())


def test_origin_is_passed_on_unless_it_is_the_routers_own():
    async def work():
        async with backends(FakeBackend()) as (fake,), routing(fake) as router:
            own = f"http://127.0.0.1:{router.port}"
            for origin in (own, "http://evil.example", "null", f"{own}.evil.example"):
                await router.post({"model": "m"}, headers={"origin": origin})
            told = [request["headers"].get("origin") for request in fake.requests]
            assert told == [None, "http://evil.example", "null", f"{own}.evil.example"]

    run(work())


def test_page_can_be_switched_off():
    async def work():
        async with backends(FakeBackend()) as (fake,), routing(fake, enable_page=False) as router:
            for path in ("/", "/ui/router.mjs", "/ui/model"):
                assert (await router.client.get(path)).status_code == 404
            assert fake.requests == []

    run(work())
