"""Ropes that depend on a length ("longrope", "dynamic"): each token is that of transformers after the tokens so far.

A sequence takes the short variant up to the original length (32 here) and is computed again with the long variant when it
outgrows that, in the middle of a request.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from quire import LLM, BeamSearchParams, SamplingParams
from quire.kernels.native import load_native
from tests.golden.make_checkpoints import reference_model

pytestmark = pytest.mark.golden

ORIGINAL_LENGTH = 32
LENGTH = 24
PROMPTS = [torch.randint(3, 131, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 9, 25, 31, 32, 33, 45)]
BACKENDS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")),
]


@pytest.fixture(scope="module")
def longrope(checkpoint, tmp_path_factory):
    """A checkpoint with longrope, and what transformers generates for each prompt, computed anew for every token."""
    folder = shutil.copytree(checkpoint("phi3-longrope", "v5"), tmp_path_factory.mktemp("longrope") / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    model = reference_model(folder)
    return folder, [_greedy(model, prompt, LENGTH) for prompt in PROMPTS]


def _greedy(model, prompt, count):
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(torch.tensor([tokens])).logits[0, -1]
            logits[model.generation_config.eos_token_id] = -torch.inf
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def _params(**options):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": LENGTH, "min_tokens": LENGTH, "detokenize": False, **options})


def _engine(folder, **options):
    defaults = {"skip_tokenizer_init": True, "dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 8}
    return LLM(str(folder), **{**defaults, **options})


def _generate(llm, prompts=PROMPTS, **options):
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, _params(**options), use_tqdm=False)]


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """The kernels that run the model, as the block size that they take."""
    monkeypatch.setenv("QUIRE_NATIVE", "1" if request.param == "native" else "0")
    return {"block_size": 16 if request.param == "native" else 4}


@pytest.mark.covering
@pytest.mark.parametrize("max_model_len", [64, 100, None])
def test_tokens_are_those_of_transformers_at_any_max_model_len(longrope, backend, max_model_len):
    folder, expected = longrope
    options = {} if max_model_len is None else {"max_model_len": max_model_len}
    room = [min(LENGTH, (max_model_len or 128) - len(prompt)) for prompt in PROMPTS]
    llm = _engine(folder, **backend, **options)
    assert _generate(llm) == [tokens[:count] for tokens, count in zip(expected, room, strict=True)]
    assert _generate(llm) == [tokens[:count] for tokens, count in zip(expected, room, strict=True)]  # over cached prefixes
    llm.close()


@pytest.mark.covering
@pytest.mark.parametrize(
    "options",
    [
        {"long_prefill_token_threshold": 1},
        {"max_num_batched_tokens": 11},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 3},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}},
        {"speculative_config": {"method": "suffix", "suffix_decoding_use_tree_spec": True, "adaptive": False}},
        {"speculative_config": {"method": "self", "skipped_layers": [0], "num_speculative_tokens": 3, "adaptive": False}},
    ],
    ids=lambda options: "-".join(map(str, next(iter(options.items())))).split(",")[0],
)
def test_tokens_are_those_of_transformers_with_every_option(longrope, backend, options):
    folder, expected = longrope
    llm = _engine(folder, **backend, **options)
    assert _generate(llm) == expected
    llm.close()


def test_tokens_are_those_of_transformers_when_sequences_are_preempted(longrope, backend):
    folder, expected = longrope
    num_blocks = 100 // backend["block_size"]
    llm = _engine(folder, **{**backend, "num_kv_blocks": num_blocks})
    assert _generate(llm) == expected
    assert llm.llm_engine.scheduler.num_preemptions > 0
    llm.close()


def test_tokens_are_those_of_transformers_when_steps_are_launched_ahead(longrope, backend, late_runners):
    folder, expected = longrope
    llm = _engine(folder, **backend)
    assert _generate(llm) == expected
    ahead = [kind for kind, _ in late_runners[0].log]
    assert ["launch", "launch"] in [ahead[i : i + 2] for i in range(len(ahead))]
    llm.close()


def test_choices_of_a_request_are_those_of_requests_alone(longrope, backend):
    folder, _ = longrope
    llm = _engine(folder, **backend)
    options = {"temperature": 1.0, "seed": 5}
    outputs = llm.generate(PROMPTS, _params(**options, n=3), use_tqdm=False)
    cold = _engine(folder, **backend, enable_prefix_caching=False)
    again = cold.generate(PROMPTS[::-1], _params(**options, n=3), use_tqdm=False)[::-1]
    found, alone = ([[tuple(c.token_ids) for c in output.outputs] for output in runs] for runs in (outputs, again))
    assert found == alone
    assert all(len(set(choices)) == 3 for choices in found)
    llm.close()
    cold.close()


def test_beams_are_those_of_the_whole_prefix_computed_anew(longrope, backend):
    folder, expected = longrope
    llm = _engine(folder, **backend)
    params = BeamSearchParams(beam_width=1, max_tokens=LENGTH, ignore_eos=True)
    found = llm.beam_search([{"prompt_token_ids": PROMPTS[2]}], params)
    assert list(found[0].sequences[0].tokens) == PROMPTS[2] + expected[2]
    llm.close()


def test_dynamic_rope_is_that_of_transformers_up_to_the_original_length(checkpoint, tmp_path, backend):
    folder = shutil.copytree(checkpoint("llama-dynamic", "v5"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == ORIGINAL_LENGTH
    prompts = [prompt for prompt in PROMPTS if len(prompt) + 7 <= ORIGINAL_LENGTH]
    model = reference_model(folder)
    expected = [_greedy(model, prompt, 7) for prompt in prompts]
    llm = _engine(folder, **backend, max_model_len=128)
    assert _generate(llm, prompts, max_tokens=7, min_tokens=7) == expected
    long = _generate(llm)
    assert [tokens[:7] for tokens in long[: len(prompts)]] == expected
    llm.close()
    cold = _engine(folder, **backend, max_model_len=128, enable_prefix_caching=False, max_num_batched_tokens=9)
    assert _generate(cold) == long
    cold.close()
