"""What a running server adds to the times of its engine's steps, from requests that are alone at it."""

from __future__ import annotations

import statistics
from itertools import pairwise

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
_MIN_TOKENS = 4


def measure_delivery(base_url: str, record: StepsRecord) -> Delivery:
    """Return the samples of a server with the record's model that has nothing else to do. Raises ConfigError."""
    longest = record.scheduler["max_model_len"]
    if longest < 2 * (_INPUT_LEN + _OUTPUT_LEN):
        raise ConfigError(
            f"--base-url needs a model that takes {2 * (_INPUT_LEN + _OUTPUT_LEN)} tokens, got one that takes {longest}"
        )
    times = record.fit()
    delays: list[tuple[float, float]] = []
    stalls: list[float] = []
    for number, (rate, num_requests) in enumerate(_ROUNDS):
        dataset = Dataset(
            num_prompts=num_requests, input_len=_INPUT_LEN, output_len=_OUTPUT_LEN, range_ratio=_RANGE, seed=number
        )
        report = run_serve(
            ServeOptions(
                base_url=base_url,
                ignore_eos=True,
                num_warmups=0 if number else 3,
                vocab_size=record.shape.num_head // record.shape.hidden_size,
                dataset=dataset,
                arrivals=Arrivals(request_rate=rate, process="fixed", max_concurrency=1),
            )
        )
        records = [one for one in report.result.records if one.outcome == "ok" and len(one.content_s) >= _MIN_TOKENS]
        if len(records) < num_requests // 2:
            raise ConfigError(f"--base-url {base_url}: only {len(records)} of {num_requests} requests were answered with tokens")
        for before, one in pairwise(records):
            delays.append(_delay(before, one, times, record.shape.windows))
        for one in records:
            gaps = [later - earlier for earlier, later in pairwise(one.content_s)]
            usual = statistics.median(gaps)
            stalls += [round(max(0.0, gap - usual), 7) for gap in gaps]
    return Delivery(tuple(sorted(delays)), tuple(stalls))


def _delay(
    before: RequestRecord, one: RequestRecord, times: StepTime, windows: tuple[int | None, ...]
) -> tuple[float, float]:
    """Return how long the server was idle before a request, and what its first token took beyond its prompt's steps."""
    assert before.end_s is not None
    assert one.sent_s is not None
    work = StepWork.of_spans([(0, one.num_prompt_tokens)], windows, 1)
    idle_s = max(0.0, one.sent_s - before.end_s)
    return round(idle_s, 4), round(max(0.0, one.content_s[0] - one.sent_s - times.mean_s(work)), 7)
