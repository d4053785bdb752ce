"""What a running server adds to the times of its engine's steps: requests that are alone at it, and a full batch."""

from __future__ import annotations

import http.client
import json
import os
import statistics
import urllib.error
import urllib.parse
import urllib.request
from itertools import pairwise
from typing import Any, cast

from quire.base.errors import ConfigError
from quire.bench.serving.arrivals import Arrivals
from quire.bench.serving.records import RequestRecord
from quire.bench.serving.serve import ServeOptions, run_serve
from quire.bench.serving.workload import Dataset
from quire.planner.delivery import Delivery
from quire.planner.record import StepsRecord
from quire.planner.step_time import StepTime, StepWork

_ROUNDS = ((2.0, 24), (10.0, 60), (100.0, 100))
"""Requests a second, and how many: pauses of half a second, of a tenth, and none to speak of."""

_INPUT_LEN, _OUTPUT_LEN, _RANGE = 100, 24, 0.9
_BATCH, _BATCH_INPUT_LEN, _BATCH_OUTPUT_LEN, _NUM_BATCHES = 8, 32, 64, 8
_MIN_TOKENS = 4
_NUM_TOKENS = 256
_ASK_S = 10.0
_MAX_ANSWER_BYTES = 4 << 20


def check_server(base_url: str) -> None:
    """Raise ConfigError unless a server answers there that has a model, takes the requests, and has nothing to do."""
    parts = urllib.parse.urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"--base-url must be a URL like http://host:8000, got {base_url[:200]!r}")
    found = _ask(base_url, "/v1/models").get("data")
    model = _object_of(cast("list[Any]", found)[0]) if isinstance(found, list) and found else {}
    if not model:
        raise ConfigError(f"--base-url {base_url}: /v1/models lists no model, so nothing can be measured there")
    longest = model.get("max_model_len")
    if isinstance(longest, int) and longest < _NUM_TOKENS:
        raise ConfigError(f"--base-url {base_url}: its model takes {longest} tokens, and {_NUM_TOKENS} are needed")
    load = _ask(base_url, "/load", is_needed=False)  # other servers have none
    if load.get("role") == "prefill":
        raise ConfigError(f"--base-url {base_url}: it is a prefill server, which answers no requests")
    if load.get("server_load"):
        raise ConfigError(f"--base-url {base_url}: {load['server_load']} requests run there: it must have nothing else to do")


def _object_of(found: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _ask(base_url: str, path: str, *, is_needed: bool = True) -> dict[str, Any]:
    """Return the JSON object of an answer; {} for something else, and where it is not needed and there is none. Raises
    ConfigError."""
    key = os.environ.get("OPENAI_API_KEY")
    request = urllib.request.Request(base_url.rstrip("/") + path, headers={} if not key else {"authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=_ASK_S) as answer:
            return _object_of(json.loads(answer.read(_MAX_ANSWER_BYTES)))
    except (OSError, http.client.HTTPException, ValueError) as error:
        if not is_needed:
            return {}
        hint = "; set OPENAI_API_KEY" if isinstance(error, urllib.error.HTTPError) and error.code in (401, 403) else ""
        raise ConfigError(f"--base-url {base_url}: {path} is not answered as by a server of models: {error}{hint}") from None


def measure_delivery(base_url: str, record: StepsRecord) -> Delivery:
    """Return the samples of a server with the record's model that has nothing else to do. Raises ConfigError."""
    longest = record.scheduler["max_model_len"]
    if longest < _NUM_TOKENS:
        raise ConfigError(f"--base-url needs a model that takes {_NUM_TOKENS} tokens, got one that takes {longest}")
    times, windows = record.fit(), record.shape.windows
    rounds = [_send_alone(base_url, record, number) for number in range(len(_ROUNDS))]
    alone = [one for records in rounds for one in records]
    size = min(_BATCH, record.scheduler["max_num_seqs"])
    lengths = Dataset(num_prompts=size * _NUM_BATCHES, input_len=_BATCH_INPUT_LEN, output_len=_BATCH_OUTPUT_LEN)
    full = _send(base_url, record, lengths, Arrivals(max_concurrency=size), 0)
    of_one, of_many = _excess(alone, 1, times, windows), _excess(full, size, times, windows)
    sequence_s = max(0.0, (of_many - of_one) / max(1, size - 1))
    found = Delivery(((0.0, 0.0),), ((0.0, (0.0,)),), max(0.0, of_one - sequence_s), sequence_s)
    times = times.served(found)
    delays = [_delay(before, one, times, windows) for records in rounds for before, one in pairwise(records)]
    stalls = sorted((_usual_pause(records), tuple(_stalls(records))) for records in rounds)
    return Delivery(tuple(sorted(delays)), tuple(stalls), found.step_s, found.sequence_s)


def _send_alone(base_url: str, record: StepsRecord, number: int) -> list[RequestRecord]:
    rate, num_prompts = _ROUNDS[number]
    lengths = Dataset(num_prompts=num_prompts, input_len=_INPUT_LEN, output_len=_OUTPUT_LEN, range_ratio=_RANGE, seed=number)
    return _send(base_url, record, lengths, Arrivals(request_rate=rate, process="fixed", max_concurrency=1), 0 if number else 3)


def _send(base_url: str, record: StepsRecord, dataset: Dataset, arrivals: Arrivals, num_warmups: int) -> list[RequestRecord]:
    """Return the records of the requests that were answered with a few tokens at least. Raises ConfigError if most were not."""
    report = run_serve(
        ServeOptions(
            base_url=base_url,
            ignore_eos=True,
            num_warmups=num_warmups,
            vocab_size=record.shape.num_head // record.shape.hidden_size,
            dataset=dataset,
            arrivals=arrivals,
        )
    )
    sent = report.result.records
    found = [one for one in sent if one.outcome == "ok" and len(one.content_s) >= _MIN_TOKENS]
    if 2 * len(found) < len(sent):
        raise ConfigError(f"--base-url {base_url}: only {len(found)} of {len(sent)} requests were answered with tokens")
    return found


def _gaps(one: RequestRecord) -> list[float]:
    return [later - earlier for earlier, later in pairwise(one.content_s)]


def _excess(records: list[RequestRecord], num_sequences: int, times: StepTime, windows: tuple[int | None, ...]) -> float:
    """Return by how much decode steps of so many sequences were longer than expected: the median over requests."""
    found: list[float] = []
    for one in records:
        context = one.num_prompt_tokens + len(one.content_s) // 2
        work = StepWork.of_spans([(context, 1)] * num_sequences, windows, num_sequences)
        found.append(statistics.median(_gaps(one)) - times.mean_s(work))
    return statistics.median(found)


def _delay(before: RequestRecord, one: RequestRecord, times: StepTime, windows: tuple[int | None, ...]) -> tuple[float, float]:
    """Return how long the server was idle before a request, and what its first token took beyond its prompt's steps."""
    work = StepWork.of_spans([(0, one.num_prompt_tokens)], windows, 1)
    first_s = one.content_s[0] - _sent_s(one)
    return _pause(before, one), round(max(0.0, first_s - times.mean_s(work)), 7)


def _sent_s(one: RequestRecord) -> float:
    return one.scheduled_s if one.sent_s is None else one.sent_s


def _pause(before: RequestRecord, one: RequestRecord) -> float:
    return round(max(0.0, _sent_s(one) - before.content_s[-1]), 4)


def _usual_pause(records: list[RequestRecord]) -> float:
    return statistics.median(_pause(before, one) for before, one in pairwise(records))


def _stalls(records: list[RequestRecord]) -> list[float]:
    found: list[float] = []
    for one in records:
        gaps = _gaps(one)
        usual = statistics.median(gaps)
        found += [round(max(0.0, gap - usual), 7) for gap in gaps]
    return found
