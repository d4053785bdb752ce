"""The shell around the routes: ids, keys, errors, limits."""

import asyncio
import json

import msgspec
import pytest

from quire.api.openai.chat import ChatCompletionRequest
from quire.base.errors import ConfigError, RequestError
from quire.serving.answers import Download, Ready, Stream
from quire.serving.auth import hash_key
from quire.serving.config import ApiKey, ServerConfig
from quire.serving.errors import ApiError, engine_unavailable, overloaded
from quire.serving.http.lifecycle import listen
from tests.unit.serving.http.shell import Body, ask, echo, endpoint, exchange, parse, post, running


def test_answer_carries_an_id_when_the_client_sends_none():
    status, headers, body, context = ask(post("/echo", b'{"text":"hi"}'))
    assert (status, body) == (200, {"text": "hi", "owner": "anonymous"})
    assert headers["x-request-id"] == headers["request-id"]
    assert headers["request-id"].startswith("req_")
    assert context.metrics.requests == [("/echo", 200)]


@pytest.mark.parametrize("path", ["/echo", "/nowhere"])
@pytest.mark.parametrize("client_id", ["mine", "a" * 128, "0f8fad5b-d9cb-469f-a165-70867728950e", "1-5f/a+b=@x:y;z|w,v~.._"])
def test_clients_id_is_the_answers_and_ours_is_beside_it(client_id, path):
    _, headers, _, _ = ask(post(path, b"{}", f"x-request-id: {client_id}"))
    assert headers["x-request-id"] == headers["x-client-request-id"] == client_id.lower()  # as all headers here
    assert headers["request-id"].startswith("req_")


@pytest.mark.parametrize("client_id", ["a" * 129, "", "a b", 'a"b', "<script>", "é", "a\tb", "{}"])
def test_clients_id_is_not_taken_over_when_it_is_too_long_or_odd(client_id):
    _, headers, _, _ = ask(post("/echo", b"{}", f"x-request-id: {client_id}"))
    assert headers["x-request-id"] == headers["request-id"]
    assert headers["x-request-id"].startswith("req_")
    assert "x-client-request-id" not in headers


def test_log_has_both_ids(caplog):
    caplog.set_level("INFO", logger="quire.access")
    _, headers, _, _ = ask(post("/echo", b"{}", "x-request-id: theirs"))
    (record,) = [record for record in caplog.records if record.name == "quire.access"]
    assert (record.request_id, record.client_request_id) == (headers["request-id"], "theirs")
    assert headers["request-id"] in record.getMessage()
    assert "theirs" in record.getMessage()


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/nonsense", None),
        ("/v1", None),
        ("/", None),
    ],
)
def test_path_that_is_meant_is_suggested(path, near):
    status, _, body, _ = ask(post(path), [endpoint("/v1/chat/completions", echo), endpoint("/tokenize", echo)])
    assert (status, body["error"]["code"]) == (404, "not_found")
    message = body["error"]["message"]
    assert message.endswith(f"; did you mean {near}?") if near is not None else "did you mean" not in message


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/models/demo", "/v1/models/demo"),
        ("/batches/b1/cancel", "/v1/batches/b1/cancel"),
        ("/v1/v1/batches/b1/cancel", "/v1/batches/b1/cancel"),
        ("/batches/b1/nonsense", None),
        ("/batches//cancel", None),
    ],
)
def test_path_with_a_parameter_that_is_meant_is_suggested(path, near):
    endpoints = [endpoint("/v1/models/{model:path}", echo), endpoint("/v1/batches/{batch_id}/cancel", echo)]
    status, _, body, _ = ask(post(path), endpoints)
    assert (status, body["error"]["code"]) == (404, "not_found")
    message = body["error"]["message"]
    assert message.endswith(f"; did you mean {near}?") if near is not None else "did you mean" not in message


def test_path_that_is_meant_is_suggested_for_messages():
    _, _, body, _ = ask(post("/messages"), [endpoint("/v1/messages", echo, error_style="anthropic")])
    assert "did you mean /v1/messages?" in json.dumps(body)


@pytest.mark.parametrize(
    "request_bytes, status, code",
    [
        (post("/nowhere"), 404, "not_found"),
        (b"GET /echo HTTP/1.1\r\nhost: localhost\r\n\r\n", 405, "method_not_allowed"),
        (post("/echo", b"{"), 400, "invalid_json"),
        (post("/echo", b'{"text":1}'), 400, "invalid_value"),
        (post("/echo").replace(b"application/json", b"text/plain"), 415, "unsupported_media_type"),
        (post("/echo", b"{}", "content-encoding: gzip"), 415, "unsupported_media_type"),
        (post("/echo", b'{"a":' * 10_000), 400, "invalid_json"),
        (post("/echo", b'{"a":' * 100_000), 400, "invalid_value"),
        (b"nonsense\r\n\r\n", 400, "bad_request"),
        (post("/echo", b"{}", *[f"x-{n}: 1" for n in range(101)]), 431, "headers_too_large"),
        (post("/echo", b"{}", f"x-a: {'a' * 40_000}"), 431, "headers_too_large"),
        (post("/echo", b"{}", "x-request-timeout: -1"), 200, None),
    ],
)
def test_answer_has_the_shape_of_the_api_when_the_request_is_bad(request_bytes, status, code):
    got, _, body, _ = ask(request_bytes)
    assert got == status
    if code is not None:
        assert body["error"]["code"] == code
        assert set(body["error"]) == {"message", "type", "param", "code"}


def head(path):
    return f"HEAD {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()


def ask_raw(request, endpoints):
    async def go():
        async with running(endpoints) as (port, context):
            return parse(await exchange(port, request, until_close=True)), context

    return asyncio.run(go())


async def tell(context, call):
    return Ready(b'{"a":1}', headers={"x-told": "1"})


async def refuse(context, call):
    raise overloaded("full", 1.0)


@pytest.mark.parametrize("path", ["/told", "/told/{name}"])
def test_head_has_the_status_and_headers_of_get_and_no_body(path):
    (status, headers, body), context = ask_raw(head(path.replace("{name}", "x")), [endpoint(path, tell, method="GET")])
    assert (status, headers["x-told"], headers["content-length"], body) == (200, "1", "7", b"")
    assert context.metrics.requests == [(path, 200)]


def test_head_has_the_status_of_the_error_when_get_fails():
    (status, headers, body), context = ask_raw(head("/full"), [endpoint("/full", refuse, method="GET")])
    assert (status, body, context.metrics.errors) == (503, b"", [(503, "overloaded")])
    assert "retry-after" in headers


def test_head_is_refused_where_there_is_no_get():
    (status, headers, body), _ = ask_raw(head("/echo"), [endpoint("/echo", echo)])
    assert (status, headers["allow"], body) == (405, "post", b"")


def test_head_ends_at_once_when_get_would_be_an_endless_stream_or_a_download():
    closed = []

    async def forever():
        while True:
            yield b"data: 1\n\n"
            await asyncio.sleep(0.01)

    async def pieces():
        try:
            yield b"abc"
        finally:
            closed.append(True)

    async def get_stream(context, call):
        return Stream(forever(), ApiError.openai_event)

    async def get_file(context, call):
        return Download(pieces(), {"content-length": "3"})

    endpoints = [endpoint("/stream", get_stream, method="GET"), endpoint("/file", get_file, method="GET")]
    (status, headers, body), _ = ask_raw(head("/stream"), endpoints)
    assert (status, headers["content-type"], body) == (200, "text/event-stream; charset=utf-8", b"")
    (status, headers, body), _ = ask_raw(head("/file"), endpoints)
    assert (status, headers["content-length"], body, closed) == (200, "3", b"", [True])


def test_methods_of_a_path_are_told_when_another_is_asked_for():
    endpoints = [endpoint("/echo", echo), endpoint("/echo", tell, method="GET")]
    status, headers, body, _ = ask(b"DELETE /echo HTTP/1.1\r\nhost: localhost\r\n\r\n", endpoints)
    assert (status, headers["allow"], body["error"]["message"]) == (405, "get, head, post", "DELETE is not allowed here")


@pytest.mark.parametrize(("path", "is_anthropic"), [("/v1/a/batches", True), ("/v1/ab", False), ("/v1", False)])
def test_unknown_path_has_the_shape_of_the_api_that_it_is_below(path, is_anthropic):
    status, headers, body, _ = ask(post(path), [endpoint("/v1/a", echo, error_style="anthropic"), endpoint("/v1/b", echo)])
    assert status == 404
    if is_anthropic:
        assert (body["type"], body["error"]["type"], body["request_id"]) == ("error", "not_found_error", headers["request-id"])
    else:
        assert body["error"]["code"] == "not_found"


def test_body_is_refused_before_it_is_read_when_its_length_is_over_the_limit():
    head = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100000000\r\n\r\n"
    status, headers, body, _ = ask(head, max_body_bytes=1000)
    assert (status, body["error"]["code"]) == (413, "request_too_large")
    assert headers["connection"] == "close"


def test_body_is_refused_when_its_chunks_go_over_the_limit():
    head = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    status, _, body, _ = ask(head + b"400\r\n" + b" " * 1024 + b"\r\n", max_body_bytes=1000)
    assert (status, body["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    "header, status, owner",
    [
        ("authorization: Bearer right", 200, "ann"),
        ("x-api-key: right", 200, "ann"),
        ("api-key: right", 200, "ann"),
        ("api-key: wrong", 401, None),
        ("authorization: Bearer wrong", 401, None),
        ("authorization: Basic right", 401, None),
        ("x-none: 1", 401, None),
    ],
)
def test_key_decides_who_asks(header, status, owner):
    keys = (ApiKey("bob", hash_key("other")), ApiKey("ann", hash_key("right")))
    got, headers, body, _ = ask(post("/echo", b"{}", header), api_keys=keys)
    assert got == status
    if owner is None:
        assert (body["error"]["code"], headers["www-authenticate"]) == ("invalid_api_key", "bearer")
    else:
        assert body["owner"] == owner


def test_answer_tells_what_is_left_when_the_key_has_rates():
    keys = (ApiKey("ann", hash_key("right"), requests_per_minute=9), ApiKey("bob", hash_key("other")))

    async def go(key):
        async with running([endpoint("/echo", echo)], api_keys=keys) as (port, context):
            context.gateway.ratelimit_headers = lambda owner: {"x-ratelimit-remaining-requests": f"8 of {owner}"}
            return parse(await exchange(port, post("/echo", b"{}", f"authorization: Bearer {key}")))[1]

    assert asyncio.run(go("right"))["x-ratelimit-remaining-requests"] == "8 of ann"
    assert "x-ratelimit-remaining-requests" not in asyncio.run(go("other"))


def test_every_path_needs_a_key_unless_it_is_open():
    keys = (ApiKey("ann", hash_key("right")),)
    assert ask(post("/nowhere"), api_keys=keys)[0] == 401
    assert ask(post("/echo"), [endpoint("/echo", echo, is_open=True)], api_keys=keys)[0] == 200


def test_tenants_have_salts_of_their_own():
    salts = []

    async def note(context, call):
        salts.append(call.owner.cache_salt)
        return Ready(b"{}")

    async def go():
        keys = (ApiKey("bob", hash_key("b")), ApiKey("ann", hash_key("a")))
        async with running([endpoint("/note", note)], api_keys=keys) as (port, _):
            for key in "aba":
                await exchange(port, post("/note", b"{}", f"x-api-key: {key}"))

    asyncio.run(go())
    assert salts[0] == salts[2] != salts[1]
    assert all(len(salt) == 64 for salt in salts)


@pytest.mark.parametrize(
    "host, header, status",
    [
        ("localhost", "x-a: 1", 200),
        ("127.0.0.1:80", "x-a: 1", 200),
        ("evil.example", "x-a: 1", 403),
        ("[::1]:80", "x-a: 1", 200),
        ("[", "x-a: 1", 403),
        ("localhost", "origin: http://localhost", 200),
        ("localhost", "origin: http://evil.example", 403),
        ("localhost", "origin: null", 403),
    ],
)
def test_foreign_names_and_pages_are_refused_when_there_is_no_key(host, header, status):
    assert ask(post("/echo", b"{}", header).replace(b"localhost", host.encode(), 1))[0] == status


@pytest.mark.parametrize(("header", "status"), [("x-a: 1", 200), ("origin: http://localhost", 403), ("origin: http://", 403)])
def test_request_without_a_host_is_answered_unless_a_page_sends_it(header, status):
    assert ask(post("/echo", b"{}", header).replace(b"host: localhost\r\n", b"", 1))[0] == status


def test_error_names_its_headers_when_a_handler_refuses():
    async def refuse(context, call):
        raise overloaded("full", 3.2)

    status, headers, body, _ = ask(post("/full"), [endpoint("/full", refuse)])
    assert (status, body["error"]["code"]) == (503, "overloaded")
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("4", "3200")


def test_error_has_the_other_shape_when_the_endpoint_is_of_the_other_api():
    async def refuse(context, call):
        raise RequestError("temperature must be ...", "temperature")

    status, headers, body, _ = ask(post("/m"), [endpoint("/m", refuse, error_style="anthropic")])
    assert status == 400
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["request_id"] == headers["x-request-id"]


def test_exception_is_not_shown_to_the_client():
    async def fail(context, call):
        raise ValueError("secret path /etc")

    status, _, body, _ = ask(post("/fail"), [endpoint("/fail", fail)])
    assert status == 500
    assert "secret" not in json.dumps(body)


async def answer_with_path(context, call):
    return Ready(msgspec.json.encode({"path": call.route, "asked": dict(call.path_params)}))


@pytest.mark.parametrize(
    "path, route, asked",
    [("/a/b", "/a/b", {}), ("/a/c", "/a/{name}", {"name": "c"}), ("/a/b?x=1", "/a/b", {})],
)
def test_endpoint_is_that_of_the_path_when_another_has_parameters(path, route, asked):
    endpoints = [endpoint("/a/b", answer_with_path), endpoint("/a/{name}", answer_with_path)]
    status, _, body, context = ask(post(path), endpoints)
    assert (status, body) == (200, {"path": route, "asked": asked})
    assert context.metrics.requests == [(route, 200)]


def test_endpoint_is_that_of_the_method_when_a_path_has_two():
    async def name(context, call):
        return Ready(b'"got"')

    endpoints = [endpoint("/x", echo), endpoint("/x", name, method="GET")]
    assert ask(b"GET /x HTTP/1.1\r\nhost: localhost\r\n\r\n", endpoints)[2] == "got"
    assert ask(post("/x", b'{"text":"hi"}'), endpoints)[2]["text"] == "hi"


ORIGIN = "https://app.example"


def from_page(request, **options):
    return ask(request, allowed_origins=(ORIGIN,), api_keys=(ApiKey("ann", hash_key("k")),), **options)


def test_page_of_an_allowed_origin_may_send_what_official_clients_send():
    asked = "authorization,content-type,x-stainless-lang,x-stainless-retry-count,anthropic-version,idempotency-key"
    lines = ["OPTIONS /echo HTTP/1.1", "host: localhost", "connection: close", f"origin: {ORIGIN}",
             "access-control-request-method: POST", f"access-control-request-headers: {asked}", "", ""]  # fmt: skip
    status, headers, _, _ = from_page("\r\n".join(lines).encode(), is_text=True)
    assert status == 200
    assert headers["access-control-allow-origin"] == ORIGIN
    assert set(asked.split(",")) <= set(headers["access-control-allow-headers"].replace(" ", "").split(","))


@pytest.mark.parametrize(("key", "status"), [("k", 200), ("wrong", 401)])
def test_page_of_an_allowed_origin_reads_answers_and_errors(key, status):
    request = post("/echo", b'{"text":"a","odd":1}', f"origin: {ORIGIN}", f"authorization: Bearer {key}")
    got, headers, _, _ = from_page(request)
    assert got == status
    assert headers["access-control-allow-origin"] == ORIGIN
    assert {"x-request-id", "x-quire-ignored-params"} <= set(headers["access-control-expose-headers"].split(", "))


def test_page_of_another_origin_reads_nothing():
    _, headers, _, _ = from_page(post("/echo", b"{}", "origin: https://evil.example", "authorization: Bearer k"))
    assert "access-control-allow-origin" not in headers
    _, headers, _, _ = ask(post("/echo", b"{}", f"origin: {ORIGIN}"))
    assert "access-control-allow-origin" not in headers


async def timed(context, call):
    return Ready(msgspec.json.encode(call.deadline_s(is_streaming=False) - call.received_s))


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize("header", ["x-request-timeout", "x-stainless-read-timeout"])
@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", "1e9", ""])
def test_header_is_named_when_it_is_no_timeout(header, value):
    status, _, body, _ = ask(post("/timed", b"{}", f"{header}: {value}"), [endpoint("/timed", timed)])
    assert (status, body["error"]["param"]) == (400, header)
    assert header in body["error"]["message"]


def test_own_header_is_the_timeout_when_the_client_library_states_another():
    request = post("/timed", b"{}", "x-request-timeout: 5", "x-stainless-read-timeout: 600")
    _, _, body, _ = ask(request, [endpoint("/timed", timed)])
    assert body == pytest.approx(5)


class Nested(msgspec.Struct):
    inner: Body = msgspec.field(default_factory=Body)


async def echo_nested(context, call):
    await call.body(Nested)
    return Ready(b"{}")


def test_unknown_fields_are_listed_by_their_paths():
    endpoints = [endpoint("/nested", echo_nested)]
    sent = b'{"inner":{"text":"a","odd":1,"gone":null,"not safe\\r\\n":2},"other":[]}'
    _, headers, _, context = ask(post("/nested", sent), endpoints)
    assert headers["x-quire-ignored-params"] == "inner.odd,inner.not%20safe%0d%0a,other"  # in lower case as all headers here
    assert context.metrics.ignored[0] == "odd"
    status, _, body, _ = ask(post("/nested", sent), endpoints, strict=True)
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "unknown_parameter", "inner.odd")


async def read_chat(context, call):
    await call.body(ChatCompletionRequest)
    return Ready(b"{}")


@pytest.mark.parametrize("is_strict", [False, True])
def test_formats_that_are_not_enforced_are_listed_and_never_refused(is_strict):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "format": "int32"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    sent = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "response_format": form}).encode()
    status, headers, *_ = ask(post("/read", sent), [endpoint("/read", read_chat)], strict=is_strict)
    assert status == 200
    assert headers["x-quire-ignored-params"] == "response_format.json_schema.schema.properties.n.format"


def test_list_of_unknown_fields_ends_with_a_whole_name_when_it_is_long():
    names = [f"field_number_{n}" for n in range(60)]
    _, headers, _, _ = ask(post("/echo", json.dumps(dict.fromkeys(names, 1)).encode()))
    told = headers["x-quire-ignored-params"].split(",")
    assert told.pop() == "..."
    assert told == names[: len(told)]
    assert len(told) >= 25


def test_unknown_fields_are_listed_or_refused():
    _, headers, _, context = ask(post("/echo", b'{"text":"a","nonsense":1}'))
    assert headers["x-quire-ignored-params"] == "nonsense"
    assert context.metrics.ignored == ["nonsense"]
    status, _, body, _ = ask(post("/echo", b'{"nonsense":1}'), strict=True)
    assert (status, body["error"]["param"]) == (400, "nonsense")


def test_clients_are_told_different_times_to_come_back_when_the_engine_is_away():
    told = {engine_unavailable("it starts").headers()["retry-after-ms"] for _ in range(50)}
    assert len(told) > 25
    assert all(5000 <= int(ms) <= 6251 for ms in told)


def test_start_is_refused_when_the_path_of_the_socket_is_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("kept")
    with pytest.raises(ConfigError, match="uds: cannot listen on"):
        listen(ServerConfig(uds=path))
    assert path.read_text() == "kept"
