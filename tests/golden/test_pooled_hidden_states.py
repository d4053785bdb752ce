"""Pooled hidden states against transformers' last_hidden_state, with both decoders."""

from __future__ import annotations

import pytest
import torch

from quire import LLM, PoolingParams
from quire.kernels.native import load_native
from tests.golden.make_checkpoints import case_params, reference_model

pytestmark = pytest.mark.golden

# As long as max_model_len, which decides about dynamic and longrope; longer than a window (11) and two blocks of 16.
LENGTH = 40
PROMPT = torch.randint(0, 131, (LENGTH,), generator=torch.Generator().manual_seed(LENGTH)).tolist()
TOLERANCE = 1e-4
PARAMS = (
    PoolingParams(pooling="last", normalize=False),
    PoolingParams(pooling="mean", normalize=False),
    PoolingParams(pooling="last"),
    PoolingParams(pooling="mean", dimensions=7),
)


def expected(hidden: torch.Tensor, params: PoolingParams) -> torch.Tensor:
    vector = (hidden[-1] if params.pooling == "last" else hidden.mean(0))[: params.dimensions]
    return vector if params.normalize is False else torch.nn.functional.normalize(vector, dim=0)


@pytest.mark.parametrize("case", ["llama", "mistral-window", "qwen3", "gpt2", "mixtral"])
def test_checkpoint_without_a_head_is_embedded_alike(checkpoint, tmp_path, case):
    whole, headless, found = checkpoint(case, "v5"), tmp_path / case, []
    reference_model(whole).base_model.save_pretrained(headless)
    for folder in (whole, headless):
        llm = LLM(str(folder), max_model_len=LENGTH, num_kv_blocks=10, max_num_seqs=4, skip_tokenizer_init=True)
        found.append([output.outputs.embedding for output in llm.embed([PROMPT] * len(PARAMS), PARAMS, use_tqdm=False)])
        llm.close()
    assert found[0] == found[1]


# Last norms of every kind, wrappers, scaled embeddings, latent attention, and rotations that depend on the length.
CASES = (
    *("llama", "llama-dynamic", "phi3-longrope", "qwen3", "gemma", "gemma2", "gemma3-multimodal", "gpt2", "olmo2", "gpt-oss"),
    *("granite", "mixtral", "qwen2-moe", "deepseek-v3", "deepseek-v32", "olmo", "phi", "gpt-neox", "opt", "cohere", "nemotron"),
    *("llama4", "qwen3-vl", "nanochat", "internlm2"),
)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", case_params(CASES))
def test_embeddings_are_the_pooled_hidden_states_of_transformers(checkpoint, case):
    folder = checkpoint(case, "v5")
    reference = reference_model(folder)
    body = getattr(reference, "model", reference.base_model)  # base_model of Llama 4 is the whole model
    with torch.inference_mode():
        hidden = body(torch.tensor([PROMPT])).last_hidden_state[0]
    # The native kernels take blocks of 16 tokens, torch runs the others.
    for block_size in (16, 5) if load_native() is not None else (5,):
        options = {
            "max_model_len": LENGTH,
            "num_kv_blocks": 48 // block_size + 1,
            "max_num_batched_tokens": 17,
            "max_num_seqs": 4,
        }
        llm = LLM(str(folder), block_size=block_size, skip_tokenizer_init=True, **options)
        outputs = llm.embed([PROMPT] * len(PARAMS), PARAMS, use_tqdm=False)
        llm.close()
        for output, params in zip(outputs, PARAMS, strict=True):
            found = torch.tensor(output.outputs.embedding)
            torch.testing.assert_close(found, expected(hidden, params), rtol=0, atol=TOLERANCE)
