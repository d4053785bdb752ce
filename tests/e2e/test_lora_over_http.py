"""LoRA adapters over HTTP: chosen by the model's name, loaded and unloaded at run time, listed."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("uvicorn", reason="needs quire[server]")

from tests.e2e.server_process import serving
from tests.lora_adapter import write_adapter

SHAPES = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(8)
    for name, shape in (("self_attn.q_proj", (256, 256)), ("mlp.up_proj", (768, 256)), ("mlp.down_proj", (256, 768)))
}
ADMIN, USER = "admin-secret", "user-secret"


def complete(server, model, key=ADMIN):
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    return server.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})


def text_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.mark.parametrize("replicas", [(), pytest.param(("-dp", "2"), marks=pytest.mark.slow)], ids=["one", "two"])
def test_adapters_are_models_that_come_and_go(tmp_path, replicas):
    write_adapter(tmp_path / "one", SHAPES, seed=1)
    write_adapter(tmp_path / "two", SHAPES, seed=2)
    write_adapter(tmp_path / "three", SHAPES, seed=3)
    write_adapter(tmp_path / "wide", SHAPES, rank=32)
    keys = [{"key": ADMIN, "name": "root", "admin": True}, {"key": USER, "name": "user"}]
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    options = ("--lora-modules", f"one={tmp_path / 'one'}", "--max-lora-rank", "16", "--max-loras", "2", *replicas)
    with serving(*options, "--api-key-file", str(tmp_path / "keys.json"), "--device", "cpu", key=ADMIN) as server:
        server.wait_ready()
        base, one = text_of(complete(server, "demo")), text_of(complete(server, "one"))
        assert base != one
        asked = complete(server, "two")
        assert asked.status_code == 404
        assert "'one'" in asked.json()["error"]["message"]
        two = {"lora_name": "two", "lora_path": str(tmp_path / "two")}
        refused = server.post("/v1/load_lora_adapter", two, headers={"authorization": f"Bearer {USER}"})
        assert refused.status_code == 403
        loaded = server.post("/v1/load_lora_adapter", two)
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'two' added successfully.")
        assert text_of(complete(server, "two")) not in (base, one)
        cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
        assert list(cards) == ["demo", "one", "two"]
        assert cards["two"]["parent"] == "demo"
        tags = {tag["name"]: tag["details"]["parent_model"] for tag in server.get("/api/tags").json()["models"]}
        assert tags == {"demo": "", "one": "demo", "two": "demo"}
        wrong = server.post("/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 1, "lora_path": "one"})
        assert wrong.status_code == 400
        assert "use model, which may be the name of a LoRA adapter" in wrong.json()["error"]["message"]
        wide = server.post("/v1/load_lora_adapter", {"lora_name": "wide", "lora_path": str(tmp_path / "wide")})
        assert wide.status_code == 400
        assert "max_lora_rank is 16" in wide.json()["error"]["message"]
        again = server.post("/v1/load_lora_adapter", two)
        assert again.status_code == 400
        old = text_of(complete(server, "two"))
        in_place = {**two, "lora_path": str(tmp_path / "three"), "load_inplace": True}
        assert server.post("/v1/load_lora_adapter", in_place).status_code == 200
        assert text_of(complete(server, "two")) not in (base, one, old)
        gone = server.post("/v1/unload_lora_adapter", {"lora_name": "two"})
        assert gone.status_code == 200
        assert complete(server, "two").status_code == 404
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "two"}).status_code == 404
        assert text_of(complete(server, "one")) == one
        assert text_of(complete(server, "demo")) == base
        chat = {"model": "one", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        answer = server.post("/v1/chat/completions", chat)
        assert answer.json()["model"] == "one"
