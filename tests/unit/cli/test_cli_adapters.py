"""LoRA adapters on the command line: --lora of generate and chat, --lora-modules of batch run."""

import io
import json
import sys

import pytest
from safetensors.torch import load_file

from quire.base.errors import ConfigError
from quire.cli.lora_options import lora_modules
from quire.cli.main import main, make_parser
from tests.lora_adapter import write_adapter, write_merged

OPTIONS = ("--temperature", 0, "--max-tokens", 6, "--ignore-eos", "--log-level", "error", "--num-kv-blocks", 20)


def run(capsys, *argv):
    status = main([str(arg) for arg in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def adapted(tiny_model, tmp_path):
    """Return the folder of an adapter of the tiny model, and that of the model into which it is merged."""
    tensors = load_file(tiny_model / "model.safetensors")
    names = [name for name in tensors if name.endswith(("q_proj.weight", "up_proj.weight", "down_proj.weight"))]
    shapes = {name.removesuffix(".weight"): tuple(tensors[name].shape) for name in names}
    merged = write_adapter(tmp_path / "fox", shapes, seed=5)
    return tmp_path / "fox", write_merged(tiny_model, tmp_path / "merged", merged)


def test_generate_takes_an_adapter(capsys, tiny_model, adapted):
    adapter, merged = adapted
    status, out, _ = run(capsys, "generate", "the fox", "--model", tiny_model, "--lora", adapter, *OPTIONS)
    assert status == 0
    assert out == run(capsys, "generate", "the fox", "--model", merged, *OPTIONS)[1]
    assert out != run(capsys, "generate", "the fox", "--model", tiny_model, *OPTIONS)[1]


def test_chat_takes_an_adapter(capsys, tiny_model, adapted, monkeypatch):
    found = []
    for options in ((tiny_model, "--lora", adapted[0]), (adapted[1],), (tiny_model,)):
        monkeypatch.setattr(sys, "stdin", io.StringIO("the fox\n/exit\n"))
        status, out, _ = run(capsys, "chat", *options, *OPTIONS)
        assert status == 0
        found.append(out)
    assert found[0] == found[1] != found[2]


def test_a_bad_adapter_is_reported(capsys, tiny_model, tmp_path):
    for command in (("generate", "x", "--model", tiny_model), ("chat", tiny_model)):
        status, _, err = run(capsys, *command, "--lora", tmp_path, *OPTIONS)
        assert status != 0
        assert f"{tmp_path} is no LoRA adapter: it has no adapter_config.json" in err


@pytest.mark.slow
def test_batch_run_takes_adapters_as_models(capsys, tiny_model, adapted, tmp_path):
    pytest.importorskip("zmq", reason="needs quire[server]")
    body = {"prompt": "the fox", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    lines = [
        {"custom_id": model, "method": "POST", "url": "/v1/completions", "body": {**body, "model": model}}
        for model in ("tiny", "fox")
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    files = ("-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--served-model-name", "tiny")
    options = ("--log-level", "error", "--num-kv-blocks", 20)
    status, _, err = run(capsys, "batch", "run", *files, "--model", tiny_model, "--lora-modules", f"fox={adapted[0]}", *options)
    assert status == 0, err
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    texts = {answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"] for answer in answers}
    want = run(capsys, "generate", "the fox", "--model", adapted[1], *OPTIONS)[1]
    assert f"the fox{texts['fox']}\n" == want
    assert texts["tiny"] != texts["fox"]


@pytest.mark.parametrize(
    ("items", "found"),
    [
        (["sql=/a/b", "chat=/c=d"], (("sql", "/a/b"), ("chat", "/c=d"))),
        (['{"name": "sql", "path": "/a/b", "base_model_name": "x"}'], (("sql", "/a/b"),)),
        (["sql"], None),
        (["=/a"], None),
        (["sql="], None),
        (['{"name": "sql"}'], None),
        (['{"name": "sql", "path": "/a", "rank": 8}'], None),
        (['{"name": "sql"'], None),
    ],
)
def test_lora_modules_are_names_with_paths(items, found):
    args = make_parser().parse_args(["serve", "demo", "--lora-modules", *items])
    if found is None:
        with pytest.raises(ConfigError, match="NAME=PATH"):
            lora_modules(args)
    else:
        assert lora_modules(args) == found
