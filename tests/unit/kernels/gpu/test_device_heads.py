"""Draft models and heads on the device: what they draft is what they draft on the CPU, so that every hidden state is right;
tokens are those of plain decoding."""

import gc
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, UnsupportedError
from quire.contracts.config import EngineConfig
from quire.contracts.speculative import SpeculativeConfig
from quire.engine.inspect import inspect_model
from quire.engine.scheduling import check_invariants
from quire.worker.device.drafters import load_drafter
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.kernels.gpu.conftest import HAS_GPU
from tests.unit.kernels.gpu.test_captured_prompts import LogCapturer

sys.path.insert(0, str(Path(__file__).parents[2] / "speculate"))
import head_checkpoints as heads

pytestmark = pytest.mark.usefixtures("few_programs")
DEVICE = "cuda" if HAS_GPU else "interpreter"
SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
OPTIONS = {"dtype": "float32", "block_size": 16, "num_kv_blocks": 40, "max_model_len": 96, "max_num_seqs": 3}
COMMON = {"max_tokens": 7, "ignore_eos": True, "detokenize": False}
GREEDY = SamplingParams(temperature=0.0, **COMMON)
CUT = SamplingParams(temperature=0.9, top_k=9, top_p=0.9, seed=4, **COMMON)
PENALISED = SamplingParams(temperature=0.8, seed=6, repetition_penalty=1.2, logprobs=1, **COMMON)
PROMPTS = [[5, 9, 31, 7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [200, 3]]
HEADS = {"eagle3": heads.eagle3, "eagle": heads.eagle1, "mtp": heads.mtp, "medusa": heads.medusa}


def slow(*values):
    return [pytest.param(*value, marks=pytest.mark.slow) for value in values]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("heads") / "qwen3", "qwen3", **SHAPE)


@pytest.fixture(scope="module")
def drafted(model, tmp_path_factory):
    """The model that the head of a method is for: the layer of "mtp" is one of its own kind."""
    whole = write_checkpoint(tmp_path_factory.mktemp("heads") / "whole", "qwen3")
    return lambda method: whole if method == "mtp" else model


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another model, of the same vocabulary."""
    return write_checkpoint(tmp_path_factory.mktemp("heads") / "other", "qwen3", seed=1, **SHAPE)


def drafting(model, folder, method, device=DEVICE, drafts=None, **options):
    """Start an engine with drafts, and record every draft by its preceding tokens."""
    config = {"method": method, "model": str(folder), "num_speculative_tokens": 3, "adaptive": False, **(drafts or {})}
    is_chain = method != "medusa" and config.get("draft_top_k", 1) == 1
    if is_chain:
        config = {"draft_p_min": 0.0, **config}  # weights are random: what drafts with them is sure of nothing
    llm = LLM(str(model), device=device, speculative_config=config, **OPTIONS | options)
    proposer, noted = llm.llm_engine.speculator.proposer, {}
    propose = proposer.propose

    def note(wanted):
        found = propose(wanted)
        for (sequence, _), draft in zip(wanted, found, strict=True):
            noted[tuple(sequence.token_ids)] = draft.tokens, draft.parents
        return found

    proposer.propose = note
    return llm, noted


def said(outputs):
    return [choice.token_ids for output in outputs for choice in output.outputs]


def plain(model, prompts, params, device="cpu", **options):
    llm = LLM(str(model), device=device, **OPTIONS | options)
    found = said(llm.generate(prompts, params, use_tqdm=False))
    llm.close()
    return found


def expect_same_drafts(model, folder, method, prompts, params, drafts=None, **options):
    """Expect the tokens of plain decoding, and the drafts and their acceptance of the CPU; return the device's counts."""
    expected = plain(model, prompts, params, **options)
    on_cpu, wanted = drafting(model, folder, method, "cpu", drafts, **options)
    assert said(on_cpu.generate(prompts, params, use_tqdm=False)) == expected
    on_device, noted = drafting(model, folder, method, DEVICE, drafts, **options)
    outputs = on_device.generate(prompts, params, use_tqdm=False)
    assert said(outputs) == expected
    assert noted == wanted
    stats = on_device.llm_engine.stats
    there = on_cpu.llm_engine.stats
    assert stats.num_draft_tokens == there.num_draft_tokens > 0
    assert stats.num_accepted_tokens == there.num_accepted_tokens
    for llm in (on_cpu, on_device):
        check_invariants(llm.llm_engine.scheduler)
        assert llm.llm_engine.scheduler.kv.pool.num_free == (OPTIONS | options)["num_kv_blocks"]
        llm.close()
    return stats, outputs


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("eagle3", (GREEDY, CUT, PENALISED)),
        *slow(
            ("eagle3", (GREEDY,) * 3),
            ("eagle", (GREEDY,) * 3),
            ("eagle", (CUT, PENALISED, CUT)),
            ("mtp", (GREEDY,) * 3),
            ("mtp", (GREEDY, CUT, PENALISED)),
            ("medusa", (GREEDY, CUT, PENALISED)),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_head_drafts_on_the_device_what_it_drafts_on_the_cpu(drafted, tmp_path, method, params):
    expect_same_drafts(drafted(method), HEADS[method](tmp_path / method), method, PROMPTS, list(params))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_tokens_are_those_of_plain_decoding_when_a_head_drafts_in_bfloat16(drafted, tmp_path, method):
    model, options = drafted(method), {"dtype": "bfloat16"}
    # Few short ones, as bfloat16 is very slow where kernels are interpreted.
    prompts, params = PROMPTS[::2], [replace(one, max_tokens=4) for one in (GREEDY, PENALISED)]
    expected = plain(model, prompts, params, DEVICE, **options)
    llm, noted = drafting(model, HEADS[method](tmp_path / method), method, **options)
    assert said(llm.generate(prompts, params, use_tqdm=False)) == expected
    assert sum(len(tokens) for tokens, _ in noted.values()) > 3
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "eagle", "mtp", "medusa"])
def test_a_head_drafts_the_trees_that_it_drafts_on_the_cpu(drafted, tmp_path, method):
    folder = HEADS[method](tmp_path / method)
    drafts = {"draft_top_k": 2, "num_speculative_tokens": 5}
    _, outputs = expect_same_drafts(drafted(method), folder, method, PROMPTS, [GREEDY, CUT, PENALISED], drafts)
    assert len(outputs) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("eagle3", {"max_num_batched_tokens": 6}),
        ("mtp", {"max_num_batched_tokens": 6}),
        ("eagle3", {"block_size": 4, "num_kv_blocks": 7, "max_model_len": 24}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_head_drafts_the_same_when_prompts_are_chunked_or_sequences_are_preempted(drafted, tmp_path, method, options):
    _, outputs = expect_same_drafts(
        drafted(method), HEADS[method](tmp_path / method), method, PROMPTS, [GREEDY, CUT, CUT], **options
    )
    if "num_kv_blocks" in options:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_head_drafts_the_same_behind_cached_prefixes_and_forks(drafted, tmp_path, method):
    folder, params = HEADS[method](tmp_path / method), [SamplingParams(n=2, temperature=1.0, seed=11, **COMMON)] * 2
    options = {"block_size": 4, "max_num_seqs": 4}
    found = []
    for device in ("cpu", DEVICE):
        llm, noted = drafting(drafted(method), folder, method, device, **options)
        for _ in range(2):
            outputs = llm.generate(PROMPTS[:2], params, use_tqdm=False)
            found.append((said(outputs), dict(noted)))
            noted.clear()
        assert outputs[1].metrics.num_cached_tokens == 8
        llm.close()
    assert found[2:] == found[:2]


@pytest.mark.slow
@pytest.mark.parametrize("params", [(GREEDY,) * 3, (CUT, PENALISED, GREEDY)], ids=["greedy", "sampled"])
def test_a_draft_model_drafts_on_the_device_what_it_drafts_on_the_cpu(model, other, params):
    expect_same_drafts(model, other, "draft_model", PROMPTS, list(params))


@pytest.mark.parametrize("failing", ["drafters.DeviceKvPool", "build.build_speculator"])
def test_nothing_is_compiled_any_more_when_a_start_with_a_draft_model_fails(model, other, monkeypatch, failing):
    def fail(*_):
        raise ConfigError("a reason")

    ended, place = [], "quire.worker.device."
    for module in ("build", "drafters"):
        compilation = SimpleNamespace(stop=lambda module=module: ended.append(module))
        monkeypatch.setattr(f"{place}{module}.compile_ahead", lambda *_, compilation=compilation: compilation)
    monkeypatch.setattr(place + failing, fail)
    with pytest.raises(ConfigError, match="a reason"):
        drafting(model, other, "draft_model")
    assert ended == ["build", "drafters"]


@pytest.mark.skipif(HAS_GPU, reason="a GPU captures by itself")
@pytest.mark.parametrize("method", ["eagle3", *slow(("draft_model",), ("mtp",))])
def test_captured_steps_draft_what_those_launched_one_by_one_draft(drafted, other, tmp_path, monkeypatch, method):
    capturer = LogCapturer(monkeypatch)

    def load_capturing(target):
        drafter = load_drafter(target._replace(capturer=capturer))
        capturer.stepper = drafter.executors[0]
        capturer.more = [drafter.model.inputs] if method in HEADS else []
        return drafter

    monkeypatch.setattr("quire.worker.device.build.load_drafter", load_capturing)
    folder = other if method == "draft_model" else HEADS[method](tmp_path / method)
    expect_same_drafts(drafted(method), folder, method, PROMPTS, [GREEDY, CUT, GREEDY])
    assert capturer.num_replayed > capturer.num_captured > 1


OWN = [
    {},
    *[
        pytest.param(options, marks=pytest.mark.slow)
        for options in (
            {"block_size": 4, "num_kv_blocks": 7, "max_model_len": 24},
            {"max_num_batched_tokens": 6},
            {"max_num_seqs": 1},
        )
    ],
]


@pytest.mark.parametrize("options", OWN, ids=["roomy", "preempted", "chunked", "one seat"])
def test_every_draft_is_accepted_when_the_model_drafts_for_itself(model, options):
    """Unless its keys and values on the device are wrong."""
    params = [GREEDY, CUT, GREEDY]
    expected = plain(model, PROMPTS, params, **options)
    llm, _ = drafting(model, model, "draft_model", **options)
    for _ in range(2 if options else 1):  # the second time with cached prefixes
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert said(outputs) == expected
    stats = llm.llm_engine.stats
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    if "num_kv_blocks" in options:
        assert llm.llm_engine.scheduler.num_preemptions > 0
    check_invariants(llm.llm_engine.scheduler)
    llm.close()


@pytest.mark.slow
def test_a_prompt_longer_than_a_catch_up_is_taken_in_over_several_steps(model, monkeypatch):
    """As many tokens in each as the largest step of the model has, or of what drafts."""
    monkeypatch.setattr("quire.worker.device.drafters.MAX_CATCH_UP", 4)
    llm, noted = drafting(model, model, "draft_model", max_num_batched_tokens=6)
    llm.generate(PROMPTS[1:2], [GREEDY], use_tqdm=False)
    stats = llm.llm_engine.stats
    assert [len(tokens) for tokens, _ in noted.values()][:3] == [0, 0, 3]
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    llm.close()


@pytest.mark.slow
def test_more_known_tokens_than_a_step_takes_are_taken_in_by_several(model, tmp_path, monkeypatch):
    expected = plain(model, PROMPTS, [GREEDY] * 3)
    llm, noted = drafting(model, heads.eagle3(tmp_path / "head"), "eagle3")
    llm.generate(PROMPTS, [GREEDY] * 3, use_tqdm=False)
    llm.close()
    cut, again = drafting(model, tmp_path / "head", "eagle3")
    chains = cut.llm_engine.speculator.proposer.model
    monkeypatch.setattr(chains, "sizes", chains.sizes._replace(max_num_batched_tokens=12))
    assert said(cut.generate(PROMPTS, [GREEDY] * 3, use_tqdm=False)) == expected
    assert again == noted
    cut.close()


@pytest.mark.slow
def test_drafts_end_where_the_head_doubts_as_on_the_cpu(model, tmp_path):
    folder = heads.eagle3(tmp_path / "head")
    found = {}
    for share in (0.0, 0.5):
        drafts = {"draft_p_min": share, "num_speculative_tokens": 4}
        stats, _ = expect_same_drafts(model, folder, "eagle3", PROMPTS, [GREEDY] * 3, drafts)
        found[share] = stats.num_draft_tokens
    assert found[0.5] < found[0.0]


@pytest.mark.slow
def test_a_head_and_another_method_are_merged(model, tmp_path):
    drafts = {"method": ["eagle3", "ngram"], "prompt_lookup_min": 1}
    expect_same_drafts(model, heads.eagle3(tmp_path / "head"), "eagle3", [[4, 5, 4, 5, 4]], [GREEDY], drafts)


@pytest.mark.slow
def test_a_head_drafts_again_when_drafts_were_paused(model, tmp_path):
    llm, noted = drafting(model, heads.eagle3(tmp_path / "head"), "eagle3")
    expected = said(llm.generate(PROMPTS[:1], [GREEDY], use_tqdm=False))
    before = dict(noted)
    speculator = llm.llm_engine.speculator
    llm.llm_engine.use_speculator(speculator.with_proposer(None))
    noted.clear()
    assert said(llm.generate(PROMPTS[:1], [GREEDY], use_tqdm=False)) == expected
    assert not noted
    llm.llm_engine.use_speculator(speculator)
    assert said(llm.generate(PROMPTS[:1], [GREEDY], use_tqdm=False)) == expected
    assert noted == before
    llm.close()


def test_trees_of_a_head_with_a_window_are_refused_before_the_model_is_loaded(tmp_path):
    model = write_checkpoint(tmp_path / "mistral", "mistral")
    folder = heads.mtp(tmp_path / "head", qk_norm=False)
    drafts = SpeculativeConfig(method="mtp", model=str(folder), num_speculative_tokens=3, draft_top_k=2)
    with pytest.raises(UnsupportedError, match="draft_top_k is 2, but the head .* sliding-window"):
        inspect_model(EngineConfig(model=str(model), device=DEVICE, speculative_config=drafts, **OPTIONS))


@pytest.mark.parametrize(
    ("method", "wrong", "words"),
    [
        ("draft_model", "missing", "speculative_config: model: .*missing"),
        ("draft_model", "vocabulary", "vocabulary of 200, the model one of"),
        ("draft_model", "eagle3", "is not a draft model but a draft head"),
        ("eagle3", "eagle", "a head of another kind"),
        ("medusa", "eagle", "a head of another kind"),
    ],
)
def test_what_cannot_draft_is_refused_before_the_model_is_loaded(model, tmp_path, method, wrong, words):
    folder = tmp_path / wrong
    if wrong == "vocabulary":
        write_checkpoint(folder, "qwen3", vocab_size=200)
    elif wrong in HEADS:
        HEADS[wrong](folder)
    drafts = SpeculativeConfig(method=method, model=str(folder), num_speculative_tokens=3)
    with pytest.raises(ConfigError, match=words):
        inspect_model(EngineConfig(model=str(model), device=DEVICE, speculative_config=drafts, **OPTIONS))


@pytest.mark.parametrize(("method", "block_bytes"), [("eagle3", 2048), ("draft_model", 4096), ("medusa", 0)])
def test_what_drafts_is_counted_before_the_cache_is_made(model, other, tmp_path, monkeypatch, method, block_bytes):
    """A block of 16 tokens has keys and values of 16 numbers, of one layer or of two."""
    found = []

    def load_and_run(target):
        drafter = load_drafter(target)
        drafter.run_full()
        found.append(drafter)
        return drafter

    for name, count in (("MAX_PENDING", 8), ("MAX_CATCH_UP", 16)):  # of so many tokens the largest step is
        monkeypatch.setattr(f"quire.worker.device.drafters.{name}", count)
    monkeypatch.setattr("quire.worker.device.build.load_drafter", load_and_run)
    folder = other if method == "draft_model" else HEADS[method](tmp_path / method)
    llm, _ = drafting(model, folder, method, max_num_batched_tokens=12)
    (drafter,) = found
    assert drafter.block_bytes == block_bytes
    waiting = {"eagle3": 3 * 16 + 12, "draft_model": 0, "medusa": 3}[method]
    assert drafter.held_bytes == 2 * waiting * 32 * 4
    assert [stepper.kv_pool.num_blocks for stepper in drafter.executors] == [40] * (method != "medusa")
    llm.close()


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_nothing_of_what_drafts_and_of_its_model_is_left_behind_an_end(model, other, tmp_path, method):
    """Were it left to the collector, which does not look at what was there when the engine was, it would stay for ever."""
    folder = other if method == "draft_model" else HEADS[method](tmp_path / method)
    config = {"method": method, "model": str(folder), "num_speculative_tokens": 2, "adaptive": False}
    llm = LLM(str(model), device=DEVICE, speculative_config=config | {"draft_p_min": 0.0}, **OPTIONS)
    proposer = llm.llm_engine.speculator.proposer
    drafter = proposer.drafter if method == "draft_model" else proposer.model
    kept = [weakref.ref(part) for part in (llm.llm_engine.runner.executor.decoder, drafter.decoder, drafter.executor)]
    del proposer, drafter
    llm.generate(PROMPTS[2:], [SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)], use_tqdm=False)
    assert llm.llm_engine.stats.num_draft_tokens > 0
    gc.disable()
    try:
        llm.close()
        assert [part() for part in kept] == [None] * 3
    finally:
        gc.enable()
