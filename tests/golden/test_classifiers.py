"""Classifiers and embedding models against transformers, on random checkpoints of two layers; Dense layers by hand."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    Gemma3TextConfig,
    Gemma3TextModel,
    GemmaConfig,
    GemmaForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
    MistralConfig,
    MistralForSequenceClassification,
    MistralModel,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from quire import LLM, PoolingParams, RequestError
from quire.kernels.native import load_native

pytestmark = pytest.mark.golden

VOCAB_SIZE = 131
PROMPTS = [
    torch.randint(2, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 2, 15, 16, 17, 33, 40)
]
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ENGINE = {
    "max_model_len": 48,
    "num_kv_blocks": 30,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 48,
    "skip_tokenizer_init": True,
    "dtype": "float32",
}
BLOCK_SIZES = (16, 5) if load_native() is not None else (5,)
TOLERANCE = {"rtol": 0, "atol": 3e-5}
CLASSIFIERS = {
    "llama": (LlamaForSequenceClassification, LlamaConfig, {"num_labels": 3}),
    "qwen2": (Qwen2ForSequenceClassification, Qwen2Config, {"num_labels": 2, "problem_type": "multi_label_classification"}),
    "qwen3": (Qwen3ForSequenceClassification, Qwen3Config, {"num_labels": 1, "head_dim": 8}),
    "gemma": (GemmaForSequenceClassification, GemmaConfig, {"num_labels": 4, "head_dim": 8}),
    "mistral": (
        MistralForSequenceClassification,
        MistralConfig,
        {"id2label": {0: "good", 1: "bad"}, "sliding_window": 7, "problem_type": "regression"},
    ),
}
ACTIVATIONS = {
    "llama": lambda x: x.softmax(-1),
    "qwen2": torch.sigmoid,
    "qwen3": torch.sigmoid,
    "gemma": lambda x: x.softmax(-1),
    "mistral": lambda x: x,
}


def make(folder, model_class, config_class, seed=0, **options):
    """Write a random checkpoint; return the model."""
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SIZES, **options})).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.1) + ("norm" in name))
    model.save_pretrained(folder)
    return model


def logits_of(model, prompts=PROMPTS):
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([prompt])).logits[0] for prompt in prompts]


def states_of(model, prompts=PROMPTS):
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]


def check(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one), other, **TOLERANCE)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("family", CLASSIFIERS)
def test_classes_are_those_of_transformers(tmp_path, family, block_size):
    model_class, config_class, options = CLASSIFIERS[family]
    expected = logits_of(make(tmp_path, model_class, config_class, **options))
    llm = LLM(str(tmp_path), block_size=block_size, **ENGINE)
    logits = llm.classify(PROMPTS, PoolingParams(task="classify", use_activation=False), use_tqdm=False)
    probs = llm.classify(PROMPTS, use_tqdm=False)
    alone = [llm.classify(prompt, use_tqdm=False)[0].outputs.probs for prompt in PROMPTS]
    with pytest.raises(RequestError, match="the model is a classifier and does not generate text: use /classify"):
        llm.generate(PROMPTS[0], use_tqdm=False)
    with pytest.raises(RequestError, match="the model is a classifier, which has scores of classes and no embeddings"):
        llm.embed(PROMPTS[0], use_tqdm=False)
    llm.close()
    check([output.outputs.probs for output in logits], expected)
    check([output.outputs.probs for output in probs], [ACTIVATIONS[family](one) for one in expected])
    assert probs[0].outputs.num_classes == len(expected[0])
    if block_size == 16:
        assert alone == [output.outputs.probs for output in probs]
