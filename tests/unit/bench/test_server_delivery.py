"""What is measured at a server, with a server that answers as a known machine would."""

import json
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from quire.base.errors import ConfigError
from quire.bench import delivery, steps
from quire.bench.serving.records import RequestRecord
from quire.bench.steps import StepsTrial, measure_steps
from quire.cli.main import main
from quire.planner.record import StepsRecord
from quire.planner.step_time import StepWork
from tests.http_server import QuietHandler, http_server
from tests.unit.bench.test_steps import config_of

STEP_S, SEQUENCE_S = 0.003, 0.001


@contextmanager
def answering(answers):
    """Yield the URL of a server that gives these answers, and 404 elsewhere."""

    class Handler(QuietHandler):
        def do_GET(self):
            answer = answers.get(self.path)
            self.send_response(404 if answer is None else 200)
            self.end_headers()
            self.wfile.write(answer.encode() if isinstance(answer, str) else json.dumps(answer).encode())

    with http_server(Handler) as url:
        yield url


@pytest.fixture(scope="module")
def record(tiny_model):
    return measure_steps(config_of(tiny_model, max_num_seqs=4), StepsTrial(seconds=0.2, num_decode_steps=3))


def answer(record, num_tokens=9):
    """Return a run_serve that answers with the record's times, 10 ms later after a pause and 2 ms otherwise."""
    times, windows = record.fit(), record.shape.windows

    def run_serve(options):
        dataset, limit = options.dataset, options.arrivals.max_concurrency
        context = dataset.input_len + dataset.output_len // 2
        work = StepWork.of_spans([(context, 1)] * limit, windows, limit)
        step_s = times.mean_s(work) + STEP_S + SEQUENCE_S * limit
        prompt_s = times.mean_s(StepWork.of_spans([(0, dataset.input_len)], windows, 1)) + STEP_S + SEQUENCE_S
        delay_s = 0.010 if options.arrivals.request_rate == 2.0 else 0.002
        records = []
        for index in range(dataset.num_prompts):
            one = RequestRecord(index, index * 1.0, dataset.input_len, num_tokens, sent_s=index * 1.0, outcome="ok")
            first_s = index + delay_s + prompt_s
            one.content_s.extend(first_s + step_s * (place + (place == 4) / 2) for place in range(num_tokens))
            records.append(one)
        return SimpleNamespace(result=SimpleNamespace(records=tuple(records)))

    return run_serve


def test_known_delays_and_step_times_are_found(record, monkeypatch, tmp_path):
    monkeypatch.setattr(delivery, "run_serve", answer(record))
    found = delivery.measure_delivery("http://server", record)
    assert found.step_s == pytest.approx(STEP_S, rel=0.02)
    assert found.sequence_s == pytest.approx(SEQUENCE_S, rel=0.02)
    assert {round(delay_s, 4) for _, delay_s in found.delays} == {0.002, 0.010}
    assert sum(value > 0.001 for _, samples in found.stalls for value in samples) == 24 + 60 + 100  # one in each request
    path = tmp_path / "steps.json"
    with_delivery = replace(record, delivery=found)
    path.write_text(with_delivery.to_json())
    assert StepsRecord.read(path) == with_delivery


def test_server_that_does_not_answer_is_refused(record, monkeypatch):
    monkeypatch.setattr(delivery, "run_serve", answer(record, num_tokens=1))
    with pytest.raises(ConfigError, match="only 0 of 24 requests were answered with tokens"):
        delivery.measure_delivery("http://server", record)


def test_model_of_few_tokens_is_refused(record):
    short = replace(record, scheduler={**record.scheduler, "max_model_len": 100})
    with pytest.raises(ConfigError, match="needs a model that takes 256 tokens, got one that takes 100"):
        delivery.measure_delivery("http://server", short)


@pytest.mark.parametrize(
    ("answers", "match"),
    [
        ({"/v1/models": {"data": []}}, "lists no model"),
        ({"/v1/models": [1]}, "lists no model"),
        ({"/v1/models": "<html>"}, "not answered as by a server"),
        ({"/v1/models": {"data": [{"id": "m", "max_model_len": 64}]}}, "takes 64 tokens"),
        ({"/v1/models": {"data": [{"id": "m"}]}, "/load": {"server_load": 3}}, "3 requests run there"),
        ({"/v1/models": {"data": [{"id": "m"}]}, "/load": {"server_load": 0, "role": "prefill"}}, "is a prefill server"),
    ],
    ids=["none", "list", "html", "short", "busy", "prefill"],
)
def test_server_is_checked_before_anything_is_measured(answers, match, monkeypatch, capsys):
    monkeypatch.setattr(steps, "measure_steps", lambda *_: pytest.fail("measured"))
    with answering(answers) as url:
        assert main(["bench", "steps", "--base-url", url]) != 0
    assert match in capsys.readouterr().err
    assert main(["bench", "steps", "--base-url", "server:80"]) != 0
    assert "http://host:8000" in capsys.readouterr().err


def test_idle_server_and_one_without_a_load_report_pass_the_check():
    models = {"/v1/models": {"data": [{"id": "m", "max_model_len": 1024}]}}
    for more in ({}, {"/load": {"server_load": 0, "role": "decode"}}):
        with answering({**models, **more}) as url:
            delivery.check_server(url)
