"""lm-eval's own client with its remote tokenizer: the log likelihoods and texts that the engine gives."""

import pytest

from quire import LLM, SamplingParams
from tests.e2e.tooled_model import KEY, TEMPLATE

pytest.importorskip("lm_eval", reason="needs lm-eval with aiohttp and tenacity, see .ci/run")
pytest.importorskip("tenacity")
pytest.importorskip("aiohttp")
pytestmark = pytest.mark.slow

EOS = 0
CONTEXT, CONTINUATIONS = "It was a cold morning when", (" the", " zebra stripes", " it began to rain")


@pytest.fixture
def client(tooled_server, monkeypatch):
    """Return lm-eval's client, which finds out by itself that the server has a tokenizer."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    return LocalCompletionsAPI(
        base_url=f"{tooled_server.url}/v1/completions", model="demo", auth_token=KEY, max_length=512, num_concurrent=1
    )


def requests_of(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


@pytest.fixture(scope="module")
def llm():
    llm = LLM("demo", device="cpu", num_kv_blocks=64)
    yield llm
    llm.close()


def test_remote_tokenizer_is_that_of_the_model(client, llm):
    remote, tokenizer = client.tokenizer, llm.get_tokenizer()
    assert client.tokenizer_backend == "remote"
    for text in (CONTEXT, "Été 🙂\n\n", ""):
        assert remote.encode(text) == tokenizer.encode(text, False)
        assert remote.decode(remote.encode(text)) == text
    assert remote.eos_token_id == remote.eot_token == EOS
    assert remote.tokenizer_info["chat_template"] == TEMPLATE


def test_log_likelihoods_are_those_of_the_engine(client, llm):
    found = client.loglikelihood(requests_of("loglikelihood", *((CONTEXT, each) for each in CONTINUATIONS)))
    tokenizer = llm.get_tokenizer()
    num_context = len(tokenizer.encode(CONTEXT, False))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    for (likelihood, is_greedy), continuation in zip(found, CONTINUATIONS, strict=True):
        ids = tokenizer.encode(CONTEXT + continuation, False)
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        steps = list(zip(ids, output.prompt_logprobs, strict=True))[num_context:]
        assert likelihood == pytest.approx(sum(step[token].logprob for token, step in steps), abs=1e-3)
        assert is_greedy == all(step[token].rank == 1 for token, step in steps)


def test_text_is_generated_until_a_stop_string(client, llm):
    (found,) = client.generate_until(requests_of("generate_until", (CONTEXT, {"until": ["."], "max_gen_toks": 24})))
    params = SamplingParams(temperature=0, max_tokens=24, stop=["."])
    assert found == llm.generate([CONTEXT], params, use_tqdm=False)[0].outputs[0].text
