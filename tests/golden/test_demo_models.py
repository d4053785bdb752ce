"""The bundled models: transformers loads them too and generates the same tokens; their cards are honest."""

import math
import re
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.base.bundled import tokenizer_folder
from quire.model.build import load_model, whole_prompt_logits
from quire.model.resolve import BUNDLED_MODELS, resolve_model
from tests.golden.greedy import greedy_choices

pytestmark = pytest.mark.golden

PROMPTS = ["It was a cold morning when", '"My dear Watson," said', "She had never been so happy as", "The river"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
TEXT = Path(__file__).resolve().parents[3] / "shared" / "data" / "text" / "classic_prose.txt"


def reference(name, dtype):
    """Return the model and the tokenizer of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model(name)
    options = {"experts_implementation": "eager"} if name == "demo-moe" else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager", **options).eval()
    return model, AutoTokenizer.from_pretrained(tokenizer_folder(folder))


@pytest.mark.parametrize("name", BUNDLED_MODELS)
def test_transformers_generates_the_same_tokens(name):
    model, tokenizer = reference(name, torch.float32)
    llm = LLM(name, dtype="float32", num_kv_blocks=100)
    for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False):
        ids, choice = output.prompt_token_ids, output.outputs[0]
        assert ids == tokenizer(output.prompt).input_ids
        assert greedy_choices(model, ids, choice.token_ids) == choice.token_ids
        assert len(choice.token_ids) == 64 or choice.token_ids[-1] == model.generation_config.eos_token_id
        assert choice.text == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", BUNDLED_MODELS)
def test_transformers_generates_the_same_tokens_in_bfloat16(name, monkeypatch):
    # The native kernels round less often; only the reference rounds where transformers does.
    monkeypatch.setattr("quire.model.build.load_native", lambda: None)
    model, tokenizer = reference(name, torch.bfloat16)
    llm = LLM(name, dtype="bfloat16", num_kv_blocks=100)
    # One prompt at a time, and one token: in bfloat16 sums of other shapes round differently, there as here.
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            expected = model.generate(ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :]
        output = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
        assert output.prompt_token_ids == ids[0].tolist()
        assert output.outputs[0].token_ids == expected.tolist()
        assert output.outputs[0].text == tokenizer.decode(expected, skip_special_tokens=True)
    llm.close()


@pytest.mark.parametrize("name", BUNDLED_MODELS)
def test_model_is_small_and_shares_the_tokenizer(name):
    folder = resolve_model(name)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 24_000_000
    assert (tokenizer_folder(folder) / "tokenizer.json").is_file()
    assert load_model(folder).spec.dtype == "bfloat16"


@pytest.mark.slow
@pytest.mark.skipif(not TEXT.exists(), reason="../shared/data is not there")
@pytest.mark.parametrize("name", BUNDLED_MODELS)
def test_held_out_loss_is_what_the_card_says(name, monkeypatch):
    """Score every eighth window of 512 tokens of the held-out books; the card's figure is over all of them."""
    from quire.text.tokenizer import load_tokenizer

    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "tools")
    from train_demo import read_books

    folder = resolve_model(name)
    card = (folder / "README.md").read_text()
    stated = float(re.search(r"held-out loss \| ([\d.]+) nats", card).group(1))
    decoder = load_model(folder, "float32")  # a tenth of the time on processors that multiply no bf16
    tokenizer = load_tokenizer(folder)
    ids = [token_id for book in read_books(TEXT)[1] for token_id in (*tokenizer.encode(book), 0)]
    losses = []
    for start in range(0, len(ids) - 513, 8 * 512):
        window = ids[start : start + 513]
        logprobs = torch.log_softmax(whole_prompt_logits(decoder, window[:-1]).float(), -1)
        losses.append(-float(logprobs[torch.arange(512), torch.tensor(window[1:])].mean()))
    assert math.isclose(sum(losses) / len(losses), stated, abs_tol=0.04)
