"""EngineLoop in this process: a small model, and a port that plays the server."""

import collections
import itertools
import time

import msgspec
import pytest

from quire import LLM, EngineConfig, LLMEngine, SamplingParams
from quire.contracts.pooling_params import PoolingParams
from quire.serving.engine_client.engine_info import describe_engine
from quire.serving.engine_client.engine_loop import EngineLoop
from quire.serving.engine_client.framing import FrameReader, FrameWriter
from quire.serving.engine_client.messages import (
    Abort,
    AskTimelines,
    FromEngine,
    Heartbeat,
    KvReport,
    LoadAdapter,
    RebalanceExperts,
    SetPrefillUrls,
    Sleep,
    SleepState,
    StepOutputs,
    Stop,
    Submit,
    Timelines,
    WakeUp,
    Watch,
)
from quire.transfer.address import parse_reachable

SESSION = b"session!"


class ScriptedPort:
    """Gives the commands of one list per call, then Stop when nothing runs; keeps what is sent, as it comes out again."""

    def __init__(self, script, max_bytes=1 << 20):
        self.script = list(script)
        self.writer = FrameWriter(SESSION, max_bytes)
        self.reader = FrameReader(SESSION, FromEngine)
        self.sent = []
        self.num_commands = 0
        self.last_empty_s = 0.0

    def receive(self, timeout_s):
        if not self.script:
            return [Stop()] if timeout_s > 0 else []
        commands = self.script.pop(0)
        self.num_commands += len(commands)
        return [command() if callable(command) else command for command in commands]

    def send(self, message):
        self.sent.append(self.reader.read(bytes(self.writer.write(message))).message)

    def check_peer(self):
        pass

    def deltas(self, request_id):
        return [d for m in self.sent if isinstance(m, StepOutputs) for d in m.deltas if d.request_id == request_id]

    def reports(self):
        return [m.report for m in self.sent if isinstance(m, StepOutputs) and m.report is not None]


@pytest.fixture(scope="module")
def engine(tiny_model):
    engine = LLMEngine(
        EngineConfig(model=str(tiny_model), num_kv_blocks=100, block_size=4, max_num_batched_tokens=16, max_num_seqs=8)
    )
    yield engine
    engine.close()


def submit(engine, name, prompt, **options):
    params = SamplingParams(**{"temperature": 1.0, "seed": 4, "max_tokens": 6, "ignore_eos": True, **options})
    return Submit.of(engine.make_request(name, prompt, params))


def run(engine, *script, **options):
    port = ScriptedPort(script, **options)
    EngineLoop(engine, port).run()
    assert not engine.has_unfinished_requests()
    return port


def join(deltas, index=0):
    choices = [choice for delta in deltas for choice in delta.choices if choice.index == index]
    return "".join(choice.text for choice in choices), [token_id for choice in choices for token_id in choice.token_ids]


def test_tokens_are_those_of_generate(engine, tiny_model):
    options = {"n": 2, "logprobs": 2, "prompt_logprobs": 1, "stop": ["e"], "max_tokens": 12}
    port = run(engine, [submit(engine, "a", "the quick", **options)], [submit(engine, "b", [5, 6, 7], seed=9)])
    plain = LLM(str(tiny_model), num_kv_blocks=20)
    params = SamplingParams(temperature=1.0, seed=4, ignore_eos=True, **options)
    expected = plain.generate("the quick", params, use_tqdm=False)[0]
    plain.close()
    deltas = port.deltas("a")
    for choice in expected.outputs:
        parts = [part for delta in deltas for part in delta.choices if part.index == choice.index]
        assert join(deltas, choice.index) == (choice.text, choice.token_ids)
        assert (parts[-1].finish_reason, parts[-1].stop_reason) == (choice.finish_reason, choice.stop_reason)
        entries = [entry for part in parts for entry in part.logprobs]
        assert [[(t.token_id, t.rank) for t in entry] for entry in entries] == [
            [(token_id, found.rank) for token_id, found in entry.items()] for entry in choice.logprobs
        ]
        assert [t.logprob for entry in entries for t in entry] == pytest.approx(
            [found.logprob for entry in choice.logprobs for found in entry.values()], abs=1e-4
        )
    prompt_logprobs = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    assert len(prompt_logprobs) == 1
    assert [None if entry is None else [t.token_id for t in entry] for entry in prompt_logprobs[0]] == [
        None if entry is None else list(entry) for entry in expected.prompt_logprobs
    ]
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert port.deltas("b")[-1].choices[0].finish_reason == "length"


def test_embedding_comes_on_its_only_delta(engine):
    good = Submit.of(engine.make_request("good", [5, 6, 7] * 10, PoolingParams(dimensions=8)))
    aborted = Submit.of(engine.make_request("aborted", [5] * 100, PoolingParams()))
    bad = msgspec.structs.replace(good, request_id="bad", pooling={"dimensions": 1000})
    port = run(engine, [good, aborted, bad], [Abort(["aborted"])])
    (delta,) = port.deltas("good")
    assert (len(delta.embedding), delta.finished, delta.choices[0].finish_reason) == (8, True, "stop")
    assert sum(value * value for value in delta.embedding) == pytest.approx(1.0, abs=1e-5)
    assert delta.metrics.finished_time >= delta.metrics.first_scheduled_time
    (delta,) = port.deltas("aborted")
    assert (delta.embedding, delta.choices[0].finish_reason) == (None, "abort")
    (delta,) = port.deltas("bad")
    assert (delta.is_refused, delta.error_param) == (True, "dimensions")


def test_metrics_come_with_the_first_token_and_the_end(engine):
    prompt = list(range(20, 40))
    port = run(engine, [submit(engine, "warm", prompt)])
    port = run(engine, [submit(engine, "a", prompt)])
    deltas = port.deltas("a")
    assert [delta.metrics is not None for delta in deltas] == [True, False, False, False, False, True]
    first, last = deltas[0].metrics, deltas[-1].metrics
    assert first.num_cached_tokens == last.num_cached_tokens == 16
    assert first.arrival_time <= first.first_scheduled_time <= first.first_token_time == last.first_token_time
    assert first.finished_time is None
    assert last.finished_time > last.first_token_time


def test_reports_add_up(engine):
    before = engine.scheduler.prefix_cache_queries, engine.scheduler.prefix_cache_hits
    prompt = list(range(100, 140))
    port = run(engine, [submit(engine, "a", prompt), submit(engine, "b", [1, 2, 3], n=2)])
    reports = port.reports()
    parts = [part for report in reports for part in report.parts]
    assert sum(report.num_prefill_tokens for report in reports) == 40 + 3 + 1  # a fork computes the last token again
    assert sum(report.num_decode_tokens for report in reports) == 5 + 5 + 5
    assert sum(part.num_tokens for part in parts if part.is_prefill) == 44
    assert {(part.request_id, part.choice) for part in parts} == {("a", 0), ("b", 0), ("b", 1)}
    assert reports[0].attended == [(16, 16 * 17 // 2)]
    assert max(report.num_prefill_tokens + report.num_decode_tokens for report in reports) <= 16
    assert [report.step_id for report in reports] == list(range(reports[0].step_id, reports[0].step_id + len(reports)))
    assert all(later.started_s >= one.started_s + one.duration_s for one, later in itertools.pairwise(reports))
    assert reports[-1].total_prefix_queries - before[0] >= 43
    assert reports[-1].num_running == reports[-1].num_waiting == 0
    assert reports[-1].num_free_blocks == 100
    assert reports[-1].num_cached_blocks == len(engine.scheduler.kv.cached_block_ids()) > 0


def test_report_counts_all_and_names_few_when_a_step_has_many_parts(engine, monkeypatch):
    monkeypatch.setattr("quire.serving.engine_client.engine_loop.MAX_STEP_PARTS", 1)
    port = run(engine, [submit(engine, "a", [5, 6, 7]), submit(engine, "b", [5, 6, 8])])
    reports = port.reports()
    assert [(part.request_id, part.is_prefill) for part in reports[0].parts] == [("a", True), ("b", True)]
    assert [part.request_id for part in reports[1].parts] == ["a"]
    assert {report.num_decode_tokens for report in reports[1:]} == {2}


def test_refused_requests_answer_once_and_leave_the_others_alone(engine):
    good = submit(engine, "good", [1, 2, 3])

    def changed(name, **fields):
        return Submit(**{**{f: getattr(good, f) for f in good.__struct_fields__}, "request_id": name, **fields})

    ids = b"\x01\x00\x00\x00"
    port = run(
        engine,
        [
            changed("params", params={"temperature": -1.0}),
            changed("long", prompt_token_ids=ids * 300),
            good,
            changed("vocabulary", prompt_token_ids=b"\xff\xff\xff\x7f"),
            changed("negative", prompt_token_ids=b"\xff\xff\xff\xff"),
            changed("empty", prompt_token_ids=b""),
            changed("", params={}),
            changed("policy", params={"priority": 1}),
            changed("logprobs", params={"logprobs": 21}),
            changed("bias", params={"logit_bias": {9999: 1.0}}),
            changed("unknown", params={"unknown": 1}),
        ],
        [changed("good")],
    )
    assert join(port.deltas("good"))[1] != []
    names = {
        "params": "temperature", "long": "prompt", "vocabulary": "prompt_token_ids", "negative": "prompt_token_ids",
        "empty": "prompt_token_ids", "": "request_id", "policy": "priority", "logprobs": "logprobs", "bias": "logit_bias",
        "unknown": "params",
    }  # fmt: skip
    for name, param in names.items():
        (delta,) = port.deltas(name)
        assert (delta.choices, delta.finished, delta.is_refused, delta.error_param) == ([], True, True, param)
    assert [delta.error_param for delta in port.deltas("good") if delta.is_refused] == ["request_id"]


def test_abort_frees_the_blocks_before_the_next_step(engine):
    free = []

    def look():
        free.append((engine.scheduler.kv.pool.num_free, engine.stats.num_steps))
        return Abort(["unknown"])

    port = run(engine, [submit(engine, "a", [1, 2, 3], max_tokens=200)], [look], [Abort(["a"])], [look])
    assert free == [(99, free[0][1]), (100, free[0][1] + 1)]
    assert port.deltas("a")[-1].choices[0].finish_reason == "abort"
    assert port.deltas("a")[-1].metrics is not None
    assert len(port.reports()) == 2


def test_failing_output_ends_its_request_alone(engine, monkeypatch):
    import quire.serving.engine_client.deltas as deltas

    real = deltas.choice_delta
    tokens = join(run(engine, [submit(engine, "a", [9, 9])]).deltas("a"))[1]
    monkeypatch.setattr(deltas, "choice_delta", lambda choice: 1 / 0 if choice.token_ids == tokens[2:3] else real(choice))
    port = run(engine, [submit(engine, "a", [9, 9]), submit(engine, "b", [7, 8], seed=5, logit_bias={tokens[2]: -100.0})])
    assert [delta.finished for delta in port.deltas("a")] == [False, False, True]
    assert "ZeroDivisionError" in port.deltas("a")[-1].error
    assert not port.deltas("a")[-1].is_refused
    assert len(join(port.deltas("b"))[1]) == 6


def test_output_that_is_too_large_ends_its_request_alone(engine):
    port = run(
        engine,
        [submit(engine, "large", [1] * 15, prompt_logprobs=20), submit(engine, "b", [7, 8])],
        max_bytes=2000,
    )
    (delta,) = port.deltas("large")
    assert "at most" in delta.error
    assert delta.finished
    assert len(join(port.deltas("b"))[1]) == 6
    assert port.reports()


def test_failing_step_ends_its_requests_and_the_loop_goes_on(engine, monkeypatch):
    execute = engine.runner.execute
    plans = []

    def fail_once(plan):
        plans.append(plan)
        if len(plans) == 2:
            raise RuntimeError("broken kernel")
        return execute(plan)

    monkeypatch.setattr(engine.runner, "execute", fail_once)
    port = run(engine, [submit(engine, "a", [1, 2])], [], [], [submit(engine, "b", [1, 2])])
    assert port.deltas("a")[-1].choices[0].finish_reason == "error"
    assert "broken kernel" in port.deltas("a")[-1].error
    assert len(join(port.deltas("b"))[1]) == 6


def test_engine_that_raises_ends_the_loop(engine, monkeypatch):
    monkeypatch.setattr(engine, "step", lambda: 1 / 0)
    port = ScriptedPort([[submit(engine, "a", [1, 2])]])
    with pytest.raises(ZeroDivisionError):
        EngineLoop(engine, port).run()
    monkeypatch.undo()
    engine.abort_request("a")


def test_heartbeat_counts_and_watch_reports_the_holders(engine):
    port = run(
        engine,
        [Watch(1000.0), submit(engine, "a", [1] * 8, n=2)],
        *([] for _ in range(4)),
        [lambda: time.sleep(0.05) or Abort([])],
    )
    beats = [message for message in port.sent if isinstance(message, Heartbeat)]
    assert (beats[0].num_unfinished, beats[0].num_commands) == (0, 0)
    reports = [message for message in port.sent if isinstance(message, KvReport)]
    assert all(report.num_blocks == 100 for report in reports)
    held = [report.blocks["a"] for report in reports if "a" in report.blocks]
    assert held
    assert not any(set(report.cached) & set(report.blocks.get("a", ())) for report in reports)


def test_report_shows_the_blocks_of_the_prompt_with_every_choice_that_holds_them(engine):
    engine.submit(submit(engine, "a", [1] * 9, n=3).request(), "delta")
    while engine.scheduler.num_running < 3:
        engine.step()
    held = EngineLoop(engine, ScriptedPort([])).kv_report(0.0).blocks["a"]
    engine.abort_request("a")
    counts = sorted(collections.Counter(held).values())
    assert counts[-2:] == [3, 3]  # the prompt fills two blocks of 4 tokens
    assert len(counts) > 2


def test_info_tells_the_engine(engine):
    info = describe_engine(engine, 1.5)
    assert (info.num_kv_blocks, info.block_size, info.max_num_seqs, info.max_num_batched_tokens) == (100, 4, 8, 16)
    assert info.num_parameters > info.num_active_parameters > 0  # the embedding is not tied
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert info.weight_bytes == pytest.approx(4 * info.num_active_parameters, rel=0.01)
    assert info.load_time_s == 1.5


def test_timelines_are_in_the_last_delta_and_sent_when_they_are_asked_for(engine):
    engine.records_timelines = True
    try:
        ask = AskTimelines(5, ["timed", "unknown"])
        port = ScriptedPort([[submit(engine, "timed", [1, 2, 3], max_tokens=4)], [ask], [], [], [], [ask]])
        EngineLoop(engine, port).run()
    finally:
        engine.records_timelines = False
    first, second = [message for message in port.sent if isinstance(message, Timelines)]
    assert (first.number, list(first.timelines), second.timelines) == (5, ["timed"], {})
    assert [event.kind for event in first.timelines["timed"].events][:3] == ["queue", "admit", "prefill"]
    *before, last = port.deltas("timed")
    assert all(delta.metrics is None or delta.metrics.timeline is None for delta in before)
    assert [event.kind for event in last.metrics.timeline.events] == ["queue", "admit", "prefill", "decode", "finish"]


def test_end_of_an_aborted_request_is_sent_before_the_answer_about_timelines(engine):
    engine.records_timelines = True
    try:
        commands = [Abort(["gone"]), AskTimelines(1, ["gone"])]
        port = ScriptedPort([[submit(engine, "gone", [1, 2, 3], max_tokens=50)], commands])
        EngineLoop(engine, port).run()
    finally:
        engine.records_timelines = False
    kinds = [type(m) for m in port.sent if isinstance(m, Timelines) or (isinstance(m, StepOutputs) and m.deltas[0].finished)]
    assert kinds == [StepOutputs, Timelines]


def test_sleep_is_answered_when_the_engine_is_asleep_and_refused_for_other_levels(engine):
    script = [[Sleep(0, 1)], [Sleep(1, 1), WakeUp(2)], [WakeUp(3)]]
    port = ScriptedPort(script)
    EngineLoop(engine, port).run()
    states = [message for message in port.sent if isinstance(message, SleepState)]
    assert states == [SleepState(0, 1), SleepState(1, 1), SleepState(2, None), SleepState(3, None)]
    assert not engine.is_sleeping


@pytest.mark.parametrize("refusal", [None, "role 'decode': other engines use this engine's KV cache"], ids=["can", "cannot"])
def test_requests_go_on_when_a_sleep_is_only_checked(engine, monkeypatch, refusal):
    monkeypatch.setattr(engine.held_runner, "refusal", lambda level: refusal)
    port = ScriptedPort([[submit(engine, "a", [1] * 8), Sleep(0, 2, is_check=True)]])
    EngineLoop(engine, port).run()
    (state,) = [message for message in port.sent if isinstance(message, SleepState)]
    assert (state.level, state.is_refused, state.error is None) == (None, refusal is not None, refusal is None)
    assert port.deltas("a")[-1].choices[0].finish_reason == "length"
    assert not engine.is_sleeping


def test_sleep_that_is_overtaken_by_wake_up_is_answered_with_an_error(engine):
    port = ScriptedPort([[Sleep(0, 1), WakeUp(1)]])
    EngineLoop(engine, port).run()
    states = [message for message in port.sent if isinstance(message, SleepState)]
    assert [(state.number, state.level, state.error is None) for state in states] == [(0, None, False), (1, None, True)]


@pytest.mark.parametrize(
    ("started", "error"),
    [
        (None, "start it with enable_expert_parallel and enable_eplb"),
        (False, "already, or the system has no thread"),
        (True, None),
    ],
    ids=["without-eplb", "busy", "started"],
)
def test_rebalancing_of_experts_is_answered(engine, monkeypatch, started, error):
    if started is not None:
        monkeypatch.setattr(engine, "rebalance_experts", lambda: started)
    port = ScriptedPort([[RebalanceExperts("experts-1")]])
    EngineLoop(engine, port).run()
    (delta,) = port.deltas("experts-1")
    assert delta.finished
    assert delta.is_refused == (error is not None)
    assert delta.error is None if error is None else error in delta.error


class RemotePrefill:
    """Of a decode engine that waits for nothing."""

    def __init__(self):
        self.peers = []

    def __bool__(self):
        return False

    def set_urls(self, urls):
        self.peers = [parse_reachable(url, "prefill_urls", has_secret=False) for url in urls]


@pytest.mark.parametrize(
    ("urls", "error"),
    [
        (["unix:/x", "tcp://127.0.0.1:7"], None),
        (["tcp://10.0.0.1:7"], "need transfer_secret_file"),
        (None, "is no decode engine"),
    ],
    ids=["told", "without-secret", "role-both"],
)
def test_prefill_urls_are_told_to_a_decode_engine(engine, monkeypatch, urls, error):
    remote = RemotePrefill()
    remote.is_open = True
    if urls is not None:
        monkeypatch.setattr(engine, "remote_prefill", remote)
    port = ScriptedPort([[SetPrefillUrls("urls-1", urls or ["unix:/x"])]])
    EngineLoop(engine, port).run()
    (delta,) = port.deltas("urls-1")
    assert (delta.finished, delta.is_refused) == (True, error is not None)
    assert delta.error is None if error is None else error in delta.error
    assert [str(one) for one in remote.peers] == ([] if error else urls)


def test_an_adapter_is_refused_while_the_engine_is_asleep(engine):
    load = LoadAdapter(request_id="lora-1", lora=("sql", 1, "/adapters/sql"))
    port = ScriptedPort([[Sleep(0, 1)], [load], [WakeUp(1)]])
    EngineLoop(engine, port).run()
    (delta,) = port.deltas("lora-1")
    assert (delta.finished, delta.is_refused) == (True, True)
    assert "the engine is asleep (level 1)" in delta.error
