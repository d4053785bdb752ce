"""The small real checkpoint of the shared data generates its recorded tokens."""

import json
from pathlib import Path

import pytest

from quire import LLM, SamplingParams

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "checkpoints" / "stories260K"

pytestmark = [
    pytest.mark.golden,
    pytest.mark.skipif(not FOLDER.exists(), reason="../shared/data is not there"),
]


@pytest.fixture(scope="module")
def cases():
    return json.loads((FOLDER / "greedy.json").read_text())


def test_recorded_tokens_and_text_are_generated(cases):
    llm = LLM(str(FOLDER))
    length = len(cases[0]["greedy_token_ids"])
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    outputs = llm.generate([case["prompt"] for case in cases], params, use_tqdm=False)
    for case, output in zip(cases, outputs, strict=True):
        assert output.prompt_token_ids == case["prompt_token_ids"]
        assert output.outputs[0].token_ids == case["greedy_token_ids"]
        # Recorded is the decode of the output alone, which loses the space between it and the prompt.
        assert output.outputs[0].text.removeprefix(" ") == case["text"]
        whole = llm.get_tokenizer().decode(output.prompt_token_ids + output.outputs[0].token_ids)
        assert case["prompt"] + output.outputs[0].text == whole
    llm.close()
