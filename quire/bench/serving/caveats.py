"""Warnings about doubtful results of a load test."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from quire.bench.serving.metrics import metric_values
from quire.bench.serving.runner import LoadResult
from quire.bench.serving.setup import Setup

_MAX_LAG_S = 0.02
_MAX_CPU_SHARE = 0.8
_MAX_LATENESS_S = 0.05


def find_warnings(result: LoadResult, lags_s: tuple[float, ...], cost: dict[str, Any], setup: Setup) -> list[str]:
    """Return warnings about what makes the results doubtful: an overloaded client, odd streams, short outputs."""
    return [*_client_warnings(result, lags_s, cost, setup), *_stream_warnings(result)]


def _client_warnings(result: LoadResult, lags_s: tuple[float, ...], cost: dict[str, Any], setup: Setup) -> list[str]:
    found = []
    lag = float(np.percentile(lags_s, 99)) if lags_s else 0.0
    has_client = setup.backend not in ("in-process", "simulated")
    if lag > _MAX_LAG_S:
        found.append(
            f"the client's event loop woke up late (P99 {lag * 1000:.0f} ms): latencies are too long by about that; use fewer "
            "streams, another machine or more cores"
        )
    if cost["cpu_share"] > _MAX_CPU_SHARE and has_client:
        found.append(f"the client used {cost['cpu_share']:.0%} of a core: it may limit what is measured; run several clients")
    late = metric_values(result.records, "client_queue_time")
    is_open_loop = not math.isinf(setup.request_rate) or "as recorded" in setup.arrival
    lateness = float(np.percentile(late, 99)) if late and is_open_loop else 0.0
    if lateness > _MAX_LATENESS_S:
        why = "the client is overloaded" if setup.max_concurrency is None else "--max-concurrency holds them back"
        found.append(
            f"requests were sent up to {lateness * 1000:.0f} ms (P99) after they were due: {why}; only "
            "e2el_including_client_queue counts that wait"
        )
    return found


def _stream_warnings(result: LoadResult) -> list[str]:
    ok = [record for record in result.records if record.outcome == "ok"]
    found = []
    if not ok:
        found.append("no request succeeded")
    num_chunked = sum(record.token_source == "chunks" for record in ok)
    if num_chunked:
        found.append(
            f"{num_chunked} streams came without usage: their output tokens are counted as events with content, which may be "
            "too few; give --tokenizer to count the text"
        )
    num_without = sum(not record.has_done for record in ok)
    if num_without:
        found.append(f"{num_without} streams ended without [DONE]")
    num_short = sum(record.num_output_tokens < record.num_wanted_tokens for record in ok)
    if num_short:
        found.append(
            f"{num_short} outputs are shorter than asked for, so runs compare badly; --ignore-eos makes a server that knows it "
            "go to full length"
        )
    num_empty = sum(not record.content_s for record in ok)
    if num_empty:
        found.append(f"{num_empty} streams had no content at all: their times are those of empty events")
    return found
