"""Drafts and constraints together: with every method the outputs equal those of constrained decoding without drafts."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("llguidance")

import head_checkpoints
from proposers import PROPOSERS, TREES, install

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.engine.scheduling import check_invariants
from quire.kernels.native import load_native
from tests.unit.engine.one_compiler import one_compiler

pytestmark = pytest.mark.skipif(load_native() is None, reason="needs the native kernels, whose sums have one order")

SCHEMA = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 0, "maximum": 999},
        "label": {"enum": ["short", "longer", "longest"]},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["identifier", "label"],
    "additionalProperties": False,
}
REASONED = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "<think>", "content": {"type": "regex", "pattern": "[a-e]{0,9}"}, "end": "</think>"},
            {"type": "json_schema", "json_schema": SCHEMA},
        ],
    },
}
ASKED = [
    {"json": SCHEMA},
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"regex": "(ab|cd){2,5}-end of it"},
    {"choice": ["a rather long choice", "a rather short one", "b"]},
    {"structural_tag": REASONED},
    {"grammar": 'root ::= word ("," word)+\nword ::= "on" | "off"'},
    None,
    None,
]
KINDS = (
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0},
    {"temperature": 1.0, "typical_p": 0.9},
    {"temperature": 1.2, "repetition_penalty": 1.3, "logprobs": 1},
)
PROMPTS = [[7, 8, 9], list(range(20, 60)), [5] * 17, [*range(20, 52), 1], [250, 3], [1, 2], [9, 8], [7, 7, 7, 7, 7]]
ALL = tuple(range(len(PROMPTS)))
COUNT = 5
OPTIONS = {"max_num_seqs": 8, "block_size": 16, "num_kv_blocks": 100}
NO_XGRAMMAR = pytest.mark.skipif(find_spec("xgrammar") is None, reason="xgrammar is not installed; a stage of .ci/run has it")
BACKENDS = ("llguidance", pytest.param("xgrammar", marks=NO_XGRAMMAR))


def params(index, seed=0, backend="llguidance", **more):
    asked = ASKED[index]
    fields = {"max_tokens": 70, "seed": 10 * seed + index, **KINDS[(index + seed) % len(KINDS)], **more}
    wanted = None if asked is None else StructuredOutputsParams(**asked, backend=backend)
    return SamplingParams(structured_outputs=wanted, **fields)


def start(model, **options):
    return LLM(str(model), **{**OPTIONS, **options})


def generate(llm, seed, indices=ALL, **more):
    outputs = llm.generate([PROMPTS[i] for i in indices], [params(i, seed, **more) for i in indices], use_tqdm=False)
    check_invariants(llm.llm_engine.scheduler)
    return [output.outputs[0] for output in outputs], outputs


def said(choice):
    return choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason, choice.logprobs, choice.cumulative_logprob


@pytest.fixture(scope="module", autouse=True)
def compiled():
    with one_compiler():
        yield


def test_forced_tokens_stay_undrafted_when_drafts_pause_and_go_on(tiny_model):
    llm = start(tiny_model)
    runner = llm.llm_engine.runner
    drafting = llm.llm_engine.speculator
    undrafted = drafting.with_proposer(None)
    llm.llm_engine.draft_forced(False)
    for speculator in (undrafted, drafting):
        llm.llm_engine.use_speculator(speculator)
        assert not runner.speculator.drafts_forced
    llm.llm_engine.use_speculator(undrafted)
    llm.llm_engine.draft_forced(True)
    assert runner.speculator.drafts_forced
    llm.llm_engine.use_speculator(drafting)
    assert runner.speculator.drafts_forced
    llm.close()


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request):
    return request.param


def generate_plain(model, backend, **options):
    """Each request by itself, without drafts, those that are forced included."""
    llm = start(model, enable_prefix_caching=False, **options)
    llm.llm_engine.draft_forced(False)
    found = [[generate(llm, seed, [i], backend=backend)[0][0] for i in range(len(PROMPTS))] for seed in range(2)]
    assert llm.llm_engine.stats.num_drafts == 0
    llm.close()
    return found


@pytest.fixture(scope="module")
def plain(tiny_model):
    return generate_plain(tiny_model, "llguidance")


@pytest.fixture(scope="module")
def plain_of_backend(tiny_model, backend, plain):
    return plain if backend == "llguidance" else generate_plain(tiny_model, backend)


def speculating(model, kind, outputs, **options):
    if kind in PROPOSERS:
        by_prompt = {(tuple(prompt), 0): choice.token_ids for prompt, choice in zip(PROMPTS, outputs, strict=True)}
        llm = start(model, **options)
        install(llm, PROPOSERS[kind](COUNT, by_prompt), COUNT)
        return llm
    config = {"method": kind, "num_speculative_tokens": COUNT, "adaptive": False}
    if kind in HEADS:
        folder = Path(model).parent / f"constrained-{kind}"
        maker, more = HEADS[kind]
        config |= {"model": str(folder if folder.is_dir() else maker(folder)), "num_speculative_tokens": 10, **more}
    else:
        config |= {"model": str(model)} if kind == "draft_model" else {"prompt_lookup_min": 1}
    if kind == "lookahead":
        del config["num_speculative_tokens"], config["prompt_lookup_min"]
    if kind == "self":
        config = {"method": "self", "skipped_layers": [1], "num_speculative_tokens": COUNT, "adaptive": False}
    return start(model, speculative_config=config, **options)


HEADS = {
    "eagle": (head_checkpoints.eagle1, {"draft_p_min": 0.0}),
    "eagle3": (head_checkpoints.eagle3, {"draft_p_min": 0.0}),
    "medusa": (head_checkpoints.medusa, {}),
    "mtp tree": (head_checkpoints.mtp, {"method": "mtp", "draft_top_k": 3}),
    "eagle3 tree": (head_checkpoints.eagle3, {"method": "eagle3", "draft_top_k": 3}),
    "mtp": (head_checkpoints.mtp, {"draft_p_min": 0.0}),
    "medusa tree": (head_checkpoints.medusa, {"method": "medusa", "draft_top_k": 3}),
    "eagle3 merged": (
        head_checkpoints.eagle3,
        {"method": ["eagle3", "ngram", "suffix"], "prompt_lookup_min": 1, "draft_p_min": 0.0},
    ),
}
# Each kind of proposer with one of the seeds, which say how each prompt is sampled.
CASES = [(kind, index % 2) for index, kind in enumerate((*PROPOSERS, "ngram", "suffix", "draft_model"))]
RUN_ALWAYS = ("lookahead", "self", "eagle3 tree", "eagle3 merged")
CASES += [
    pytest.param(kind, index % 2, marks=[] if kind in RUN_ALWAYS else pytest.mark.slow)
    for index, kind in enumerate(("lookahead", "self", *HEADS))
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_same_outputs_when_drafts_meet_constraints(tiny_model, backend, plain_of_backend, kind, seed):
    plain = plain_of_backend
    llm = speculating(tiny_model, kind, plain[seed])
    # Cold, then some with cached prefixes, as all in the slow test below and, free, in test_drafts_change_no_token.py.
    for _ in range(2 if kind in ("oracle", "fickle", "ngram", "draft_model", "eagle3 tree") else 1):
        assert [said(choice) for choice in generate(llm, seed, backend=backend)[0]] == [said(choice) for choice in plain[seed]]
    llm.close()


SELDOM = [pytest.param(kind, marks=pytest.mark.slow) for kind in (*TREES, "mtp", "medusa tree", "eagle3 merged")]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["oracle", "fickle", "eagle3 tree", *SELDOM])
def test_same_outputs_when_constrained_sequences_are_preempted(tiny_model, backend, plain_of_backend, kind):
    plain = plain_of_backend
    llm = speculating(tiny_model, kind, plain[0], num_kv_blocks=12)
    found, outputs = generate(llm, 0, backend=backend)
    assert [said(choice) for choice in found] == [said(choice) for choice in plain[0]]
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    llm.close()


EVERY_KIND = (*PROPOSERS, "ngram", "suffix", "lookahead", "self", "draft_model", *HEADS)
CACHES = {"bf16": {"dtype": "bfloat16"}, "int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"}}


@pytest.fixture(scope="module", params=CACHES)
def cache(request):
    return CACHES[request.param]


@pytest.fixture(scope="module")
def plain_in_cache(tiny_model, cache):
    return generate_plain(tiny_model, "llguidance", **cache)


@pytest.mark.slow
@pytest.mark.covering
@pytest.mark.parametrize("num_blocks", [12, 80], ids=["preempted", "roomy"])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_same_outputs_when_constraints_meet_any_cache_drafts_and_preemption(
    tiny_model, cache, plain_in_cache, kind, num_blocks
):
    # Seeds take turns: each kind meets both in each cache, and preempted as well as roomy.
    seed = (EVERY_KIND.index(kind) + list(CACHES.values()).index(cache) + (num_blocks == 80)) % 2
    llm = speculating(tiny_model, kind, plain_in_cache[seed], num_kv_blocks=num_blocks, **cache)
    for _ in range(2):  # cold, then with cached prefixes
        found, outputs = generate(llm, seed)
        assert [said(choice) for choice in found] == [said(choice) for choice in plain_in_cache[seed]]
        assert num_blocks == 80 or sum(output.metrics.num_preemptions for output in outputs) > 0
    llm.close()


@pytest.mark.parametrize(
    "options", [{}, {"num_kv_blocks": 18}, {"max_num_batched_tokens": 12}], ids=["", "preempted", "budget"]
)
def test_forced_tokens_need_no_steps_of_their_own_and_always_match(tiny_model, plain, options):
    llm = start(tiny_model, **options)
    llm.llm_engine.runner.grammar_masks.wait_policy = None
    for seed, expected in enumerate(plain):
        assert [said(choice) for choice in generate(llm, seed)[0]] == [said(choice) for choice in expected]
    stats = llm.llm_engine.stats
    # A token behind which nothing can follow ends its output: what was computed behind it does not count.
    num_ended = sum(choice.finish_reason == "stop" for found in plain for choice in found)
    assert stats.num_draft_tokens - num_ended <= stats.num_accepted_tokens > 100
    llm.close()


def test_forced_tokens_save_steps_when_a_request_is_alone(tiny_model, plain):
    llm = start(tiny_model)
    llm.llm_engine.runner.grammar_masks.wait_policy = None
    choice = generate(llm, 0, [1])[0][0]
    assert said(choice) == said(plain[0][1])
    stats = llm.llm_engine.stats
    assert stats.num_steps == len(choice.token_ids) - stats.num_accepted_tokens < len(choice.token_ids) / 2
    llm.close()


def test_logits_are_computed_where_something_is_sampled_and_nowhere_else(tiny_model, plain, monkeypatch):
    llm = start(tiny_model)
    runner = llm.llm_engine.runner
    runner.grammar_masks.wait_policy = None
    num_rows = []
    run = runner.executor.target.model.run

    def count(runs, kv, logit_rows, *args, **options):
        num_rows.append(len(logit_rows))
        return run(runs, kv, logit_rows, *args, **options)

    monkeypatch.setattr(runner.executor.target.model, "run", count)
    choice = generate(llm, 0, [1])[0][0]
    assert said(choice) == said(plain[0][1])
    stats = llm.llm_engine.stats
    # Of drafts in a row the last one has logits behind it, and the token before them has.
    assert stats.num_draft_tokens > 2 * stats.num_drafts
    assert sum(num_rows) == stats.num_steps + stats.num_drafts
    llm.close()


def test_drafts_are_cut_to_what_the_constraint_takes(tiny_model, plain):
    llm = speculating(tiny_model, "adversary", plain[0])
    generate(llm, 0, [0, 1, 2, 3, 4])
    with_adversary = llm.llm_engine.stats
    llm.close()
    assert with_adversary.num_accepted_tokens > 0.7 * with_adversary.num_draft_tokens  # those that are forced


def test_same_choices_when_several_are_constrained(tiny_model):
    request = params(0, n=4, temperature=1.0)
    found = []
    for kind in (None, "ngram", "draft_model"):
        llm = start(tiny_model) if kind is None else speculating(tiny_model, kind, [])
        outputs = llm.generate([PROMPTS[1]], request, use_tqdm=False)[0].outputs
        found.append([said(choice) for choice in outputs])
        llm.close()
    assert found[0] == found[1] == found[2]


def test_plain_outputs_match_their_constraints(plain):
    ended = [choice for found in plain for choice, asked in zip(found, ASKED, strict=True) if asked and "json" in asked]
    ended = [choice for choice in ended if choice.finish_reason == "stop"]
    assert ended
    for choice in ended:
        assert json.loads(choice.text)["label"] in SCHEMA["properties"]["label"]["enum"]
