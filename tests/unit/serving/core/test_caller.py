"""Caller: what a job takes over from the call it is made for."""

from starlette.requests import Request as HttpRequest

from quire.serving.body_room import BodyRoom
from quire.serving.config import ServerConfig
from quire.serving.endpoint import Call
from quire.serving.openai.handlers import caller_of
from tests.unit.serving.fakes import OWNER
from tests.unit.serving.request_queue.virtual_engine import make_job


def test_job_knows_when_its_call_was_received_when_that_is_long_ago():
    http = HttpRequest({"type": "http", "headers": [], "quire.route": "/v1/x"})
    share = BodyRoom(1).share()
    call = Call(http, OWNER, "req_1", ServerConfig(), share, received_s=12.5)
    job = caller_of(call, is_streaming=False).job(make_job("r", arrival_s=20.0).request, is_streaming=False)
    assert (job.received_s, job.call_id, job.route) == (12.5, "req_1", "/v1/x")
