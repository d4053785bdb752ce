"""ConnectionLimit, and what a connection beyond it hears."""

import asyncio
import contextlib
import json
import logging

from quire.serving.http.connection_limit import RESERVED_FILES, ConnectionLimit, raise_open_file_limit
from tests.unit.serving.http.shell import echo, endpoint, exchange, parse, post, running


def test_limit_is_what_open_files_leave():
    num_files = raise_open_file_limit()
    most = ConnectionLimit.of_open_files().most
    assert most == max(num_files - RESERVED_FILES, num_files / 2) > 0


def test_log_tells_now_and_then_of_those_turned_away(caplog):
    clock_s = 0.0
    limit = ConnectionLimit(2, clock=lambda: clock_s)
    with caplog.at_level(logging.WARNING, logger="quire"):
        assert limit.has_room(2)
        assert not caplog.records
        for _ in range(100):
            assert not limit.has_room(3)
        assert len(caplog.records) == 1
        assert "2 are open" in caplog.text
        clock_s = 10.0
        assert not limit.has_room(3)
        assert len(caplog.records) == 2


async def ask_until_there_is_room(port):
    """Ask until the server has seen that others have gone: until then it answers 503, or resets the connection."""
    while True:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            answer = parse(await exchange(port, post("/echo")))
            if answer[0] != 503:
                return answer
        await asyncio.sleep(0.01)


def test_connection_too_many_is_told_to_come_back_and_has_room_when_others_go(monkeypatch):
    monkeypatch.setattr(ConnectionLimit, "of_open_files", classmethod(lambda cls: cls(2)))

    async def go():
        async with running([endpoint("/echo", echo)]) as (port, context):
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            refused = parse(await exchange(port, b"", until_close=True))
            for _, writer in idle:
                writer.close()
                await writer.wait_closed()
            counted = list(context.metrics.errors)
            return refused, await asyncio.wait_for(ask_until_there_is_room(port), 60), counted

    (status, headers, body), answer, counted = asyncio.run(go())
    assert counted == [(503, "too_many_connections")]
    assert (status, headers["retry-after"], json.loads(body)["error"]["code"]) == (503, "2", "too_many_connections")
    assert answer[0] == 200
