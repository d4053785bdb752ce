"""Wait until a server answers, and find the name of its model."""

from __future__ import annotations

import asyncio

from quire.base.errors import ConfigError
from quire.bench.serving.http_client import HttpClient, Response
from quire.bench.serving.http_wire import HttpError
from quire.bench.serving.openai_stream import JSON_ERRORS, decode_json, describe_error

_POLL_S = 0.5


async def find_model(client: HttpClient, model: str | None, timeout_s: float) -> str:
    """Return `model`, or the first one that GET /v1/models lists, once the server answers.

    timeout_s  how long to retry without an answer, or after a 503; 0: no retry

    Raises ConfigError if the server does not answer, refuses the key, or names no model.
    """
    response = await _wait_for_answer(client, timeout_s)
    where = f"http{'s' if client.target.is_tls else ''}://{client.target.authority}{client.target.path}"
    if response.status in (401, 403):
        message = describe_error(response.body.decode("utf-8", "replace"))
        raise ConfigError(f"{where} refuses the key ({response.status}: {message}); set OPENAI_API_KEY, or give --header")
    if model is not None:
        return model
    try:
        listed = decode_json(response.body)["data"][0]["id"] if response.status == 200 else None
    except (*JSON_ERRORS, KeyError, IndexError, TypeError):
        listed = None
    if not isinstance(listed, str):
        raise ConfigError(f"{where}/v1/models names no model (status {response.status}); give --model")
    return listed


async def _wait_for_answer(client: HttpClient, timeout_s: float) -> Response:
    request = client.encode("GET", "/v1/models")
    reason = "it did not answer"
    num_tries = 1 + int(timeout_s / _POLL_S)
    try:
        async with asyncio.timeout(timeout_s + 10.0):
            for number in range(num_tries):
                if number:
                    await asyncio.sleep(_POLL_S)
                try:
                    response = await client.exchange(request)
                except HttpError as error:
                    reason = str(error)
                    continue
                if response.status != 503 or number == num_tries - 1:
                    return response
                reason = "status 503"
    except TimeoutError:
        reason = "it accepts connections but does not answer"
    where = f"{client.target.host}:{client.target.port}"
    raise ConfigError(
        f"no server is ready at {where} within --ready-check-timeout-sec {timeout_s:g} ({reason}); start one with "
        "`quire serve`, or give --base-url"
    )
