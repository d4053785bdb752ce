"""`quire serve` with a classifier and with an embedding model, over HTTP."""

from __future__ import annotations

import concurrent.futures
import json

import httpx
import pytest

from quire import LLM
from tests.e2e.server_process import serving
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.serving.openai.test_pooling_routes import DOCUMENTS, LONG, QUERY, write_classifier

pytestmark = pytest.mark.slow


def post(server, path, **body):
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def test_reranker_over_http(tmp_path):
    folder = write_classifier(tmp_path / "reranker", 1)
    llm = LLM(str(folder), num_kv_blocks=60, dtype="float32")
    expected = [output.outputs.score for output in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    llm.close()
    order = sorted(range(3), key=lambda index: -expected[index])
    with serving("--dtype", "float32", model=str(folder)) as server:
        for path in ("/v1/score", "/score"):
            assert [item["score"] for item in post(server, path, text_1=QUERY, text_2=DOCUMENTS).json()["data"]] == expected
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            results = post(server, path, model="reranker", query=QUERY, documents=DOCUMENTS, top_n=2).json()["results"]
            assert [item["index"] for item in results] == order[:2]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: post(server, "/classify", input=DOCUMENTS).json()["data"], range(16)))
        assert all(answer == answers[0] for answer in answers)
        refused = post(server, "/v1/completions", model="reranker", prompt="x")
        assert refused.status_code == 400
        assert "is a classifier and does not generate text" in refused.json()["error"]["message"]
        long = post(server, "/v1/score", text_1=QUERY, text_2=LONG)
        assert (long.status_code, long.json()["error"]["param"]) == (400, "text_2")
        assert post(server, "/v1/score", text_1=QUERY, text_2=LONG, truncate_prompt_tokens=-1).status_code == 200
        empty = post(server, "/rerank", query=QUERY, documents=[])
        assert (empty.status_code, empty.json()["error"]["param"]) == (400, "documents")


def test_model_that_attends_in_both_directions_over_http(tmp_path):
    folder = write_checkpoint(tmp_path / "embedder", "qwen2", is_causal=False)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    with serving("--max-num-batched-tokens", "128", "--max-num-seqs", "8", model=str(folder)) as server:
        alone = [post(server, "/v1/embeddings", model="embedder", input=text).json()["data"][0] for text in DOCUMENTS]
        together = post(server, "/v1/embeddings", model="embedder", input=DOCUMENTS * 20).json()["data"]
        for index, item in enumerate(together):
            assert item["embedding"] == pytest.approx(alone[index % 3]["embedding"], abs=1e-5)
        long = post(server, "/v1/embeddings", model="embedder", input=[7] * 129)
        assert long.status_code == 400
        assert "the prompt has 129 tokens, but a step has 128 (max_num_batched_tokens)" in long.json()["error"]["message"]
        assert post(server, "/v1/embeddings", model="embedder", input=[7] * 129, truncate_prompt_tokens=128).status_code == 200
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            refused = post(server, path, model="embedder", **body)
            assert refused.status_code == 400
            assert "is an embedding model and does not generate text" in refused.json()["error"]["message"]
