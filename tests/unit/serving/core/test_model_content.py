"""What tells servers of one model from those of another: contents count, names and folders do not."""

import shutil
from types import SimpleNamespace

import pytest

from quire.serving.core.model_content import content_digest


def digest(folder, **changes):
    fields = {"architecture": "A", "dtype": "bfloat16", "quantization": None, "device": "cpu", "kv_cache_dtype": "bfloat16"}
    numbers = {"vocab_size": 9, "hidden_size": 8, "num_parameters": 7}
    folders = {"model_folder": str(folder or "/nowhere"), "tokenizer_folder": folder and str(folder)}
    return content_digest(SimpleNamespace(**{**fields, **numbers, **folders, **changes}))


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "model"
    found.mkdir()
    (found / "config.json").write_text("{}")
    (found / "tokenizer.json").write_text('{"a": 1}')
    (found / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    return found


def test_copy_in_another_folder_is_the_same_model(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "README.md").write_text("another text")
    assert digest(copy) == digest(folder) == digest(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_other_contents_are_another_model(folder, name):
    before = digest(folder)
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(data)
    assert digest(folder) != before


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"quantization": "int8"}, {"kv_cache_dtype": "int8"}])
def test_numbers_in_another_format_give_other_tokens(folder, changes):
    assert digest(folder, **changes) != digest(folder)


def test_models_without_a_tokenizer_differ_by_their_shapes():
    assert digest(None) == digest(None) != digest(None, num_parameters=8)


def test_weights_count_where_the_tokenizer_is_another_ones(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "model.safetensors").write_bytes(bytes(range(255, -1, -1)) * 100)
    assert digest(folder) != digest(other, tokenizer_folder=str(folder))


def test_files_that_are_not_loaded_do_not_count(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "training_args.bin").write_bytes(b"x" * 5000)
    (copy / "pytorch_model.bin").write_bytes(b"y" * 5000)
    assert digest(copy) == digest(folder)
