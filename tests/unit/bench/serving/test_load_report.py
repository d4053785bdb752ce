"""The report: JSON, table, warnings, and a self-contained page that is readable without its plots."""

import dataclasses
import json
import math
from array import array
from html.parser import HTMLParser

import numpy as np
import pytest

from quire.base.errors import ConfigError
from quire.bench.serving.beside import InProcessRecord
from quire.bench.serving.client_cost import CpuTimes, read_cpu_times
from quire.bench.serving.html_report import render_html
from quire.bench.serving.metrics import DEFINITIONS, Goals
from quire.bench.serving.records import RequestRecord
from quire.bench.serving.report import Report
from quire.bench.serving.runner import LoadResult
from quire.bench.serving.setup import Cost, Setup
from quire.bench.serving.svg import nice_ticks

SETUP = Setup(
    backend="openai",
    base_url="http://h:1",
    endpoint="/v1/completions",
    model="<script>alert(1)</script>",
    tokenizer=None,
    dataset="random",
    arrival="open loop",
    num_prompts=5,
    request_rate=math.inf,
    burstiness=1.0,
    max_concurrency=None,
    ignore_eos=True,
    seed=0,
    event_loop="asyncio",
    json_parser="json",
    quire_version="0",
    platform="p",
    machine="m",
    commit="c",
    date="d",
)


def good(index, sent, times, num_tokens=None):
    record = RequestRecord(index, sent, 10 * (index + 1), len(times), sent_s=sent, outcome="ok", status=200, has_done=True)
    record.content_s = array("d", times)
    record.first_choice_s, record.last_choice_s, record.end_s = times[0], times[-1], times[-1]
    record.usage_output_tokens = len(times) if num_tokens is None else num_tokens
    record.num_events = len(times) + 1
    return record


def bad(index, outcome, kind, status=None):
    record = RequestRecord(index, 0.0, 10, 4, sent_s=0.0, end_s=0.5, outcome=outcome, error_kind=kind, status=status)
    record.message = "<b>why</b>"
    return record


def make_report(records=None, is_interrupted=False, lags=(0.001,), **setup):
    if records is None:
        records = [
            good(0, 0.0, [1.0, 1.1, 1.3]),
            good(1, 0.5, [1.0, 2.0]),
            bad(2, "failed", "http_500", 500),
            bad(3, "rejected", "http_429", 429),
            bad(4, "failed", "http_500", 500),
        ]
    result = LoadResult(tuple(records), 0.0, 4.0, is_interrupted)
    goals = Goals.parse(["ttft:600"])
    cost = Cost(CpuTimes(0.4, 2.0), tuple(lags), 3)
    return Report(dataclasses.replace(SETUP, **setup), result, cost, goals, percentiles=(50.0, 99.0))


def test_json_has_the_names_and_figures_that_people_know():
    figures = json.loads(make_report().to_json())
    expected = {
        "completed": 2,
        "failed": 2,
        "rejected": 1,
        "duration": 4.0,
        "total_input_tokens": 30,
        "total_output_tokens": 5,
        "request_throughput": 0.5,
        "request_goodput": 0.25,
        "output_throughput": 1.25,
        "total_token_throughput": 8.75,
        "max_output_tokens_per_s": 4.0,
        "max_concurrent_requests": 4,
        "request_rate": "inf",
        "rejections": {"429": 1},
        "failures": {"http_500": {"count": 2, "example": "<b>why</b>"}},
        "token_count_source": {"usage": 2},
        "interrupted": False,
        "mean_ttft_ms": pytest.approx(750.0),
        "p99_ttft_ms": pytest.approx(np.percentile([1000, 500], 99)),
        "median_itl_ms": pytest.approx(200.0),
        "std_e2el_ms": pytest.approx(np.std([1300, 1500])),
        "max_tpot_ms": pytest.approx(1000.0),
        "min_tpot_ms": pytest.approx(150.0),
    }
    assert {name: figures[name] for name in expected} == expected
    client = figures["client"]
    assert (client["cpu_ms_per_request"], client["cpu_us_per_token"], client["cpu_share"]) == (80.0, 80000.0, 0.1)
    assert (client["server_cpu_ms_per_request"], client["num_connections"]) == (400.0, 3)
    assert client["cpu_us_per_event"] == pytest.approx(0.4e6 / 7)
    assert set(DEFINITIONS) < set(figures["definitions"])
    assert all(f"mean_{name}_ms" in figures for name in DEFINITIONS)


def test_detailed_json_has_a_row_for_every_request():
    rows = json.loads(make_report().to_json(is_detailed=True))["requests"]
    assert [row["outcome"] for row in rows] == ["ok", "ok", "failed", "rejected", "failed"]
    assert rows[0]["content_s"] == [1.0, 1.1, 1.3]
    assert rows[2]["error"] == "http_500: <b>why</b>"


def test_table_shows_what_was_asked_for():
    report = make_report()
    text = report.describe()
    for line in ("Successful requests:", "P99 TTFT (ms):", "Request goodput (req/s):", "http_500:", "status 429:"):
        assert line in text
    assert "tpot_events" not in text
    text = dataclasses.replace(report, percentile_metrics=("tpot_events",)).describe()
    assert "P99 tpot_events (ms):" in text
    assert "TTFT" not in text


def test_table_says_what_the_server_said_when_requests_fail():
    report = make_report()
    report.result.records[2].message = "ask\x1b[2J for\n fewer " + "x" * 300
    lines = report.describe().splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("  http_500:"))
    assert lines[place + 1].startswith("    ask[2J for fewer xxx")
    assert len(lines[place + 1]) < 250


def test_report_stands_when_nothing_succeeded():
    report = make_report([bad(0, "failed", "connect"), bad(1, "aborted", "")], is_interrupted=True)
    assert "(interrupted)" in report.describe()
    assert "no request succeeded" in report.describe()
    assert json.loads(report.to_json())["mean_ttft_ms"] is None
    check_page(render_html(report))


@pytest.mark.parametrize(
    "report,warning",
    [
        (make_report(lags=[0.001] * 10 + [0.5] * 10), "woke up late"),
        (make_report([good(0, 0.0, [1.0, 1.1, 1.2], 2)]), "shorter than asked"),
        (make_report(request_rate=3.0, records=[_late := good(0, 1.0, [2.0])]), "after they were due"),
    ],
    ids=["lag", "short", "late"],
)
def test_warning_is_given_when_the_figures_are_doubtful(report, warning):
    _late.scheduled_s = 0.0
    assert warning in " ".join(report.to_dict()["warnings"])


def test_warning_is_given_when_the_client_is_busy_or_streams_are_odd():
    plain = good(0, 0.0, [1.0, 1.5])
    plain.usage_output_tokens = None
    plain.has_done = False
    report = make_report([plain])
    busy = dataclasses.replace(report, cost=Cost(CpuTimes(3.9), (0.0,)))
    text = " ".join(busy.to_dict()["warnings"])
    assert "used 98% of a core" in text
    assert "without usage" in text
    assert "without [DONE]" in text
    assert make_report([good(0, 0.0, [1.0])]).to_dict()["warnings"] == []


class Page(HTMLParser):
    """Checks that elements nest, and keeps what the tests ask for."""

    VOID = ("meta",)

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.tags, self.text, self.values = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs), tuple(self.open)))
        self.values += [value for _, value in attrs if value]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs), tuple(self.open)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def check_page(html):
    page = Page()
    page.feed(html)
    page.close()
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    names = [tag for tag, _, _ in page.tags]
    assert "script" not in names
    assert not any("://" in value for value in page.values)
    assert "url(" not in html
    assert "@import" not in html
    plots = [attrs for tag, attrs, _ in page.tags if tag == "svg" and attrs.get("role") == "img"]
    for attrs in plots:
        assert all(identity in page.ids for identity in attrs["aria-labelledby"].split())
    twins = [places for tag, _, places in page.tags if tag == "table" and "figure" in places and "details" in places]
    assert len(twins) == len(plots) == names.count("figure")
    return page, len(plots)


def test_page_is_well_formed_stands_alone_and_has_a_table_for_every_plot():
    html = render_html(make_report())
    page, num_plots = check_page(html)
    assert num_plots == 4 * 2 + 1 + 2
    assert "<script>" not in html
    assert "<b>" not in html
    assert "prefers-color-scheme:dark" in html
    text = " ".join(page.text)
    assert "Serving benchmark of <script>alert(1)</script>" in text
    assert "From (ms)" in text
    assert "Prompt tokens" in text
    headings = [tag for tag, _, _ in page.tags if tag in ("h1", "h2")]
    assert headings[0] == "h1"
    assert headings.count("h1") == 1


def test_page_thins_out_points_when_there_are_many():
    draw = np.random.default_rng(2)
    records = [good(index, 0.0, sorted(draw.uniform(0.1, 3.9, 3).tolist())) for index in range(5000)]
    html = render_html(make_report(records))
    check_page(html)
    assert 1500 < html.count("<circle") <= 2000
    assert "one in 3 of 5000 requests" in html


@pytest.mark.parametrize("low,high", [(0, 1), (0, 0.037), (0, 987), (0, 1e6), (0, 0), (3, 9.5), (0, 1e-7)])
def test_ticks_are_round_and_cover_their_range(low, high):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 2 <= len(ticks) <= 12
    steps = np.diff(ticks)
    assert steps == pytest.approx(np.full(len(steps), steps[0]))
    assert float(f"{steps[0]:.0e}"[0]) in (1, 2, 5)


def write_stat(proc, pid, parent, user, system):
    (proc / str(pid)).mkdir()
    fields = ["S", str(parent), *["0"] * 9, str(user), str(system), "1", "2", "0"]
    (proc / str(pid) / "stat").write_text(f"{pid} (a) b) {' '.join(fields)}\n")


def test_server_time_is_that_of_its_processes_and_their_descendants(tmp_path):
    import os

    tick = 1 / os.sysconf("SC_CLK_TCK")
    for pid, parent, user in ((1, 0, 5000), (10, 1, 100), (11, 10, 30), (12, 11, 7), (20, 1, 900)):
        write_stat(tmp_path, pid, parent, user, 10)
    times = read_cpu_times((10, 11), tmp_path)
    assert times.server_s == pytest.approx((100 + 30 + 7 + 3 * 13) * tick)
    assert read_cpu_times().server_s is None
    assert times.since(CpuTimes(0.0, 1.0)).server_s == pytest.approx(times.server_s - 1.0)
    from quire.base.errors import ConfigError

    with pytest.raises(ConfigError, match="--server-pid 99"):
        read_cpu_times((99,), tmp_path)


def in_process_record(folder, **changes):
    report = make_report([good(0, 0.0, [1.0, 1.1]), good(1, 0.5, [1.0, 2.0])], backend="in-process", num_prompts=2)
    path = folder / "in-process.json"
    path.write_text(json.dumps({**report.to_dict(), **changes}))
    return path


def test_what_the_server_adds_is_told_when_there_is_a_record_of_the_same_in_one_process(tmp_path):
    beside = InProcessRecord.read(in_process_record(tmp_path))
    report = make_report([good(0, 0.0, [1.0, 1.2]), good(1, 0.5, [1.5, 2.0])], num_prompts=2)
    report = dataclasses.replace(report, beside=beside)
    figures = report.to_dict()["client"]["beside_in_process"]  # 2.0 s of the server, 0.4 s in one process
    assert figures["added_cpu_ms_per_request"] == pytest.approx(800)
    assert figures["added_cpu_us_per_token"] == pytest.approx(400_000)
    assert "not taken in one process" in report.describe()
    assert figures["added_engine_cpu_ms_per_request"] is None
    in_front = dataclasses.replace(report.cost, cpu=dataclasses.replace(report.cost.cpu, front_end_s=0.5))
    figures = dataclasses.replace(report, cost=in_front).to_dict()["client"]["beside_in_process"]
    assert figures["added_engine_cpu_ms_per_request"] == pytest.approx(800 - 250)


def test_steps_of_both_runs_are_told_when_they_are_known(tmp_path):
    path = in_process_record(tmp_path)
    stored = json.loads(path.read_text())
    stored["client"]["engine_steps"] = 7
    path.write_text(json.dumps(stored))
    report = make_report([good(0, 0.0, [1.0, 1.2]), good(1, 0.5, [1.5, 2.0])], num_prompts=2)
    report = dataclasses.replace(
        report, beside=InProcessRecord.read(path), cost=dataclasses.replace(report.cost, engine_steps=19)
    )
    figures = report.to_dict()["client"]
    assert (figures["engine_steps"], figures["beside_in_process"]["in_process_engine_steps"]) == (19, 7)


def test_nothing_is_compared_when_the_record_is_of_another_run(tmp_path):
    beside = InProcessRecord.read(in_process_record(tmp_path))
    report = make_report([good(0, 0.0, [1.0, 1.2]), good(1, 0.5, [1.5, 2.0])], num_prompts=2, model="x")
    figures = dataclasses.replace(report, beside=beside).to_dict()
    assert "beside_in_process" not in figures["client"]
    assert "and 'x' here" in figures["warnings"][-1]


@pytest.mark.parametrize("changes", [{"backend": "openai"}, {"interrupted": True}, {"completed": 1}])
def test_record_is_refused_when_it_is_not_of_a_whole_run_in_one_process(tmp_path, changes):
    with pytest.raises(ConfigError, match="--beside"):
        InProcessRecord.read(in_process_record(tmp_path, **changes))
    with pytest.raises(ConfigError, match="--beside"):
        InProcessRecord.read(tmp_path / "none.json")
