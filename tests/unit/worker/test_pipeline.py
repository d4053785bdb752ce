"""Engines of several pipeline stages, of one rank or several, give the tokens of one process, bit for bit."""

from __future__ import annotations

import functools

import pytest

from quire import LLM, BeamSearchParams, PoolingParams, SamplingParams
from quire.base.errors import ConfigError, WorkerError
from quire.contracts.config import EngineConfig
from quire.kernels.native import load_native
from quire.model import native_model
from quire.parallel.barrier import AbortReason
from quire.worker import pipeline_build
from quire.worker.inspect import inspect_model
from quire.worker.pipeline_plan import check_pipeline, stage_memories
from tests.thread_workers import ThreadWorkers
from tests.unit.engine.one_compiler import one_compiler
from tests.unit.worker import rank_outputs
from tests.unit.worker.rank_outputs import KINDS, cases_of

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")


@pytest.fixture(scope="module", autouse=True)
def compiled():
    with one_compiler():
        yield


@pytest.fixture(autouse=True)
def thread_workers(monkeypatch):
    """Let stages be threads; returns the groups that were made."""
    made = []

    def spawn(*args):
        made.append(ThreadWorkers(*args))
        return made[-1]

    monkeypatch.setattr(pipeline_build, "spawn_workers", spawn)
    monkeypatch.setattr(pipeline_build, "start_ray_workers", spawn)
    return made


PROMPTS = [*rank_outputs.PROMPTS, "The cat and the dog and the cat"]


def _engine(size=1, ranks=1, **options):
    defaults = {"model": "demo", "num_threads": 1, "max_num_seqs": 8, "num_kv_blocks": 96}
    return LLM(**{**defaults, **options}, pipeline_parallel_size=size, tensor_parallel_size=ranks)


def outputs_of(llm, prompts=PROMPTS, **params):
    return rank_outputs.outputs_of(llm, prompts, **params)


@functools.cache
def _plain_outputs(*kinds):
    """Return the outputs of one process without drafts by kind."""
    one = _engine()
    found = {name: outputs_of(one, **KINDS[name]) for name in kinds}
    one.close()
    return found


def _most_in_flight(llm):
    """Return a list that gets the number of steps in flight at every launch."""
    driver = llm.llm_engine.runner
    launch, counts = driver.launch, []

    def counted(plan):
        step = launch(plan)
        counts.append(len(driver.in_flight))
        return step

    driver.launch = counted
    return counts


@pytest.mark.parametrize(
    ("size", "ranks"),
    [(4, 1), *(pytest.param(size, ranks, marks=pytest.mark.slow) for size, ranks in ((2, 1), (2, 2), (3, 2)))],
)
def test_outputs_are_those_of_one_process(size, ranks):
    one, stages = _engine(), _engine(size, ranks)
    counts = _most_in_flight(stages)
    for name, params in KINDS.items():
        params = {**params, "max_tokens": 24 // ranks}
        expected = outputs_of(one, **params)
        assert outputs_of(stages, **params) == expected, name
        assert outputs_of(stages, **params) == expected, f"{name} over cached prefixes"
    assert max(counts) == size
    pooled = [
        llm.embed(PROMPTS, PoolingParams(pooling=kind), use_tqdm=False) for llm in (one, stages) for kind in ("mean", "last")
    ]
    vectors = [[o.outputs.embedding for o in outputs] for outputs in pooled]
    assert vectors[:2] == vectors[2:]
    beams = [llm.beam_search(PROMPTS[:2], BeamSearchParams(beam_width=3, max_tokens=8)) for llm in (one, stages)]
    assert [[s.tokens for s in o.sequences] for o in beams[0]] == [[s.tokens for s in o.sequences] for o in beams[1]]
    one.close()
    stages.close()


DRAFTS = {
    **rank_outputs.DRAFTS,
    "merged": {"method": ["ngram", "draft_model"], "model": "demo-draft", "num_speculative_tokens": 3},
    "merged-heads": {
        "method": ["eagle3", "medusa", "ngram"],
        "model": {"eagle3": "demo-eagle3", "medusa": "demo-medusa"},
        "num_speculative_tokens": 4,
    },
}


@pytest.mark.covering
@pytest.mark.parametrize("is_adaptive", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["always", "adaptive"])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["one-rank", "two-ranks"])
@pytest.mark.parametrize("drafts", cases_of(DRAFTS, "suffix-tree", "eagle3"))
def test_outputs_with_drafts_are_those_of_one_process_without(drafts, ranks, is_adaptive):
    expected = _plain_outputs("greedy", "sampled", "json", "log-probabilities")
    stages = _engine(2, ranks, speculative_config={**drafts, "adaptive": is_adaptive})
    counts = _most_in_flight(stages)
    assert {name: outputs_of(stages, **KINDS[name]) for name in expected} == expected
    stats = stages.llm_engine.stats
    for _ in range(50):  # adaptive drafts begin only after enough steps without drafts were timed
        if not is_adaptive or stats.num_accepted_tokens > 0:
            break
        assert outputs_of(stages, **KINDS["greedy"]) == expected["greedy"]
    assert stats.num_draft_tokens > 0
    assert stats.num_accepted_tokens > 0
    assert max(counts) == 2
    stages.close()


OPTIONS = {
    **rank_outputs.OPTIONS,
    "preempted-with-drafts": {
        "num_kv_blocks": 8,
        "max_num_seqs": 4,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False},
    },
    "no-prefix-cache": {"enable_prefix_caching": False, "max_num_seqs": 3},
    "threads": {"num_threads": 2},
}


@pytest.mark.covering
@pytest.mark.parametrize("shares", [(1,), pytest.param((2, 1), marks=pytest.mark.slow)], ids=["one-rank", "two-ranks"])
@pytest.mark.parametrize("options", cases_of(OPTIONS, "int4-and-int8-cache", "preempted"))
def test_outputs_are_those_of_one_process_with_every_option(options, shares):
    one, stages = _engine(**options), _engine(2, len(shares), **options, tensor_parallel_shares=shares)
    for name in ("greedy", "log-probabilities", "choices")[: 4 - len(shares)]:
        assert outputs_of(stages, **KINDS[name]) == outputs_of(one, **KINDS[name]), name
    if "num_kv_blocks" in options:
        assert stages.llm_engine.scheduler.num_preemptions > 0
    one.close()
    stages.close()


@pytest.mark.parametrize(
    "options", [{"num_kv_blocks": 64}, pytest.param({"speculative_config": {"method": "ngram"}}, marks=pytest.mark.slow)]
)
def test_stages_whose_ranks_share_the_tokens_of_sequences_give_the_tokens_of_one_process(options):
    long = [list(range(first, first + 270)) for first in (5, 90)]  # more than the tokens that lie together on a rank
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 128, **options}
    one, stages = _engine(**options), _engine(2, 2, decode_context_parallel_size=2, **options)
    params = {**KINDS["log-probabilities"], "n": 2, "max_tokens": 3}
    assert outputs_of(stages, long, **params) == outputs_of(one, long, **params)
    memory, held = stages.llm_engine.report.memory, stage_memories(stages.llm_engine.config, stages.llm_engine.report)
    assert memory.num_block_places == 2
    assert sum(each.kv_bytes for each in held) == 2 * memory.num_local_blocks * memory.kv.bytes_per_block
    one.close()
    stages.close()


EXPERTS = {"copies": {"num_redundant_experts": 2}, "int8": {"quantization": "int8", "tensor_parallel_shares": (2, 1)}}


@pytest.mark.parametrize("options", cases_of(EXPERTS, "copies"))
def test_stages_whose_ranks_hold_whole_experts_give_the_tokens_of_one_process(options):
    one = _engine(model="demo-moe", quantization=options.get("quantization"))
    stages = _engine(2, 2, model="demo-moe", enable_expert_parallel=True, **options)
    params = {**KINDS["log-probabilities"], "max_tokens": 6}
    assert outputs_of(stages, **params) == outputs_of(one, **params)
    alone, placed = (llm.llm_engine.stats.experts for llm in (one, stages))
    assert [(each.layer, each.tokens) for each in placed] == [(each.layer, each.tokens) for each in alone]
    assert all(sum(each.rank_tokens) == pytest.approx(sum(each.tokens)) for each in placed)
    memories = stage_memories(stages.llm_engine.config, stages.llm_engine.report)
    assert sum(each.weight_bytes for each in memories) == pytest.approx(stages.llm_engine.report.packed_weight_bytes, rel=0.1)
    one.close()
    stages.close()


@pytest.mark.parametrize(
    ("params", "ranks"), [("greedy", 1), ("sampled", 1), pytest.param("greedy", 2, marks=pytest.mark.slow)]
)
def test_heads_with_a_screen_and_shortened_weights_give_the_tokens_of_one_process(monkeypatch, params, ranks):
    for name in ("_INT8_HEAD_FROM", "SHORT_FROM"):
        monkeypatch.setattr(native_model, name, 1)
    one, stages = _engine(), _engine(2, ranks)
    spared = [llm.llm_engine.report.spared_weight_bytes for llm in (one, stages)]
    assert 0 <= spared[1] - spared[0] <= 64 * (ranks - 1) < spared[0]  # each part of a divided weight is padded
    assert outputs_of(stages, **KINDS[params]) == outputs_of(one, **KINDS[params])
    one.close()
    stages.close()


def test_one_step_is_in_flight_without_async_scheduling():
    one, stages = _engine(), _engine(2, async_scheduling=False)
    counts = _most_in_flight(stages)
    assert outputs_of(stages, **KINDS["sampled"]) == outputs_of(one, **KINDS["sampled"])
    assert set(counts) <= {1}
    one.close()
    stages.close()


def test_stages_may_have_different_numbers_of_layers_whoever_starts_them():
    one = _engine()
    expected = outputs_of(one, temperature=0.9)
    one.close()
    for layers, starter in ((1, 7), "spawn"), ((5, 2, 1), "ray"):
        stages = _engine(len(layers), pipeline_layers=layers, distributed_executor_backend=starter)
        assert outputs_of(stages, temperature=0.9) == expected
        stages.close()


def test_an_aborted_request_leaves_the_steps_in_flight_right():
    one, stages = _engine(), _engine(2, max_num_seqs=3)
    expected = [
        o.outputs[0].token_ids for o in one.generate(PROMPTS, SamplingParams(max_tokens=40, temperature=0), use_tqdm=False)
    ]
    engine = stages.llm_engine
    ended = {}
    for name, prompt in enumerate(PROMPTS):
        engine.add_request(f"kept {name}", prompt, SamplingParams(max_tokens=40, temperature=0))
        engine.add_request(f"aborted {name}", prompt + prompt, SamplingParams(max_tokens=40, temperature=0))
    for step in range(400):
        for output in engine.step():
            if output.finished:
                ended[output.request_id] = output.outputs[0].token_ids
        if step % 7 == 3:
            engine.abort_request(f"aborted {step // 7}")
        if not engine.has_unfinished_requests():
            break
    assert [ended[f"kept {name}"] for name in range(len(PROMPTS))] == expected
    one.close()
    stages.close()


def test_each_stage_holds_its_own_layers_only(thread_workers):
    one, stages = _engine(), _engine(2, pipeline_layers=(6, 2))
    whole = one.llm_engine.report.packed_weight_bytes
    own = [thread_workers[-1].board.read(rank).ready["packed_weight_bytes"] for rank in (1, 2)]
    memories = stage_memories(stages.llm_engine.config, stages.llm_engine.report)
    for memory, num_bytes in zip(memories, own, strict=True):
        assert abs(memory.weight_bytes - num_bytes) < 0.1 * whole
    assert sum(memory.kv_bytes for memory in memories) == stages.llm_engine.report.memory.kv_bytes
    assert memories[0].kv_bytes == 3 * memories[1].kv_bytes
    assert own[1] < 0.55 * whole
    one.close()
    stages.close()


def test_each_rank_of_a_stage_holds_its_part_only(thread_workers):
    ranks = _engine(2, 2, tensor_parallel_shares=(3, 1), pipeline_layers=(6, 2))
    report = ranks.llm_engine.report
    own = [thread_workers[-1].board.read(rank).ready["packed_weight_bytes"] for rank in range(1, 5)]
    memories = stage_memories(ranks.llm_engine.config, report)
    assert [rank.part for rank in ranks.llm_engine.stats.ranks][:2] == [
        "no layers",
        "stage 0 (layers 0 to 5), tensor-parallel rank 0",
    ]
    assert [(memory.stage.index, memory.shard.rank) for memory in memories] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for memory, num_bytes in zip(memories, own, strict=True):
        assert abs(memory.weight_bytes - num_bytes) < 0.1 * sum(own)
    assert sum(own) == report.packed_weight_bytes
    assert sum(memory.kv_bytes for memory in memories) == report.memory.kv_bytes
    assert own[0] > own[1]
    stages = [status.stages[-1][0] for status in (thread_workers[-1].board.read(rank) for rank in (2, 3))]
    assert stages == [
        "loading weights of stage 0 (layers 0 to 5), tensor-parallel rank 1",
        "loading weights of stage 1 (layers 6 to 7), tensor-parallel rank 0",
    ]
    ranks.close()


def test_ranks_of_stages_give_the_tokens_of_one_process_and_count_their_barriers():
    one, ranks = _engine(), _engine(2, 2, tensor_parallel_shares=(3, 1), pipeline_layers=(6, 2))
    for params in ({"temperature": 0.0}, {"temperature": 0.7, "logprobs": 3}):
        assert outputs_of(ranks, PROMPTS[:1], max_tokens=4, **params) == outputs_of(one, PROMPTS[:1], max_tokens=4, **params)
    one.close()
    leader, *workers = ranks.llm_engine.stats.ranks
    num_steps = ranks.llm_engine.stats.num_steps
    assert leader.share == 0.0
    assert sum(each.share for each in workers) == pytest.approx(1)
    assert [each.num_barriers for each in workers[:2]] == [num_steps * (4 * 6 + 2)] * 2
    assert [each.num_barriers for each in workers[2:]] == [num_steps * (4 * 2 + 2)] * 2  # one at the entry, not the embedding's
    assert all(each.num_bytes > 0 for each in workers)
    ranks.close()


def test_a_rank_of_a_stage_that_fails_ends_the_engine_with_its_place(thread_workers):
    ranks = _engine(2, 2)
    workers = thread_workers[-1]
    for barrier in (workers.barrier, *workers.subgroups):
        barrier.abort(4, AbortReason.ENDED, "rank 4 (pid 4711): killed by SIGKILL")
    message = r"pipeline stage 1 \(layers \d to 7\), tensor-parallel rank 1: rank 4 \(pid 4711\): killed by SIGKILL"
    with pytest.raises(WorkerError, match=message):
        outputs_of(ranks)
    workers.kill()


def test_the_idle_share_of_each_stage_is_measured():
    stages = _engine(2)
    outputs_of(stages)
    before = stages.llm_engine.stage_times
    outputs_of(stages, PROMPTS[:1])
    times = stages.llm_engine.stage_times.since(before)
    assert all(0 < busy_s < times.active_s for busy_s in times.busy_s)
    assert all(0 < share < 1 for share in times.idle_shares)
    assert times.describe().startswith("pipeline stages were idle stage 0 ")
    assert before.active_s < stages.llm_engine.stage_times.active_s
    stages.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be an integer >= 1, got 0"),
        ({"pipeline_parallel_size": 9}, "pipeline_parallel_size must be at most 8 for a model of 8 layers, got 9"),
        ({"pipeline_parallel_size": 2, "pipeline_layers": (8,)}, "one number for each of the 2 stages"),
        ({"pipeline_parallel_size": 2, "pipeline_layers": (8, 0)}, "pipeline_layers must be integers >= 1, got 0"),
        ({"pipeline_parallel_size": 2, "pipeline_layers": (3, 4)}, r"add up to the model's 8 layers, got 3 \+ 4 = 7"),
        ({"pipeline_layers": (3, 5)}, "one number for each of the 1 stages"),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 5}, "tensor_parallel_size must be at most 4 for a model of 4"),
        ({"pipeline_parallel_size": 2, "block_size": 4}, "it needs the native kernels, which do not run a block_size of 4"),
        ({"pipeline_parallel_size": 2, "speculative_config": {"method": "self", "skipped_layers": [1]}}, "method 'self' runs"),
    ],
)
def test_stages_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(**{"model": "demo", **options})


def test_more_processes_than_a_group_has_are_refused():
    config = EngineConfig(model="demo", device="cpu", pipeline_parallel_size=8, tensor_parallel_size=8)
    report = inspect_model(EngineConfig(model="demo", device="cpu"))
    with pytest.raises(ConfigError, match=r"must be at most 63, as the leader is a process of its own, got 8 \* 8 = 64"):
        check_pipeline(config, report)
