"""Commands on damaged checkpoints: one line that names the file, and no traceback."""

import json

import pytest
from safetensors.torch import load_file, save_file

from quire.cli.main import main
from tests.tiny_checkpoint import write_checkpoint

SHARD, INDEX = "model-00001-of-00002.safetensors", "model.safetensors.index.json"


def cut(name, share):
    """Return a function that keeps a share of a file."""

    def change(folder):
        octets = (folder / name).read_bytes()
        (folder / name).unlink()  # others may have mapped it
        (folder / name).write_bytes(octets[: int(len(octets) * share)])

    return change


def with_keys(name, **changes):
    """Return a function that changes keys of a JSON file, which need not be there."""

    def change(folder):
        values = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps({**values, **changes}))

    return change


def with_text(name, text):
    """Return a function that writes a file."""
    return lambda folder: (folder / name).write_text(text)


def in_shards(*damages):
    """Return a function that splits the weights into two files with an index, and damages those."""

    def change(folder):
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        files = {SHARD: names[:7], SHARD.replace("00001", "00002", 1): names[7:]}
        for file, held in files.items():
            save_file({name: tensors[name] for name in held}, folder / file)
        index = {"weight_map": {name: file for file, held in files.items() for name in held}}
        (folder / INDEX).write_text(json.dumps(index))
        for damage in damages:
            damage(folder)

    return change


DAMAGES = {
    "weights-cut": (cut("model.safetensors", 0.9), "model.safetensors"),
    "weights-cut-in-the-header": (cut("model.safetensors", 0.001), "model.safetensors"),
    "weights-empty": (cut("model.safetensors", 0), "model.safetensors"),
    "weights-absent": (lambda folder: (folder / "model.safetensors").rename(folder / "other.safetensors"), "no weights"),
    "shard-cut": (in_shards(cut(SHARD, 0.9)), SHARD),
    "shard-absent": (in_shards(lambda folder: (folder / SHARD).unlink()), f"{INDEX} names files that are not in"),
    "index-of-no-file": (in_shards(with_text(INDEX, json.dumps({"weight_map": {"a": "absent.safetensors"}}))), INDEX),
    "index-without-a-map": (in_shards(with_text(INDEX, "{}")), INDEX),
    "index-of-wrong-type": (in_shards(with_text(INDEX, json.dumps({"weight_map": {"a": 1}}))), INDEX),
    "index-no-json": (in_shards(with_text(INDEX, "{")), INDEX),
    "config-no-json": (with_text("config.json", "{"), "config.json"),
    "config-list": (with_text("config.json", "[]"), "config.json"),
    "config-string-for-number": (with_keys("config.json", hidden_size="32"), "config.json: hidden_size"),
    "config-float-for-integer": (with_keys("config.json", num_hidden_layers=2.0), "config.json: num_hidden_layers"),
    "config-list-for-number": (with_keys("config.json", rope_theta=[1]), "config.json: rope_theta"),
    "config-string-for-list": (with_keys("config.json", architectures="Qwen3ForCausalLM"), "config.json: architectures"),
    "config-string-for-boolean": (with_keys("config.json", tie_word_embeddings="no"), "config.json: tie_word_embeddings"),
    "config-number-for-object": (with_keys("config.json", quantization_config=1), "config.json: quantization_config"),
    "config-other-shapes": (with_keys("config.json", intermediate_size=40), "wrong shape for config.json"),
    "generation-no-json": (with_text("generation_config.json", "x"), "generation_config.json"),
    "generation-string": (with_keys("generation_config.json", temperature="hot"), "generation_config.json: temperature"),
    "generation-ends": (with_keys("generation_config.json", eos_token_id="x"), "generation_config.json: eos_token_id"),
    "generation-range": (with_keys("generation_config.json", top_p=7), "generation_config.json: top_p"),
    "generation-flag": (with_keys("generation_config.json", do_sample=0), "generation_config.json: do_sample"),
}
DAMAGES_OF_TOKENIZERS = {
    "tokenizer-cut": (cut("tokenizer.json", 0.5), "tokenizer.json"),
    "tokenizer-config-no-json": (with_text("tokenizer_config.json", "{"), "tokenizer_config.json"),
    "tokenizer-config-type": (with_keys("tokenizer_config.json", eos_token=[1]), "tokenizer_config.json: eos_token"),
    "tokens-map-surrogate": (with_text("special_tokens_map.json", r'{"bos_token": "\ud800"}'), "special_tokens_map.json"),
}


def check(capsys, argv, folder, words):
    status = main([*argv, "--log-level", "error", "--num-kv-blocks", "8"])
    captured = capsys.readouterr()
    assert (status, captured.out) == (1, "")
    assert captured.err.startswith("error: ")
    assert len(captured.err.strip().splitlines()) == 1
    assert words in captured.err
    assert str(folder) in captured.err


@pytest.mark.covering
@pytest.mark.parametrize("command", ["inspect", "generate"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_one_line_that_names_the_file(capsys, tmp_path, command, damage):
    change, words = DAMAGES[damage]
    folder = write_checkpoint(tmp_path / "damaged", "qwen3")
    change(folder)
    argv = ["inspect", str(folder)] if command == "inspect" else ["generate", "the fox", "--model", str(folder)]
    check(capsys, argv, folder, words)


@pytest.mark.parametrize("damage", DAMAGES_OF_TOKENIZERS)
def test_damaged_tokenizer_is_one_line_that_names_the_file(capsys, tmp_path, damage):
    change, words = DAMAGES_OF_TOKENIZERS[damage]
    folder = write_checkpoint(tmp_path / "damaged", "qwen3")
    change(folder)
    check(capsys, ["generate", "the fox", "--model", str(folder)], folder, words)


def test_inspect_says_that_weights_are_absent_when_there_are_none(capsys, tmp_path):
    folder = write_checkpoint(tmp_path / "damaged", "qwen3")
    (folder / "model.safetensors").unlink()
    assert main(["inspect", str(folder), "--num-kv-blocks", "8"]) == 0
    assert "no weights are stored there" in capsys.readouterr().out
