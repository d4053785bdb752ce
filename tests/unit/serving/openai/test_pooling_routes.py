"""The routes of classifiers, rerankers and embedding models over a real engine in this process."""

from __future__ import annotations

import base64
import json
import math
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.api.openai.completions import CompletionRequest
from quire.api.openai.embeddings import EmbeddingRequest
from quire.api.openai.pooling import ClassifyRequest, PoolingRequest, RerankRequest, ScoreRequest
from quire.base.errors import RequestError
from quire.engine.llm import LLM
from quire.serving.config import ServerConfig
from quire.serving.core.served_model import load_served_model
from quire.serving.engine_client.engine_info import describe_engine
from quire.serving.openai.classify import classify, pool
from quire.serving.openai.completions import complete
from quire.serving.openai.embeddings import embed
from quire.serving.openai.scoring import rerank, score
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.serving.fakes import make_context
from tests.unit.serving.openai.asking import ask
from tests.unit.serving.openai.test_with_engine import EngineGateway

QUERY = "what is blue?"
DOCUMENTS = ["the grass is green", "the sky", "blue is the sea, and the sky is blue, too"]
LONG = "a long text that is far longer than it may be " * 12


def write_classifier(folder, num_labels):
    """Write a classifier of the Qwen3 family."""
    labels = {str(index): f"label-{index}" for index in range(num_labels)}
    write_checkpoint(folder, "qwen3", architectures=["Qwen3ForSequenceClassification"], id2label=labels)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    generator = torch.Generator().manual_seed(num_labels)
    tensors["score.weight"] = torch.randn((num_labels, 32), generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_embedder(folder):
    """Write an embedding model with the files of sentence-transformers."""
    write_checkpoint(folder, "qwen3")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    prompts = {"prompts": {"query": "Query: ", "document": ""}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


MAKERS = {
    "reranker": lambda folder: write_classifier(folder, 1),
    "classifier": lambda folder: write_classifier(folder, 3),
    "embedder": write_embedder,
    "generative": lambda folder: write_checkpoint(folder, "qwen3"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return what makes a model by its name: its LLM, and the context of a server over the same engine."""
    made = {}

    def find(name):
        if name not in made:
            folder = MAKERS[name](tmp_path_factory.mktemp("models") / name)
            llm = LLM(str(folder), num_kv_blocks=60, max_num_seqs=6, dtype="float32")
            served = load_served_model(describe_engine(llm.llm_engine, 0.0), ServerConfig(served_model_names=("demo",)))
            made[name] = llm, make_context(EngineGateway(llm.llm_engine), served=served)
        return made[name]

    yield find
    for llm, _ in made.values():
        llm.close()


def post(context, handler, kind, **body):
    return json.loads(ask(handler, kind, context, **body))


def test_classes_come_with_labels_and_usage(models):
    llm, context = models("classifier")
    answer = post(context, classify, ClassifyRequest, input=DOCUMENTS)
    expected = llm.classify(DOCUMENTS, use_tqdm=False)
    assert [item["probs"] for item in answer["data"]] == [output.outputs.probs for output in expected]
    for item in answer["data"]:
        assert item["num_classes"] == 3
        assert math.isclose(sum(item["probs"]), 1, abs_tol=1e-6)
        assert item["label"] == f"label-{item['probs'].index(max(item['probs']))}"
    num_tokens = sum(len(output.prompt_token_ids) for output in expected)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    pooled = post(context, pool, PoolingRequest, input=DOCUMENTS)
    assert [item["data"] for item in pooled["data"]] == [item["probs"] for item in answer["data"]]
    with pytest.raises(RequestError, match="a score needs a classifier with 1 label, and this one has 3: use /classify"):
        post(context, score, ScoreRequest, text_1=QUERY, text_2=DOCUMENTS)


def test_reranker_reads_both_texts_in_one_prompt(models):
    llm, context = models("reranker")
    answer = post(context, score, ScoreRequest, text_1=QUERY, text_2=DOCUMENTS)
    tokenizer = llm.get_tokenizer()
    prompts = [tokenizer.encode(QUERY) + tokenizer.encode(text, add_special_tokens=False) for text in DOCUMENTS]
    expected = [output.outputs.probs[0] for output in llm.classify(prompts, use_tqdm=False)]
    assert [item["score"] for item in answer["data"]] == expected
    assert [output.outputs.score for output in llm.score(QUERY, DOCUMENTS, use_tqdm=False)] == expected
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    ranking = post(context, rerank, RerankRequest, query=QUERY, documents=[DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]])
    order = sorted(range(3), key=lambda index: -expected[index])
    assert [item["index"] for item in ranking["results"]] == order
    assert [item["relevance_score"] for item in ranking["results"]] == [expected[index] for index in order]
    assert [item["document"]["text"] for item in ranking["results"]] == [DOCUMENTS[index] for index in order]
    best = post(context, rerank, RerankRequest, query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=False)
    assert best["results"] == [{"index": order[0], "relevance_score": expected[order[0]]}]


def test_scores_of_an_embedding_model_are_cosines(models):
    llm, context = models("embedder")
    answer = post(context, score, ScoreRequest, queries=[QUERY, "sky"], documents=DOCUMENTS[:2])
    vectors = [torch.tensor(output.outputs.embedding) for output in llm.embed([QUERY, "sky", *DOCUMENTS[:2]], use_tqdm=False)]
    cosines = [float(vectors[0] @ vectors[2]), float(vectors[1] @ vectors[3])]
    assert [item["score"] for item in answer["data"]] == pytest.approx(cosines, abs=1e-6)
    scored = llm.score([QUERY, "sky"], DOCUMENTS[:2], use_tqdm=False)
    assert [output.outputs.score for output in scored] == [item["score"] for item in answer["data"]]


def test_embeddings_take_prompts_sizes_and_formats(models):
    llm, context = models("embedder")
    named = post(context, embed, EmbeddingRequest, input=[QUERY], prompt_name="query")
    expected = llm.embed(f"Query: {QUERY}", use_tqdm=False)[0].outputs.embedding
    assert named["data"][0]["embedding"] == expected
    cut = post(context, embed, EmbeddingRequest, input=[[5, 6], [7]], dimensions=5, encoding_format="base64")
    for item, prompt in zip(cut["data"], ([5, 6], [7]), strict=True):
        values = torch.tensor(struct.unpack("<5f", base64.b64decode(item["embedding"])))
        whole = torch.tensor(llm.embed([prompt], use_tqdm=False)[0].outputs.embedding)
        torch.testing.assert_close(values, torch.nn.functional.normalize(whole[:5], dim=0), rtol=0, atol=1e-6)
    with pytest.raises(RequestError, match="prompt_name must be one of the model's prompts .'query', 'document'., got 'other'"):
        post(context, embed, EmbeddingRequest, input="x", prompt_name="other")
    with pytest.raises(RequestError, match="the model is an embedding model and does not generate text"):
        post(context, complete, CompletionRequest, prompt="x")


@pytest.mark.parametrize(
    ("name", "handler", "kind", "body", "field"),
    [
        ("embedder", embed, EmbeddingRequest, {"input": ["x", LONG]}, "input"),
        ("classifier", classify, ClassifyRequest, {"input": LONG}, "input"),
        ("reranker", score, ScoreRequest, {"text_1": QUERY, "text_2": ["x", LONG]}, "text_2"),
        ("reranker", rerank, RerankRequest, {"query": QUERY, "documents": [LONG]}, "documents"),
    ],
)
def test_too_long_input_is_refused_by_its_field_or_cut(models, name, handler, kind, body, field):
    llm, context = models(name)
    with pytest.raises(RequestError, match=r"the prompt has \d+ tokens, but max_model_len is 256") as raised:
        post(context, handler, kind, **body)
    assert raised.value.param == field
    assert post(context, handler, kind, **body, truncate_prompt_tokens=20)["usage"]
    answer = post(context, handler, kind, **body, truncate_prompt_tokens=-1)
    num_tokens = answer["usage"]["total_tokens"]
    short = 0 if name == "classifier" else len(llm.get_tokenizer().encode("x" if name == "embedder" else f"{QUERY}x"))
    assert num_tokens in (256, 256 + short)


def test_document_is_cut_before_it_meets_the_query(models):
    llm, context = models("reranker")
    answer = post(context, rerank, RerankRequest, query=QUERY, documents=[LONG], max_tokens_per_doc=4)
    tokenizer = llm.get_tokenizer()
    assert answer["usage"]["total_tokens"] == len(tokenizer.encode(QUERY)) + 4


def test_generative_model_refuses_scores(models):
    _, context = models("generative")
    for handler, kind, body in (
        (score, ScoreRequest, {"text_1": "a", "text_2": "b"}),
        (rerank, RerankRequest, {"query": "a", "documents": ["b"]}),
        (classify, ClassifyRequest, {"input": "a"}),
    ):
        with pytest.raises(RequestError, match="a generative model without a classification head") as raised:
            post(context, handler, kind, **body)
        assert raised.value.param == "model"


def test_counts_of_texts_must_fit(models):
    _, context = models("reranker")
    with pytest.raises(RequestError, match="text_1 must be one text or as many as text_2: got 2 and 3"):
        post(context, score, ScoreRequest, text_1=["a", "b"], text_2=DOCUMENTS)
