"""Malformed safetensors: each is refused with the name of the file, and what is merely odd is read."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save

from quire.base.errors import ModelFormatError
from quire.model import safetensors_header
from quire.model.stored_tensors import open_tensors

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}
DATA = bytes(range(32))


def _file(header, data=DATA, header_bytes=None):
    """Return a file of a header (JSON value, text or bytes); header_bytes: the length that the file claims instead."""
    raw = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(raw) if header_bytes is None else header_bytes) + raw + data


def _with(**changes):
    return _file({"a": {**A, **changes}, "b": B})


MALFORMED = {
    "empty": b"",
    "seven_bytes": b"\x10" * 7,
    "header_longer_than_file": _file({"a": A, "b": B}, header_bytes=10_000),
    "header_length_near_2**64": _file({"a": A, "b": B}, header_bytes=(1 << 64) - 1),
    "header_length_zero": _file(b"", data=b""),
    "header_over_limit": _file(b"{" + b" " * (17 << 20) + b"}", data=b""),
    "leading_space": _file(" " + json.dumps({"a": A, "b": B})),
    "leading_space_without_tensors": _file(" {}", data=b""),
    "list": _file([A, B]),
    "no_json": _file("{nonsense}"),
    "not_utf8": _file(b'{"\xff\xfe": 1}'),
    "nested_deep": _file('{"a":' + "[" * 200_000 + "]" * 200_000 + "}"),
    "duplicate_names": _file(f'{{"a": {json.dumps(A)}, "a": {json.dumps(A)}, "b": {json.dumps(B)}}}'),
    "entry_not_an_object": _file({"a": [1, 2], "b": B}),
    "unknown_dtype": _with(dtype="F99"),
    "dtype_not_a_string": _with(dtype=7),
    "no_shape": _with(shape=None),
    "negative_size": _with(shape=[-2, -3]),
    "float_size": _with(shape=[2.0, 3]),
    "string_size": _with(shape=["2", "3"]),
    "product_overflows": _with(shape=[1 << 32, 1 << 32, 1 << 32]),
    "product_wraps_to_the_right_size": _with(shape=[(1 << 62) + 6]),
    "offsets_end_before_begin": _with(data_offsets=[24, 0]),
    "offsets_negative": _with(data_offsets=[-24, 0]),
    "offsets_three": _with(data_offsets=[0, 24, 32]),
    "size_and_offsets_differ": _with(shape=[2, 2]),
    "offsets_beyond_the_file": _file({"a": {**A, "data_offsets": [1 << 40, (1 << 40) + 24]}, "b": B}),
    "overlap": _file({"a": A, "b": {**B, "data_offsets": [20, 28]}}, data=DATA[:28]),
    "gap": _file({"a": A, "b": {**B, "data_offsets": [28, 36]}}, data=bytes(36)),
    "data_missing": _file({"a": A, "b": B}, data=DATA[:31]),
    "data_trailing": _file({"a": A, "b": B}, data=DATA + b"\0"),
    "metadata_not_strings": _file({"__metadata__": {"format": 1}, "a": A, "b": B}),
    "metadata_not_an_object": _file({"__metadata__": "pt", "a": A, "b": B}),
}
READ = {
    "ok": _file({"a": A, "b": B}),
    "zero_dim": _file({"a": A, "b": B, "c": {"dtype": "F32", "shape": [0, 5], "data_offsets": [32, 32]}}),
    "extra_field": _file({"a": {**A, "note": "x"}, "b": B, "__metadata__": {"format": "pt"}}),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_file_is_refused_when_it_is_malformed(tmp_path, name):
    (tmp_path / "model.safetensors").write_bytes(MALFORMED[name])
    with pytest.raises(ModelFormatError, match=r"model\.safetensors is damaged .* download it again") as caught:
        open_tensors(tmp_path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", READ)
def test_file_is_read_when_it_is_merely_odd(tmp_path, name):
    (tmp_path / "model.safetensors").write_bytes(READ[name])
    opened = open_tensors(tmp_path)
    assert torch.equal(opened["a"], torch.frombuffer(bytearray(DATA[:24]), dtype=torch.float32).view(2, 3))
    assert torch.equal(opened["b"].view(torch.int16), torch.frombuffer(bytearray(DATA[24:]), dtype=torch.int16))


def test_values_are_right_when_data_is_not_aligned(tmp_path):
    header = {"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}, "b": {**B, "data_offsets": [3, 11]}}
    values = torch.arange(4).to(torch.bfloat16)
    data = b"\1\2\3" + bytes(values.view(torch.uint8).tolist())
    text = json.dumps(header)
    (tmp_path / "model.safetensors").write_bytes(_file(text + " " * (-len(text) % 8), data))
    tensor = open_tensors(tmp_path)["b"]
    assert torch.equal(tensor, values)
    assert tensor.data_ptr() % 2 == 0


def test_too_many_tensors_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_header, "_MAX_TENSORS", 1)
    (tmp_path / "model.safetensors").write_bytes(READ["ok"])
    with pytest.raises(ModelFormatError, match="holds 2 tensors, more than 1"):
        open_tensors(tmp_path)


def test_every_dtype_that_safetensors_writes_from_torch_is_known(tmp_path):
    names = "bool uint8 int8 float8_e5m2 float8_e4m3fn float8_e8m0fnu int16 uint16 float16 bfloat16 int32 uint32 float32"
    names += " int64 uint64 float64 complex64"
    tensors = {name: torch.zeros(3, dtype=torch.uint8).to(getattr(torch, name)) for name in names.split()}
    (tmp_path / "model.safetensors").write_bytes(save(tensors))
    opened = open_tensors(tmp_path)
    assert {name: tensor.dtype for name, tensor in opened.items()} == {name: t.dtype for name, t in tensors.items()}
    assert load_file(tmp_path / "model.safetensors").keys() == opened.keys()
