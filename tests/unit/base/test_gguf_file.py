"""GGUF headers: whole files, and every way of damaging one that we know of."""

import os
import struct
import tracemalloc

import numpy as np
import pytest

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.base.gguf_file import BLOCK_SIZES, is_gguf, read_gguf, shard_number
from tests.gguf_writer import F32, I8, Q4_0, entry, header, padded, pair, string, write_gguf

MAX_PEAK_BYTES = 1 << 20
ARCHITECTURE = pair("general.architecture", "string", "llama")
U64_MAX = (1 << 64) - 1


def file_bytes(*, pairs=(ARCHITECTURE,), entries=(), data=b"", num_pairs=None, num_tensors=None, alignment=32, **fixed):
    """Return a file from its parts, with the counts of the parts or others."""
    start = header(
        len(entries) if num_tensors is None else num_tensors, len(pairs) if num_pairs is None else num_pairs, **fixed
    )
    return padded(start + b"".join(pairs) + b"".join(entries), alignment) + data


def one_pair(content):
    return file_bytes(pairs=(content,))


def one_tensor(*fields, data=bytes(64)):
    return file_bytes(entries=(entry(*fields),), data=data)


def raw_value(type_id, content):
    return string("key") + struct.pack("<I", type_id) + content


def array_header(type_id, count):
    return struct.pack("<IQ", type_id, count)


def alignment(kind, content):
    return file_bytes(pairs=(ARCHITECTURE, pair("general.alignment", kind, content)))


SHORT_KV = string("k") + struct.pack("<I", 0) + b"\1"
DAMAGED = {
    "empty": (b"", "announced"),
    "magic_cut": (b"GGU", "announced"),
    "magic_other": (file_bytes(magic=b"GGML"), "does not begin with GGUF"),
    "header_cut": (file_bytes()[:20], "announced"),
    "version_0": (file_bytes(version=0), "version 0"),
    "version_1": (file_bytes(version=1), "version 1"),
    "version_4": (file_bytes(version=4), "version 4"),
    "num_pairs_huge": (file_bytes(num_pairs=U64_MAX), "pairs are announced"),
    "num_pairs_negative": (file_bytes(num_pairs=1 << 63), "pairs are announced"),
    "num_pairs_above_cap": (file_bytes(num_pairs=1_000_001, data=bytes(14_000_000)), "pairs are announced"),
    "num_pairs_one_more": (file_bytes(pairs=(SHORT_KV,), num_pairs=2), "twice|empty|announced"),
    "num_tensors_huge": (file_bytes(num_tensors=U64_MAX), "tensors are announced"),
    "num_tensors_more_than_fit": (file_bytes(num_tensors=40), "tensors are announced"),
    "num_tensors_one_more": (file_bytes(num_tensors=1, data=bytes(32)), "name of tensor 0"),
    "key_empty": (one_pair(pair("", "u8", 1)), "empty"),
    "key_twice": (file_bytes(pairs=(ARCHITECTURE, ARCHITECTURE)), "twice"),
    "key_not_utf8": (one_pair(pair(b"\xff\xfe", "u8", 1)), "not UTF-8"),
    "key_length_huge": (one_pair(struct.pack("<Q", U64_MAX) + bytes(16)), "a string of"),
    "key_length_past_end": (one_pair(struct.pack("<Q", 5000) + bytes(16)), "announced"),
    "key_cut": (file_bytes()[:30], "announced"),
    "value_string_huge": (one_pair(raw_value(8, struct.pack("<Q", 1 << 62))), "a string of"),
    "value_string_past_end": (one_pair(raw_value(8, struct.pack("<Q", 60 << 20))), "announced"),
    "value_string_not_utf8": (one_pair(pair("key", "string", b"\xc3\x28")), "not UTF-8"),
    "value_type_13": (one_pair(raw_value(13, bytes(8))), "type 13 is not known"),
    "value_type_huge": (one_pair(raw_value(0xFFFFFFFF, bytes(8))), "is not known"),
    "value_cut": (header(0, 1) + string("key") + struct.pack("<IB", 4, 0), "announced"),
    "bool_2": (one_pair(raw_value(7, b"\2")), "0 or 1"),
    "bool_array_2": (one_pair(raw_value(9, array_header(7, 2) + b"\1\2")), "0 or 1"),
    "array_nested": (one_pair(raw_value(9, array_header(9, 1) + array_header(4, 0))), "array of type 9"),
    "array_nested_deep": (one_pair(raw_value(9, array_header(9, 1) * 5000)), "array of type 9"),
    "array_type_99": (one_pair(raw_value(9, array_header(99, 1))), "array of type 99"),
    "array_u8_huge": (one_pair(raw_value(9, array_header(0, 1 << 40))), "an array of"),
    "array_f64_wraps": (one_pair(raw_value(9, array_header(12, 1 << 61))), "an array of"),
    "array_u64_max": (one_pair(raw_value(9, array_header(10, U64_MAX))), "an array of"),
    "array_strings_huge": (one_pair(raw_value(9, array_header(8, 1 << 50))), "an array of"),
    "array_strings_one_huge": (one_pair(raw_value(9, array_header(8, 1) + struct.pack("<Q", 1 << 40))), "a string of"),
    "array_strings_not_utf8": (one_pair(pair("key", "string[]", [b"ok", b"\xff"])), "not UTF-8"),
    "array_cut": (header(0, 1) + raw_value(9, array_header(4, 4) + bytes(12)), "an array of"),
    "alignment_3": (alignment("u32", 3), "power of two"),
    "alignment_0": (alignment("u32", 0), "power of two"),
    "alignment_4": (alignment("u32", 4), "power of two"),
    "alignment_48": (alignment("u32", 48), "power of two"),
    "alignment_huge": (alignment("u32", 1 << 30), "power of two"),
    "alignment_u64": (alignment("u64", 32), "power of two"),
    "alignment_string": (alignment("string", "32"), "power of two"),
    "name_empty": (one_tensor("", (4,), F32, 0), "1 to 63 bytes"),
    "name_64_bytes": (one_tensor("n" * 64, (4,), F32, 0), "1 to 63 bytes"),
    "name_with_nul": (one_tensor(b"a\0b", (4,), F32, 0), "1 to 63 bytes"),
    "name_not_utf8": (one_tensor(b"\xff", (4,), F32, 0), "not UTF-8"),
    "name_length_huge": (file_bytes(entries=(struct.pack("<Q", 1 << 62) + bytes(40),)), "a string of"),
    "name_twice": (file_bytes(entries=(entry("a", (8,), F32, 0), entry("a", (8,), F32, 32)), data=bytes(64)), "twice"),
    "dims_0": (one_tensor("a", (), F32, 0), "1 to 4 dimensions"),
    "dims_5": (one_tensor("a", (1, 1, 1, 1, 1), F32, 0), "1 to 4 dimensions"),
    "dims_huge": (file_bytes(entries=(string("a") + struct.pack("<I", 0xFFFFFFFF) + bytes(40),)), "1 to 4 dimensions"),
    "dim_zero": (one_tensor("a", (4, 0), F32, 0), "empty or too large"),
    "dim_negative": (one_tensor("a", (1 << 63,), F32, 0), "empty or too large"),
    "dim_product_wraps": (one_tensor("a", (1 << 32, 1 << 32), F32, 0), "empty or too large"),
    "dim_product_wraps_to_small": (one_tensor("a", (1 << 33, 1 << 31, 4), F32, 0), "empty or too large"),
    "dim_bytes_near_max": (one_tensor("a", (1 << 31, 1 << 31), I8, 0), "its data ends"),
    "dim_bytes_above_u64": (one_tensor("a", ((1 << 62) + 1,), F32, 0), "its data ends"),
    "dim_more_than_data": (one_tensor("a", (1000,), F32, 0), "its data ends"),
    "row_not_whole_blocks": (one_tensor("a", (48, 2), Q4_0, 0), "cannot be Q4_0"),
    "row_less_than_block": (one_tensor("a", (16,), Q4_0, 0), "cannot be Q4_0"),
    "type_unknown": (one_tensor("a", (4,), 9999, 0), "type 9999 is not known"),
    "offset_not_aligned": (one_tensor("a", (4,), F32, 4), "must begin at byte 0"),
    "offset_gap": (one_tensor("a", (4,), F32, 32), "must begin at byte 0"),
    "offset_wraps": (one_tensor("a", (16,), F32, (1 << 64) - 32), "must begin at byte 0"),
    "offset_overlap": (
        file_bytes(entries=(entry("a", (16,), F32, 0), entry("b", (16,), F32, 32)), data=bytes(128)),
        "must begin at byte 64",
    ),
    "offset_reordered": (
        file_bytes(entries=(entry("b", (8,), F32, 32), entry("a", (8,), F32, 0)), data=bytes(64)),
        "must begin at byte 0",
    ),
    "data_cut": (one_tensor("a", (16,), F32, 0, data=bytes(63)), "its data ends"),
    "data_absent": (one_tensor("a", (16,), F32, 0, data=b""), "its data ends"),
    "directory_cut": (header(1, 0) + entry("a", (16,), F32, 0)[:-4], "announced|tensors are"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_file_is_refused_without_a_large_allocation(tmp_path, case):
    content, reason = DAMAGED[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFormatError, match=reason) as raised:
            read_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MAX_PEAK_BYTES
    assert str(path) in str(raised.value)


def test_there_are_enough_damaged_files():
    assert len(DAMAGED) >= 54


@pytest.mark.parametrize("length", [1, 7, 25, 60, 100, 200])
def test_every_cut_of_a_file_is_refused(tmp_path, length):
    path = write_gguf(tmp_path / "a.gguf", {"a.b": ("string[]", ["x", "y"]), "a.c": ("u32", 1)}, {"t": np.ones(64, np.float32)})
    content = path.read_bytes()
    for end in range(length, len(content) - 1, 37):
        path.write_bytes(content[:end])
        with pytest.raises(ModelFormatError):
            read_gguf(path)


def test_random_damage_never_crashes(tmp_path):
    metadata = {"general.architecture": ("string", "llama"), "t": ("string[]", ["a", "bc"]), "n": ("f32[]", [1.0, 2.0])}
    path = write_gguf(tmp_path / "a.gguf", metadata, {"t": np.ones((4, 32), np.float32), "u": np.ones(8, np.float16)})
    content = path.read_bytes()
    generator = np.random.default_rng(7)
    outcomes = set()
    for _ in range(400):
        damaged = bytearray(content)
        damaged[generator.integers(0, len(content) - 600)] = generator.integers(0, 256)
        path.write_bytes(damaged)
        try:
            read_gguf(path)
            outcomes.add("read")
        except (ModelFormatError, UnsupportedError):
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def test_big_endian_is_refused_by_name(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(UnsupportedError, match="big-endian"):
        read_gguf(tmp_path / "a.gguf")


@pytest.mark.parametrize(("type_id", "name"), [(9, "Q8_1"), (16, "IQ2_XXS"), (19, "IQ1_S"), (34, "TQ1_0"), (4, "Q4_2")])
def test_types_that_are_not_supported_are_refused_by_name(tmp_path, type_id, name):
    (tmp_path / "a.gguf").write_bytes(one_tensor("blk.0.x", (256,), type_id, 0))
    with pytest.raises(UnsupportedError, match=rf"blk\.0\.x.* {name},.*Q4_K"):
        read_gguf(tmp_path / "a.gguf")


def test_trailing_bytes_are_only_a_warning(tmp_path, caplog):
    (tmp_path / "a.gguf").write_bytes(one_tensor("a", (16,), F32, 0, data=bytes(64) + b"junk"))
    assert read_gguf(tmp_path / "a.gguf").tensors["a"].num_bytes == 64
    assert "4 bytes after its last tensor" in caplog.text


def test_missing_padding_of_the_last_tensor_is_no_matter(tmp_path, caplog):
    (tmp_path / "a.gguf").write_bytes(one_tensor("a", (3,), F32, 0, data=bytes(12)))
    assert read_gguf(tmp_path / "a.gguf").tensors["a"].shape == (3,)
    assert not caplog.text


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_whole_file_is_read(tmp_path, version, alignment):
    metadata = {} if alignment is None else {"general.alignment": ("u32", alignment)}
    numbers = {kind: -1 if kind[0] == "i" else 7 for kind in ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64")}
    metadata |= {f"n.{kind}": (kind, number) for kind, number in numbers.items()}
    metadata |= {"x.f32": ("f32", 0.5), "x.f64": ("f64", 1e300), "yes": ("bool", True), "text": ("string", "é▁\0")}
    metadata |= {"list": ("string[]", ["", "a", "▁"]), "floats": ("f32[]", [0.5, -2.0]), "flags": ("bool[]", [True, False])}
    metadata |= {"none": ("i32[]", [])}
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": (Q4_0, (3, 2, 64), bytes(range(216))),
        "c": np.ones((1, 1, 1, 5), np.float16),
    }
    file = read_gguf(write_gguf(tmp_path / "a.gguf", metadata, tensors, version))
    content = file.path.read_bytes()
    got = file.metadata
    assert {kind: got.integer(f"n.{kind}") for kind in numbers} == numbers
    assert (got.number("x.f32"), got.number("x.f64"), got.number("n.u8")) == (0.5, 1e300, 7)
    assert (got.boolean("yes"), got.string("text"), got.strings("list")) == (True, "é▁\0", ["", "a", "▁"])
    assert list(got.array("floats", "f32")) == [0.5, -2.0]
    assert list(got.array("none", "i32", "u32")) == []
    assert [got.raw("flags").value[index] for index in range(2)] == [1, 0]
    assert list(got) == list(metadata)
    assert {name: (tensor.type_name, tensor.shape) for name, tensor in file.tensors.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("Q4_0", (3, 2, 64)),
        "c": ("F16", (1, 1, 1, 5)),
    }
    for name, tensor in file.tensors.items():
        stored = tensors[name]
        want = stored.tobytes() if isinstance(stored, np.ndarray) else stored[2]
        assert content[tensor.start : tensor.start + tensor.num_bytes] == want
        assert tensor.start % (alignment or 32) == 0
    assert file.sizes == {file.path: len(content)}


@pytest.mark.parametrize(
    ("getter", "kind", "content"),
    [
        (lambda m: m.integer("k"), "bool", True),
        (lambda m: m.integer("k"), "f32", 1.0),
        (lambda m: m.number("k"), "string", "1"),
        (lambda m: m.number("k"), "bool", True),
        (lambda m: m.boolean("k"), "u8", 1),
        (lambda m: m.string("k"), "string[]", ["a"]),
        (lambda m: m.strings("k"), "string", "a"),
        (lambda m: m.strings("k"), "u8[]", [1]),
        (lambda m: m.array("k", "f32"), "f64[]", [1.0]),
        (lambda m: m.array("k", "i32", "u32"), "i64[]", [1]),
    ],
)
def test_values_of_another_type_are_refused(tmp_path, getter, kind, content):
    metadata = read_gguf(write_gguf(tmp_path / "a.gguf", {"k": (kind, content)})).metadata
    with pytest.raises(ModelFormatError, match="k must be a"):
        getter(metadata)
    assert metadata.integer("absent") is None


@pytest.mark.parametrize("number", [0.95, 1e-6, 10000.0, 0.22, -1e-45, 3.4028235e38, 0.1 + 2**-25, 12.0, 0.0])
def test_numbers_of_32_bits_are_read_as_people_write_them(tmp_path, number):
    metadata = read_gguf(write_gguf(tmp_path / "a.gguf", {"k": ("f32", number), "inf": ("f32", float("inf"))})).metadata
    found = metadata.number("k")
    assert np.float32(found) == np.float32(number)
    assert len(repr(found)) <= max(len(repr(number)), 11)
    assert metadata.number("inf") == float("inf")


def write_split(folder, count=3, changes=None):
    """Write a file of `count` parts, one tensor each; changes: part number -> metadata."""
    for number in range(1, count + 1):
        metadata = {"general.architecture": ("string", "llama")} if number == 1 else {}
        metadata |= {"split.no": ("u16", number - 1), "split.count": ("u16", count), "split.tensors.count": ("i32", count)}
        metadata |= (changes or {}).get(number, {})
        write_gguf(folder / f"m-{number:05}-of-{count:05}.gguf", metadata, {f"t{number}": np.full(8, number, np.float32)})
    return folder / f"m-00001-of-{count:05}.gguf"


def test_split_file_is_read_as_one(tmp_path):
    file = read_gguf(write_split(tmp_path))
    assert list(file.tensors) == ["t1", "t2", "t3"]
    assert file.metadata.string("general.architecture") == "llama"
    assert [tensor.path.name for tensor in file.tensors.values()] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert len(file.sizes) == 3
    assert [shard_number(path) for path in file.sizes] == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({2: {"split.no": ("u16", 2)}}, "does not belong"),
        ({3: {"split.count": ("u16", 4)}}, "does not belong"),
        ({1: {"split.tensors.count": ("i32", 4)}}, "the files hold 3"),
        ({1: {"split.count": ("u16", 60000)}}, "its name must end"),
        ({1: {"split.no": ("u16", 1)}}, "not the first"),
    ],
)
def test_split_file_that_contradicts_itself_is_refused(tmp_path, changes, reason):
    with pytest.raises(ModelFormatError, match=reason):
        read_gguf(write_split(tmp_path, changes=changes))


def test_split_file_with_a_part_missing_twice_or_first_is_refused(tmp_path):
    first = write_split(tmp_path)
    with pytest.raises(ModelFormatError, match="not the first"):
        read_gguf(tmp_path / "m-00002-of-00003.gguf")
    metadata = {"split.no": ("u16", 2), "split.count": ("u16", 3)}
    write_gguf(tmp_path / "m-00003-of-00003.gguf", metadata, {"t1": np.ones(8, np.float32)})
    with pytest.raises(ModelFormatError, match="'t1' is in an earlier file"):
        read_gguf(first)
    os.remove(tmp_path / "m-00003-of-00003.gguf")
    with pytest.raises(ModelFormatError, match="cannot be read"):
        read_gguf(first)
    first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelFormatError, match="-00001-of-00003"):
        read_gguf(tmp_path / "renamed.gguf")


def test_only_files_called_gguf_are_gguf(tmp_path):
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "a.GGUF").write_bytes(b"")
    assert is_gguf(tmp_path / "a.GGUF")
    assert not is_gguf(tmp_path / "folder.gguf")
    assert not is_gguf(tmp_path / "absent.gguf")
    assert shard_number(tmp_path / "a.GGUF") is None


def test_sizes_of_blocks_are_those_of_the_format():
    assert BLOCK_SIZES["Q6_K"] == (256, 128 + 64 + 16 + 2)
    assert BLOCK_SIZES["Q4_K"] == (256, 2 + 2 + 12 + 128)
