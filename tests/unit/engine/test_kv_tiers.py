"""An engine with KV tiers gives the tokens of one without, and counts as cached what it has loaded."""

import sqlite3
from contextlib import closing

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError
from quire.engine.disk_tier import DiskTier
from quire.kernels.native import load_native
from quire.worker import parallel_launch, pipeline_build
from tests.thread_workers import ThreadWorkers

needs_native = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")

PREFIX = "It was a cold morning when the detective looked at the door of the old house by the river. " * 5
OTHERS = [f"Chapter {index}. Once upon a time there was a king who had {index} sons and a daughter. " * 6 for index in range(4)]


def make_llm(**options):
    """Return an engine as a context, which closes it."""
    return closing(
        LLM(**{"model": "demo", "num_threads": 1, "max_num_seqs": 4, "num_kv_blocks": 24, "max_model_len": 256, **options})
    )


def run(llm, prompts, **params):
    """Return the tokens and log probabilities of each prompt, run one after the other, and their cached tokens."""
    found, cached = [], []
    for prompt in prompts:
        params = {"temperature": 0.8, "seed": 3, "max_tokens": 8, "logprobs": 2, **params}
        output = llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0]
        assert output.error is None
        found.append([(list(c.token_ids), [entry.items() for entry in c.logprobs or ()]) for c in output.outputs])
        cached.append(output.metrics.num_cached_tokens)
    return repr(found), cached


PROMPTS = [PREFIX, *OTHERS, PREFIX, PREFIX + OTHERS[0][:90], OTHERS[1]]


@pytest.mark.one_in(2)
@needs_native
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "turboquant_4bit"},
        {"kv_cache_dtype": "k8v4", "kv_cache_dtype_skip_layers": (0, -1)},
        {"dtype": "float32"},
    ],
    ids=["bf16", "int8", "fp8", "4-bit", "k8v4", "f32"],
)
def test_tokens_are_those_of_a_cold_engine(options):
    with make_llm(enable_prefix_caching=False, **options) as cold:
        expected, _ = run(cold, PROMPTS)
    with make_llm(kv_host_bytes=64 << 20, kv_save="all", **options) as llm:
        found, cached = run(llm, PROMPTS)
        stats = llm.llm_engine.scheduler.kv.host_tier.stats
    assert found == expected
    assert cached[:5] == [0] * 5
    assert min(cached[5:]) >= 64
    assert stats.num_loaded >= 12


@needs_native
def test_preempted_sequences_find_their_blocks_in_the_tier():
    prompts = [PREFIX[:240], OTHERS[0][:240], OTHERS[1][:240], OTHERS[2][:240]]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)
    with make_llm(num_kv_blocks=64) as roomy:
        expected = [output.outputs[0].token_ids for output in roomy.generate(prompts, params, use_tqdm=False)]
    with make_llm(kv_host_bytes=64 << 20, kv_save="all", num_kv_blocks=24) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        assert llm.llm_engine.scheduler.num_preemptions > 0
        assert llm.llm_engine.scheduler.kv.host_tier.stats.num_loaded > 0
    assert found == expected


DRAFTS = [
    {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False},
    {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3, "adaptive": False},
    {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 3, "adaptive": False},
]


@pytest.mark.one_in(3)
@needs_native
@pytest.mark.parametrize("drafts", DRAFTS, ids=lambda drafts: drafts["method"])
def test_tokens_are_those_of_a_cold_engine_when_drafts_follow(drafts):
    greedy = {"temperature": 0.0, "logprobs": None, "max_tokens": 16}
    with make_llm(enable_prefix_caching=False) as cold:
        expected, _ = run(cold, PROMPTS, **greedy)
    with make_llm(kv_host_bytes=64 << 20, kv_save="all", speculative_config=drafts) as llm:
        found, cached = run(llm, PROMPTS, **greedy)
        assert llm.llm_engine.stats.num_draft_tokens > 0
    assert found == expected
    assert min(cached[5:]) >= 64


SIZES = {
    "ranks": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "ranks-of-stages": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}


@pytest.fixture
def thread_workers(monkeypatch):
    for module in (parallel_launch, pipeline_build):
        monkeypatch.setattr(module, "spawn_workers", ThreadWorkers)


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_ranks_and_stages_give_the_tokens_of_a_cold_engine(thread_workers, sizes):
    with make_llm(enable_prefix_caching=False) as cold:
        expected, _ = run(cold, PROMPTS)
    with make_llm(kv_host_bytes=64 << 20, kv_save="all", **sizes) as llm:
        found, cached = run(llm, PROMPTS)
        assert llm.llm_engine.scheduler.kv.host_tier.stats.num_loaded >= 12
    assert found == expected
    assert min(cached[5:]) >= 64


@needs_native
@pytest.mark.parametrize("save", ["all", pytest.param("write_through", marks=pytest.mark.slow)])
@pytest.mark.parametrize("sizes", [SIZES["stages"], pytest.param(SIZES["ranks-of-stages"], marks=pytest.mark.slow)])
def test_stages_give_the_tokens_of_a_roomy_engine_with_several_steps_in_flight(tmp_path, thread_workers, sizes, save):
    """Slots are saved, loaded and read from disk while later stages still compute earlier steps."""
    prompts = [(PREFIX if index % 3 == 0 else OTHERS[index % 4])[: 180 + 20 * (index % 4)] for index in range(12)]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    with make_llm(num_kv_blocks=96) as roomy:
        expected = [output.outputs[0].token_ids for output in roomy.generate(prompts, params, use_tqdm=False)]
    disk = {"kv_disk_dir": str(tmp_path / "tier"), "kv_disk_bytes": 64 << 20, "kv_host_bytes": 12 << 16}
    for _ in range(2):
        with make_llm(**disk, kv_save=save, num_kv_blocks=24, **sizes) as llm:
            found = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            tier = llm.llm_engine.scheduler.kv.host_tier
            assert tier.find_problem() is None
            assert tier.stats.num_loaded > 0
        assert found == expected


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kv_host_bytes": 1 << 20, "enable_prefix_caching": False}, "kv_host_bytes needs enable_prefix_caching"),
        ({"kv_host_bytes": 0}, "kv_host_bytes must be None or an integer >= 1"),
        ({"kv_host_bytes": 100}, "kv_host_bytes is 100, but a page"),
        ({"kv_disk_dir": "/tmp/x"}, "kv_disk_bytes is missing"),
        ({"kv_save": "some"}, "kv_save must be one of"),
    ],
)
def test_unsupported_options_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        make_llm(**options)


@needs_native
def test_pages_are_found_on_disk_after_a_restart(tmp_path):
    options = {"kv_disk_dir": str(tmp_path / "tier"), "kv_disk_bytes": 64 << 20, "kv_save": "all"}
    with make_llm(enable_prefix_caching=False) as cold:
        expected, _ = run(cold, [PREFIX])
    with make_llm(**options) as llm:
        assert run(llm, [PREFIX])[0] == expected
    with make_llm(**options) as llm:
        found, cached = run(llm, [PREFIX])
    assert found == expected
    assert cached[0] >= 64


@needs_native
@pytest.mark.parametrize(
    ("first", "second"),
    [({"tensor_parallel_size": 2}, {}), (SIZES["stages"], {"tensor_parallel_size": 3, "tensor_parallel_shares": (2, 1, 1)})],
    ids=["two-ranks-then-one", "stages-then-three-ranks"],
)
@pytest.mark.parametrize("kv_format", ["auto", pytest.param("k8v4", marks=pytest.mark.slow)])
def test_pages_on_disk_are_found_by_another_number_of_processes(tmp_path, thread_workers, first, second, kv_format):
    format_ = {"kv_cache_dtype": kv_format} | ({} if kv_format == "auto" else {"kv_cache_dtype_skip_layers": (0,)})
    options = {"kv_disk_dir": str(tmp_path / "tier"), "kv_disk_bytes": 64 << 20, "kv_save": "all", **format_}
    with make_llm(enable_prefix_caching=False, **format_) as cold:
        expected, _ = run(cold, [PREFIX])
    with make_llm(**options, **first) as llm:
        assert run(llm, [PREFIX])[0] == expected
    with make_llm(**options, **second) as llm:
        found, cached = run(llm, [PREFIX])
    assert found == expected
    assert cached[0] >= 64


def pages_on_disk(folder):
    """Return the slots of a disk tier, with header and page, by key."""
    with closing(sqlite3.connect(folder / "index.sqlite")) as db:
        (name, size), *others = db.execute("SELECT name, slot_bytes FROM files").fetchall()
        slots = db.execute("SELECT key, slot FROM slots WHERE key IS NOT NULL").fetchall()
    assert not others
    data = (folder / name).read_bytes()
    return {key: data[slot * size : (slot + 1) * size].rstrip(b"\0") for key, slot in slots}


@needs_native
def test_pages_on_disk_are_right_when_slots_of_a_small_host_tier_are_used_again_at_once(tmp_path, monkeypatch):
    note_step = DiskTier.note_step

    def write_at_once(tier, *step):
        note_step(tier, *step)
        while tier.wait_written():
            pass

    monkeypatch.setattr(DiskTier, "note_step", write_at_once)
    prompts = [{"prompt_token_ids": [(7 * i + 31 * n + i * i * n) % 400 + 5 for i in range(n)]} for n in range(60, 67)]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)
    found = {}
    for name, host_bytes in (("small", 4 << 16), ("large", 64 << 20)):
        tier = {"kv_disk_dir": str(tmp_path / name), "kv_disk_bytes": 64 << 20, "kv_host_bytes": host_bytes}
        with make_llm(**tier, kv_save="write_through") as llm:
            llm.generate(prompts, params, use_tqdm=False)
        found[name] = pages_on_disk(tmp_path / name)
    assert len(found["small"]) >= 16
    assert found["small"].items() <= found["large"].items()
