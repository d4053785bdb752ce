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


@pytest.mark.covering
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


BIDIRECTIONAL = {
    "llama": (LlamaModel, LlamaConfig, {"is_causal": False}),
    "llama_bidirec": (LlamaModel, LlamaConfig, {"is_causal": False}),
    "mistral": (MistralModel, MistralConfig, {"is_causal": False, "sliding_window": 6}),
    "gemma3_text": (
        Gemma3TextModel,
        Gemma3TextConfig,
        {"use_bidirectional_attention": True, "sliding_window": 8, "head_dim": 8, "query_pre_attn_scalar": 8},
    ),
}


def change_config(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def mean_of(hidden):
    return torch.nn.functional.normalize(hidden.mean(0), dim=0)


@pytest.mark.parametrize("family", BIDIRECTIONAL)
def test_models_that_attend_in_both_directions_give_the_states_of_transformers(tmp_path, family):
    model_class, config_class, options = BIDIRECTIONAL[family]
    states = states_of(make(tmp_path, model_class, config_class, **options))
    if family == "llama_bidirec":  # as llama-embed-nemotron says it
        config = json.loads((tmp_path / "config.json").read_text())
        del config["is_causal"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        change_config(tmp_path, model_type=family, architectures=["LlamaBidirectionalModel"], pooling="avg")
    # A step has room for one long prompt or some short ones: they are not cut, and wait for each other.
    llm = LLM(str(tmp_path), **{**ENGINE, "max_num_batched_tokens": 40, "max_model_len": 60})
    found = llm.embed([*PROMPTS, *PROMPTS], use_tqdm=False)
    params = PoolingParams(pooling="cls", normalize=False, dimensions=5)
    first = llm.embed(PROMPTS, params, use_tqdm=False)
    with pytest.raises(RequestError, match=r"the prompt has 41 tokens, but a step has 40 \(max_num_batched_tokens\)"):
        llm.embed([[3] * 41], use_tqdm=False)
    with pytest.raises(RequestError, match="the model is an embedding model and does not generate text: use /v1/embeddings"):
        llm.generate(PROMPTS[0], use_tqdm=False)
    assert not any(output.metrics.num_cached_tokens for output in found)
    llm.close()
    check([output.outputs.embedding for output in found], [mean_of(one) for one in states] * 2)
    check([output.outputs.embedding for output in first], [one[0, :5] for one in states])


def write_modules(folder, *kinds, prompts=None):
    """Write the files of sentence-transformers."""
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, (kind, config) in enumerate(kinds, 1):
        path = folder / f"{index}_{kind}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        modules.append({"idx": index, "name": str(index), "path": path.name, "type": f"sentence_transformers.models.{kind}"})
    (folder / "modules.json").write_text(json.dumps(modules))
    if prompts is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts, "default_prompt_name": None}))


def test_embedding_gemma_pools_goes_through_its_dense_layers_and_is_normalised(tmp_path):
    model_class, config_class, options = BIDIRECTIONAL["gemma3_text"]
    states = states_of(make(tmp_path, model_class, config_class, **options))
    dense = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    write_modules(
        tmp_path,
        ("Pooling", {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}),
        ("Dense", {"in_features": 32, "out_features": 80, **dense}),
        ("Dense", {"in_features": 80, "out_features": 24, "activation_function": "torch.nn.modules.activation.Tanh"}),
        ("Normalize", {}),
    )
    wide, narrow, bias = torch.randn(80, 32), torch.randn(24, 80), torch.randn(24)
    save_file({"linear.weight": wide}, tmp_path / "2_Dense" / "model.safetensors")
    save_file({"linear.weight": narrow, "linear.bias": bias}, tmp_path / "3_Dense" / "model.safetensors")
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 45}))

    def expected(hidden, size=None):
        return torch.nn.functional.normalize(torch.tanh(narrow @ (wide @ hidden.mean(0)) + bias)[:size], dim=0)

    llm = LLM(str(tmp_path), **{**ENGINE, "max_model_len": None})
    assert llm.llm_engine.report.memory.max_model_len == 45
    check([o.outputs.embedding for o in llm.embed(PROMPTS, use_tqdm=False)], [expected(one) for one in states])
    cut = llm.embed(PROMPTS, PoolingParams(dimensions=7), use_tqdm=False)
    check([output.outputs.embedding for output in cut], [expected(one, 7) for one in states])
    with pytest.raises(RequestError, match="dimensions must be from 1 to 24, the size of the model's vectors, got 25"):
        llm.embed(PROMPTS[0], PoolingParams(dimensions=25), use_tqdm=False)
    llm.close()


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_causal_checkpoint_with_modules_is_an_embedding_model(tmp_path, mode):
    model = make(tmp_path, Qwen3ForCausalLM, Qwen3Config, head_dim=8)
    states = states_of(model.model)
    write_modules(tmp_path, ("Pooling", {f"pooling_mode_{mode}": True, "pooling_mode_cls_token": False}))
    llm = LLM(str(tmp_path), block_size=BLOCK_SIZES[0], **ENGINE)
    found = llm.embed(PROMPTS, use_tqdm=False)
    with pytest.raises(RequestError, match="does not generate text"):
        llm.generate(PROMPTS[0], use_tqdm=False)
    with pytest.raises(RequestError, match="pooling 'cls' is for models in which every token attends to all others"):
        llm.embed(PROMPTS[0], PoolingParams(pooling="cls"), use_tqdm=False)
    llm.close()
    expected = [one[-1] if mode == "lasttoken" else one.mean(0) for one in states]
    check([output.outputs.embedding for output in found], expected)  # there is no Normalize


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tokens", [["no", "yes"], ["yes"]])
def test_generative_reranker_scores_by_the_logits_of_its_tokens(tmp_path, tied, tokens):
    model = make(tmp_path, Qwen3ForCausalLM, Qwen3Config, head_dim=8, tie_word_embeddings=tied)
    vocabulary = {"no": 17, "yes": 99}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    change_config(tmp_path, classifier_from_token=tokens)
    last = [one[-1] for one in logits_of(model)]
    llm = LLM(str(tmp_path), block_size=BLOCK_SIZES[0], **ENGINE)
    found = llm.encode(PROMPTS, PoolingParams(task="score"), use_tqdm=False)
    llm.close()
    differences = [one[99] - (one[17] if len(tokens) == 2 else 0) for one in last]
    check([output.outputs.data for output in found], [torch.sigmoid(one)[None] for one in differences])
    if len(tokens) == 2:  # the probability of yes among the two
        among = [one[[17, 99]].softmax(-1)[1:] for one in last]
        check([output.outputs.data for output in found], among)


def test_generative_model_says_what_it_lacks_for_scores_and_classes(tmp_path):
    make(tmp_path, Qwen3ForCausalLM, Qwen3Config, head_dim=8)
    llm = LLM(str(tmp_path), block_size=BLOCK_SIZES[0], **ENGINE)
    for task, message in (
        ("score", r"scores need a classifier \(a ...ForSequenceClassification"),
        ("classify", "classes need"),
    ):
        with pytest.raises(RequestError, match="the model is a generative model without a classification head: " + message):
            llm.encode(PROMPTS[0], PoolingParams(task=task), use_tqdm=False)
    llm.close()


def test_too_long_prompt_is_refused_or_cut(tmp_path):
    make(tmp_path, *CLASSIFIERS["qwen3"][:2], **CLASSIFIERS["qwen3"][2])
    llm = LLM(str(tmp_path), block_size=BLOCK_SIZES[0], **ENGINE)
    long = [*PROMPTS[-1], *PROMPTS[-2]]
    with pytest.raises(RequestError, match="the prompt has 73 tokens, but max_model_len is 48"):
        llm.classify(long, use_tqdm=False)
    with pytest.raises(RequestError, match=r"truncate_prompt_tokens must be -1 or from 1 to 48 \(max_model_len\), got 49"):
        llm.classify(long, PoolingParams(truncate_prompt_tokens=49), use_tqdm=False)
    for limit, kept in ((-1, 48), (9, 9)):
        cut = llm.classify(long, PoolingParams(truncate_prompt_tokens=limit), use_tqdm=False)[0]
        assert cut.outputs.probs == llm.classify(long[:kept], use_tqdm=False)[0].outputs.probs
    llm.close()
