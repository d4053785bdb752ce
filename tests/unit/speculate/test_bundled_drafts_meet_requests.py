"""Options of requests other than tokens, with accepted runs of drafts: the answers equal those of plain decoding."""

import asyncio
import functools

import pytest

pytest.importorskip("llguidance")

from bundled_runs import BUNDLED, PROMPTS, SCHEMA, note_runs, said, start

from quire import AsyncLLM, SamplingParams, StructuredOutputsParams
from quire.contracts.sampling_params import BeamSearchParams
from quire.engine.scheduling import check_invariants
from quire.kernels.native import load_native
from tests.unit.engine.one_compiler import one_compiler

pytestmark = pytest.mark.skipif(load_native() is None, reason="needs the native kernels, whose sums have one order")

LENGTH = 40
JSON = {"structured_outputs": StructuredOutputsParams(json=SCHEMA, fit_max_tokens=False)}
TEMPERATURES = (0, 1, 0.5)
LONG = " ".join(PROMPTS)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    with one_compiler():
        yield


def asked(seed, **more):
    """Return a request; its seed tells it from the others."""
    options = {"temperature": TEMPERATURES[seed % 3], "seed": seed, "max_tokens": LENGTH}
    return SamplingParams(**{**options, "ignore_eos": "structured_outputs" not in more, **more})


@functools.cache
def free_texts():
    """Return what is said to every prompt at every temperature without further wishes."""
    llm = start(None)
    outputs = llm.generate(PROMPTS * 3, [asked(seed) for seed in range(len(PROMPTS) * 3)], use_tqdm=False)
    llm.close()
    return [output.outputs[0].text for output in outputs]


def stopped():
    """Each text is stopped by letters from the midst of it, which come at the end or in the midst of a token."""
    return [
        (PROMPTS[seed % len(PROMPTS)], asked(seed, stop=[text[at : at + 3]], include_stop_str_in_output=seed % 2 == 0))
        for seed, text in enumerate(free_texts())
        for at in [len(text) // 2 + seed % 3]
    ]


def banned():
    """Words that would come, across the borders of tokens too, without a constraint and within one."""
    words = [[text[10:14].strip(), text[25:32].strip()] for text in free_texts()]
    free = [(PROMPTS[seed % len(PROMPTS)], asked(seed, bad_words=words[seed], logprobs=1)) for seed in range(6)]
    return free + [(PROMPTS[seed % 3], asked(seed, bad_words=["detective", "e s"], **JSON)) for seed in range(6, 12)]


CASES = {
    "stop strings": (stopped, {}),
    "banned words": (banned, {}),
    "prompt logprobs": (lambda: [(PROMPTS[seed % 3], asked(seed, prompt_logprobs=seed % 2)) for seed in range(6)], {}),
    "choices in a small cache": (
        lambda: [
            (PROMPTS[seed], asked(seed, n=3, logprobs=0, **(JSON if seed % 2 else {}), temperature=1)) for seed in range(4)
        ],
        {"num_kv_blocks": 25},
    ),
    "pieces of prompts": (
        lambda: [((LONG, PROMPTS[seed % 3])[seed % 2], asked(seed, **(JSON if seed % 3 else {}))) for seed in range(6)],
        {"long_prefill_token_threshold": 13, "max_num_batched_tokens": 32},
    ),
}
KINDS = ("eagle3 tree", "eagle3 merged", "mtp", "medusa tree", "draft_model", "lookahead", "suffix", "self")


@pytest.fixture(scope="module")
def plain():
    """Return a function of a case: its requests, and what is said to each alone."""

    @functools.cache
    def find(case):
        requests = CASES[case][0]()
        llm = start(None, enable_prefix_caching=False)
        outputs = [llm.generate([prompt], [params], use_tqdm=False)[0] for prompt, params in requests]
        llm.close()
        return requests, outputs

    return find


def answers(outputs):
    return [(output.error, output.prompt_logprobs, [said(choice) for choice in output.outputs]) for output in outputs]


# Each case with one kind, in turn, and with two others in the slow tests: every kind meets one to three of the cases.
CHOSEN = [
    pytest.param(case, KINDS[(index + turn) % len(KINDS)], marks=[] if turn == 0 else pytest.mark.slow)
    for index, case in enumerate(CASES)
    for turn in (0, 3, 6)
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("case", "kind"), CHOSEN)
def test_same_answers_whatever_is_asked_for(plain, case, kind):
    requests, expected = plain(case)
    llm = start(kind, **CASES[case][1])
    runs, num_preemptions = note_runs(llm.llm_engine), 0
    for turn in range(2):  # what was computed behind an end is never found as if it were known
        outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)
        assert answers(outputs) == answers(expected)
        if case == "stop strings" and turn == 0:
            expect_stops_within_runs(outputs, runs)
        num_preemptions += sum(output.metrics.num_preemptions for output in outputs)
    assert num_preemptions > 0 or case != "choices in a small cache"
    least = 1 if kind == "lookahead" else 2  # whose guesses start anew behind a preemption
    assert sum(count >= least for counts in runs.values() for count in counts) >= 3
    check_invariants(llm.llm_engine.scheduler)
    pool = llm.llm_engine.scheduler.kv.pool
    assert pool.num_free == CASES[case][1].get("num_kv_blocks", 120)
    llm.close()


def expect_stops_within_runs(outputs, runs):
    """Most stop; and of some, tokens were taken from behind the stop: it was within a run."""
    choices = [output.outputs[0] for output in outputs]
    assert sum(choice.finish_reason == "stop" for choice in choices) >= 10
    taken = [sum(count + 1 for count in runs[seed]) for seed in range(len(choices))]
    assert any(count > len(choice.token_ids) for count, choice in zip(taken, choices, strict=True))


def test_the_words_of_the_tests_would_come_if_they_were_not_banned(plain):
    requests, outputs = plain("banned words")
    words = [word for _, params in requests[:6] for word in params.bad_words]
    assert sum(word in text for word in words for text in free_texts()) >= 6
    for (_, params), output in zip(requests, outputs, strict=True):
        assert not any(word in output.outputs[0].text for word in params.bad_words)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["eagle3", "lookahead", pytest.param("draft_model", marks=pytest.mark.slow)])
def test_same_beams_with_and_without_a_constraint(kind):
    found = []
    for one in (None, kind):
        llm = start(one)
        beams = [llm.beam_search([*PROMPTS[:2]], BeamSearchParams(beam_width=3, max_tokens=12, **more)) for more in ({}, JSON)]
        found.append([[(beam.tokens, beam.text, beam.finish_reason) for beam in o.sequences] for part in beams for o in part])
        assert llm.llm_engine.scheduler.kv.pool.num_free == 120
        llm.close()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "kind", ["eagle3 merged", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mtp", "medusa tree"))]
)
def test_streams_join_to_whole_answers_beside_others_that_are_left(plain, kind):
    requests, expected = plain("stop strings")
    config = {"adaptive": False, **BUNDLED[kind]}
    options = {"num_threads": 1, "max_num_seqs": 6, "num_kv_blocks": 60, "max_model_len": 256}
    llm = AsyncLLM("demo", speculative_config=config, **options)
    runs = note_runs(llm.engine)

    async def read(prompt, params):
        return [output async for output in llm.generate(prompt, params)]

    async def leave(index):
        stream = llm.generate(PROMPTS[index % 4], asked(100 + index, max_tokens=150, **(JSON if index % 2 else {})))
        for _ in range(1 + index % 5):
            await anext(stream)
        await stream.aclose()

    async def run():
        whole = [read(prompt, params) for prompt, params in requests]
        streams = (await asyncio.gather(*whole, *(leave(index) for index in range(12))))[: len(whole)]
        await read("x", asked(200, max_tokens=1))  # what was left is aborted by now
        return streams

    streams = asyncio.run(run())
    for deltas, output in zip(streams, expected, strict=True):
        whole, last = output.outputs[0], deltas[-1].outputs[0]
        assert "".join(delta.outputs[0].text for delta in deltas) == whole.text
        assert [token_id for delta in deltas for token_id in delta.outputs[0].token_ids] == whole.token_ids
        assert (last.finish_reason, last.stop_reason) == (whole.finish_reason, whole.stop_reason)
    assert max(len(delta.outputs[0].token_ids) for deltas in streams for delta in deltas) >= 3
    assert sum(count >= 2 for counts in runs.values() for count in counts) >= 3
    check_invariants(llm.engine.scheduler)
    assert llm.engine.scheduler.kv.pool.num_free == 60
    llm.close()
