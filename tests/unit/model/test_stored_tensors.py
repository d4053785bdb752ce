"""Files of weights: shards, pickles, and what is wrong with them."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from quire.base.errors import ModelFormatError
from quire.model.stored_tensors import open_tensors

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(1)}


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def _write_index(folder, shard_of, name="model.safetensors"):
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))


def _same(opened):
    return opened.keys() == TENSORS.keys() and all(torch.equal(opened[name], TENSORS[name]) for name in TENSORS)


def test_one_file_or_shards_of_either_format(tmp_path):
    for name in ("one", "shards", "bin", "legacy", "bin-shards"):
        (tmp_path / name).mkdir()
    save_file(TENSORS, tmp_path / "one" / "model.safetensors")
    save_file({"a": TENSORS["a"]}, tmp_path / "shards" / "x-1.safetensors")
    save_file({"b": TENSORS["b"], "c": TENSORS["c"]}, tmp_path / "shards" / "x-2.safetensors")
    _write_index(tmp_path / "shards", {"a": "x-1.safetensors", "b": "x-2.safetensors", "c": "x-2.safetensors"})
    torch.save(TENSORS, tmp_path / "bin" / "pytorch_model.bin")
    torch.save(TENSORS, tmp_path / "legacy" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    torch.save({"a": TENSORS["a"]}, tmp_path / "bin-shards" / "1.bin")
    torch.save({"b": TENSORS["b"], "c": TENSORS["c"]}, tmp_path / "bin-shards" / "2.bin")
    _write_index(tmp_path / "bin-shards", {"a": "1.bin", "b": "2.bin", "c": "2.bin"}, "pytorch_model.bin")
    for folder in tmp_path.iterdir():
        assert _same(open_tensors(folder)), folder


def test_shards_behind_links_are_read(tmp_path):
    """The hub's cache keeps files elsewhere and links to them."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    folder.mkdir()
    save_file(TENSORS, blobs / "0123")
    (folder / "model-1.safetensors").symlink_to(blobs / "0123")
    _write_index(folder, dict.fromkeys(TENSORS, "model-1.safetensors"))
    assert _same(open_tensors(folder))


def test_safetensors_win_over_a_pickle(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    assert _same(open_tensors(tmp_path))


def test_folder_without_weights_says_what_is_there(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFormatError, match=r"no weights .* it has model\.gguf"):
        open_tensors(tmp_path)


@pytest.mark.parametrize(
    "shard",
    ["../outside.safetensors", "/etc/passwd", "a/../../b.safetensors", "..\\b.safetensors", "", ".", "..", "a/b", "a\0b"],
)
def test_index_that_leaves_the_folder_is_refused(tmp_path, shard):
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file(TENSORS, tmp_path / "outside.safetensors")
    _write_index(folder, {"a": shard})
    with pytest.raises(ModelFormatError, match="outside the folder"):
        open_tensors(folder)


def test_shard_is_refused_when_it_is_a_link_out_of_the_folder(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file(TENSORS, tmp_path / "outside.safetensors")
    (folder / "x.safetensors").symlink_to(tmp_path / "outside.safetensors")
    _write_index(folder, dict.fromkeys(TENSORS, "x.safetensors"))
    with pytest.raises(ModelFormatError, match=r"x\.safetensors is a link to .*outside\.safetensors, outside the folder"):
        open_tensors(folder)


def test_shard_is_read_when_the_folder_itself_is_a_link(tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    save_file(TENSORS, real / "y.safetensors")
    (real / "x.safetensors").symlink_to("y.safetensors")
    _write_index(real, dict.fromkeys(TENSORS, "x.safetensors"))
    (tmp_path / "link").symlink_to(real)
    assert _same(open_tensors(tmp_path / "link"))


def test_index_and_shards_that_disagree(tmp_path):
    _write_index(tmp_path, {"a": "x-1.safetensors", "zz": "x-1.safetensors", "b": "x-2.safetensors"})
    save_file({"a": TENSORS["a"]}, tmp_path / "x-1.safetensors")
    with pytest.raises(ModelFormatError, match=r"not in .*: x-2\.safetensors; download"):
        open_tensors(tmp_path)
    save_file({"b": TENSORS["b"]}, tmp_path / "x-2.safetensors")
    with pytest.raises(ModelFormatError, match=r"x-1\.safetensors lacks .*: zz"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_broken_index_is_named(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelFormatError, match=r"model\.safetensors\.index\.json"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("num_bytes", [0, 4, 40, -1])
def test_truncated_safetensors_are_named(tmp_path, num_bytes):
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(ModelFormatError, match=r"model\.safetensors is damaged .* download it again"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.9])
def test_truncated_pickle_is_named(tmp_path, fraction):
    file = tmp_path / "pytorch_model.bin"
    torch.save(TENSORS, file)
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * fraction)])
    with pytest.raises(ModelFormatError, match=r"pytorch_model\.bin cannot be read as weights"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("content", [[1, 2], {"a": 1}, torch.ones(2), {"state_dict": {"a": torch.ones(2)}}])
def test_pickle_that_is_not_weights_is_named(tmp_path, content):
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match=r"pytorch_model\.bin holds something other than weights"):
        open_tensors(tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(4, 4, device="meta"),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.complex(torch.ones(4), torch.ones(4)).conj().imag,
    ],
    ids=["meta", "nested", "negated"],
)
@pytest.mark.parametrize("is_parameter", [False, True])
def test_tensor_of_a_pickle_is_refused_when_its_numbers_are_not_in_its_memory(tmp_path, make, is_parameter):
    tensor = make()
    torch.save({"a": torch.nn.Parameter(tensor) if is_parameter else tensor}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match=r"pytorch_model\.bin"):
        open_tensors(tmp_path)


def test_parameters_in_a_pickle_are_read(tmp_path):
    torch.save({name: torch.nn.Parameter(tensor) for name, tensor in TENSORS.items()}, tmp_path / "pytorch_model.bin")
    assert _same(open_tensors(tmp_path))


def test_code_in_a_pickle_is_not_run(tmp_path):
    torch.save({"a": Malicious(tmp_path / "pwned")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match=r"pytorch_model\.bin cannot be read as weights"):
        open_tensors(tmp_path)
    assert not (tmp_path / "pwned").exists()
