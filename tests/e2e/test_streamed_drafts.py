"""Drafts over HTTP: streams and whole answers equal those without drafts, and disconnects leak no block."""

import asyncio
import json

import pytest

pytest.importorskip("llguidance")

from quire import LLM, SamplingParams, StructuredOutputsParams
from tests.e2e.server_process import serving
from tests.e2e.wire import Wire, assert_recovered, completion

pytestmark = pytest.mark.slow

PROMPT = "It was late in the autumn when the old gentleman returned to the house, and he found that"
SCHEMA = {"type": "object", "properties": {"said": {"type": "string", "maxLength": 60}}, "required": ["said"]}
CONFIGS = [
    {"method": ["eagle3", "ngram", "suffix"], "model": "demo-eagle3", "num_speculative_tokens": 10, "adaptive": False},
    {"method": "medusa", "model": "demo-medusa", "draft_top_k": 3, "adaptive": False},
    {"method": "mtp", "model": "demo-mtp"},
]


@pytest.fixture(scope="module", params=CONFIGS, ids=["eagle3 merged", "medusa tree", "adaptive mtp"])
def config(request):
    return request.param


@pytest.fixture(scope="module")
def server(config):
    options = ("--no-page", "--max-num-seqs", "8", "--complete-json-within-max-tokens")
    with serving("--speculative-config", json.dumps(config), *options) as running:
        yield running


@pytest.fixture(scope="module")
def expected():
    """Return the bodies of requests, and what is said to each without drafts."""
    llm = LLM("demo", num_kv_blocks=200, num_threads=1, complete_json_within_max_tokens=True)
    free = [SamplingParams(temperature=i % 2, seed=i, max_tokens=60) for i in range(4)]
    texts = [output.outputs[0].text for output in llm.generate([PROMPT] * 4, free, use_tqdm=False)]
    stops = [text[len(text) // 2 :][:3] for text in texts]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=60, stop=[stop]) for i, stop in enumerate(stops)]
    asked = StructuredOutputsParams(json=SCHEMA)
    params += [SamplingParams(temperature=i % 2, seed=i, max_tokens=60, structured_outputs=asked) for i in range(2)]
    outputs = llm.generate([PROMPT] * 6, params, use_tqdm=False)
    llm.close()
    bodies = [{"temperature": i % 2, "seed": i, "stop": stop} for i, stop in enumerate(stops)]
    bodies += [{"temperature": i % 2, "seed": i, "guided_json": SCHEMA} for i in range(2)]
    common = {"model": "demo", "prompt": PROMPT, "max_tokens": 60, "top_p": 1}
    return [({**common, **body}, output.outputs[0]) for body, output in zip(bodies, outputs, strict=True)]


def test_streams_and_whole_answers_are_those_without_drafts(server, config, expected):
    accepted = server.metric("quire:spec_decode_num_accepted_tokens_total")
    for body, choice in expected:
        (whole,) = server.post("/v1/completions", body).json()["choices"]
        assert (whole["text"], whole["finish_reason"]) == (choice.text, choice.finish_reason)
        lines = server.post("/v1/completions", {**body, "stream": True}).text.split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        parts = [part for chunk in chunks for part in chunk["choices"]]
        assert "".join(part["text"] for part in parts) == choice.text
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice.finish_reason]
    if not config.get("adaptive", True):  # how many the pace drafts depends on the machine
        assert server.metric("quire:spec_decode_num_accepted_tokens_total") > accepted + 40


@pytest.mark.parametrize("how", ["close", "reset"])
def test_no_block_is_left_when_clients_go_amid_drafts(server, how):
    async def go():
        wires = [
            await Wire.send(server, "/v1/completions", completion(900, stream=True, seed=index, temperature=index % 2))
            for index in range(12)
        ]
        for wire in wires[:6]:
            await wire.read_event()
        for wire in wires:
            getattr(wire, how)()

    asyncio.run(go())
    assert_recovered(server)
