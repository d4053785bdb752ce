"""Read the header of a GGUF file: metadata and the directory of its tensors. The input is not trusted."""

from __future__ import annotations

import math
import os
import re
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.base.gguf_metadata import GgufMetadata, GgufValue
from quire.base.logging import get_logger
from quire.base.shared_reads import read_once

logger = get_logger(__name__)

BLOCK_SIZES: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "F64": (1, 8),
    "I8": (1, 1),
    "I16": (1, 2),
    "I32": (1, 4),
    "I64": (1, 8),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
}
"""Tensor type -> elements and bytes of one block."""

_TYPE_NAMES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 4: "Q4_2", 5: "Q4_3", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1"},
    **{10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS"},
    **{19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64"},
    **{28: "F64", 29: "IQ1_M", 30: "BF16", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0"},
    **{36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0"},
}
_SCALARS = {0: "u8", 1: "i8", 2: "u16", 3: "i16", 4: "u32", 5: "i32", 6: "f32", 7: "bool", 10: "u64", 11: "i64", 12: "f64"}
_CODES = dict(u8="B", i8="b", u16="H", i16="h", u32="I", i32="i", f32="f", bool="B", u64="Q", i64="q", f64="d")  # noqa: C408
_STRING, _ARRAY = 8, 9

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MIN_PAIR_BYTES, _MIN_TENSOR_BYTES = 13, 25
_MAX_ENTRIES = 1_000_000
_MAX_STRING_BYTES = 64 << 20
_MAX_HEADER_BYTES = 512 << 20
_MAX_NAME_BYTES = 63
_MAX_DIMS = 4
_MIN_ALIGNMENT, _DEFAULT_ALIGNMENT, _MAX_ALIGNMENT = 8, 32, 1 << 20
_MAX_SHARDS = 10_000
_SHARD_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The location of a tensor.

    type_name  a key of BLOCK_SIZES
    shape      outermost dimension first; rows are blocks of the last one
    start      of its bytes in the file at `path`
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    path: Path
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a GGUF file, or of all files of a split one.

    metadata  of the first file
    tensors   in the order of the files
    sizes     bytes of each file when its header was read, to check for changes when the data is mapped
    """

    path: Path
    metadata: GgufMetadata
    tensors: dict[str, GgufTensor]
    sizes: dict[Path, int]


def is_gguf(path: Path) -> bool:
    """Return whether a path is a file with the suffix .gguf."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def shard_number(path: Path) -> int | None:
    """Return the part number of a split file from its name, counted from 1, or None if it is not split."""
    match = _SHARD_NAME.fullmatch(path.name)
    return None if match is None else int(match[2])


def read_gguf(path: Path) -> GgufFile:
    """Return the header of a GGUF file and of the files that it is split into; within `shared_reads` it is read once.

    Raises ModelFormatError for a damaged file, UnsupportedError for an unsupported version, byte order or tensor type.
    """
    return read_once(path, _read_gguf)


def _read_gguf(path: Path) -> GgufFile:
    first = read_gguf_file(path)
    num_shards = first.metadata.integer("split.count") or 1
    if num_shards == 1:
        return first
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or int(match[3]) != num_shards or not 1 < num_shards <= _MAX_SHARDS:
        raise ModelFormatError(
            f"{path} says it is one of {num_shards} files; its name must end in -00001-of-{num_shards:05}.gguf"
        )
    if int(match[2]) != 1 or first.metadata.integer("split.no") != 0:
        raise ModelFormatError(f"{path} is not the first of {num_shards} files; give {match[1]}-00001-of-{match[3]}.gguf")
    tensors, sizes = dict(first.tensors), dict(first.sizes)
    for number in range(2, num_shards + 1):
        shard = read_gguf_file(path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf"))
        if shard.metadata.integer("split.no") != number - 1 or shard.metadata.integer("split.count") != num_shards:
            raise ModelFormatError(f"{shard.path} does not belong to {path.name}: split.no or split.count differ from its name")
        repeated = next((name for name in shard.tensors if name in tensors), None)
        if repeated is not None:
            raise ModelFormatError(f"{shard.path}: tensor {repeated!r} is in an earlier file already")
        tensors |= shard.tensors
        sizes |= shard.sizes
    num_tensors = first.metadata.integer("split.tensors.count")
    if num_tensors is not None and num_tensors != len(tensors):
        raise ModelFormatError(f"{path}: split.tensors.count is {num_tensors}, but the files hold {len(tensors)} tensors")
    return GgufFile(path, first.metadata, tensors, sizes)


def read_gguf_file(path: Path) -> GgufFile:
    """Read one file, without the other shards and without sharing; see `read_gguf`."""
    try:
        with path.open("rb") as stream:
            return _Reader(stream, path, os.fstat(stream.fileno()).st_size).read()
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error}") from error


class _Reader:
    """Parses one header; every length is checked against the rest of the file before it is used."""

    def __init__(self, stream: BinaryIO, path: Path, size: int) -> None:
        self._stream, self._path, self._size = stream, path, size
        self._position = 0
        self._where = "the header"

    def read(self) -> GgufFile:
        num_tensors, num_pairs = self._start()
        values = self._metadata(num_pairs)
        alignment = self._alignment(values)
        entries = [self._entry(index) for index in range(num_tensors)]
        tensors = self._place(entries, alignment)
        return GgufFile(self._path, GgufMetadata(self._path, values), tensors, {self._path: self._size})

    def _error(self, message: str) -> ModelFormatError:
        return ModelFormatError(f"{self._path} is damaged or not a GGUF file: {self._where}: {message}; get the file again")

    def _bytes(self, count: int) -> bytes:
        if count > self._size - self._position:
            raise self._error(f"{count} bytes are announced, {self._size - self._position} are left")
        if self._position + count > _MAX_HEADER_BYTES:
            raise self._error(f"the header is longer than {_MAX_HEADER_BYTES} bytes")
        found = self._stream.read(count)
        if len(found) != count:
            raise self._error("the file became shorter while it was read")
        self._position += count
        return found

    def _integer(self, num_bytes: int) -> int:
        return int.from_bytes(self._bytes(num_bytes), "little")

    def _text(self) -> str:
        length = self._integer(8)
        if length > _MAX_STRING_BYTES:
            raise self._error(f"a string of {length} bytes, allowed are {_MAX_STRING_BYTES}")
        try:
            return self._bytes(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error(f"a string is not UTF-8 ({error.reason})") from None

    def _start(self) -> tuple[int, int]:
        if self._bytes(4) != _MAGIC:
            raise self._error("it does not begin with GGUF")
        version = self._integer(4)
        if version and version & 0xFFFF == 0:
            raise UnsupportedError(f"{self._path} is a big-endian GGUF file, which is not supported; get the little-endian one")
        if version not in _VERSIONS:
            raise self._error(f"version {version}, supported are {_VERSIONS}")
        num_tensors, num_pairs = self._integer(8), self._integer(8)
        for noun, count, min_bytes in (("tensors", num_tensors, _MIN_TENSOR_BYTES), ("pairs", num_pairs, _MIN_PAIR_BYTES)):
            if count > min(_MAX_ENTRIES, (self._size - self._position) // min_bytes):
                raise self._error(f"{count} {noun} are announced, more than allowed or than the file can hold")
        return num_tensors, num_pairs

    def _metadata(self, num_pairs: int) -> dict[str, GgufValue]:
        values: dict[str, GgufValue] = {}
        for index in range(num_pairs):
            self._where = f"key {index}"
            key = self._text()
            if not key or key in values:
                raise self._error(f"{key!r} is there twice" if key else "it is empty")
            self._where = f"the value of {key[:100]!r}"
            values[key] = self._value()
        return values

    def _value(self) -> GgufValue:
        type_id = self._integer(4)
        if type_id == _STRING:
            return GgufValue("string", self._text())
        if type_id == _ARRAY:
            return self._array()
        if type_id not in _SCALARS:
            raise self._error(f"type {type_id} is not known")
        kind = _SCALARS[type_id]
        (value,) = struct.unpack(f"<{_CODES[kind]}", self._bytes(struct.calcsize(f"<{_CODES[kind]}")))
        if kind == "bool":
            if value > 1:
                raise self._error(f"a boolean must be 0 or 1, got {value}")
            value = bool(value)
        return GgufValue(kind, value)

    def _array(self) -> GgufValue:
        type_id, count = self._integer(4), self._integer(8)
        if type_id != _STRING and type_id not in _SCALARS:
            raise self._error(f"an array of type {type_id} is not allowed")
        item_bytes = 8 if type_id == _STRING else struct.calcsize(f"<{_CODES[_SCALARS[type_id]]}")
        if count > (self._size - self._position) // item_bytes:
            raise self._error(f"an array of {count} items is announced, more than the file can hold")
        if type_id == _STRING:
            return GgufValue("string[]", [self._text() for _ in range(count)])
        items: array[int] | array[float] = array(_CODES[_SCALARS[type_id]])
        if items.itemsize != item_bytes:
            raise UnsupportedError(f"arrays of {_SCALARS[type_id]} cannot be read on this platform")
        items.frombytes(self._bytes(count * item_bytes))
        if sys.byteorder == "big":
            items.byteswap()
        if _SCALARS[type_id] == "bool" and count and max(items) > 1:
            raise self._error("a boolean must be 0 or 1")
        return GgufValue(f"{_SCALARS[type_id]}[]", items)

    def _alignment(self, values: dict[str, GgufValue]) -> int:
        found = values.get("general.alignment", GgufValue("u32", _DEFAULT_ALIGNMENT))
        alignment = found.value
        is_valid = isinstance(alignment, int) and found.kind == "u32" and _MIN_ALIGNMENT <= alignment <= _MAX_ALIGNMENT
        if not isinstance(alignment, int) or not is_valid or alignment & (alignment - 1):
            self._where = "general.alignment"
            raise self._error(f"must be a u32, a power of two from {_MIN_ALIGNMENT} to {_MAX_ALIGNMENT}, got {found}")
        return alignment

    def _entry(self, index: int) -> tuple[str, str, tuple[int, ...], int]:
        """Return name, type, shape and offset of the next tensor."""
        self._where = f"the name of tensor {index}"
        name = self._text()
        if not 0 < len(name.encode()) <= _MAX_NAME_BYTES or "\0" in name:
            raise self._error(f"must have 1 to {_MAX_NAME_BYTES} bytes, none of them zero, got {name[:100]!r}")
        self._where = f"tensor {name!r}"
        num_dims = self._integer(4)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._error(f"must have 1 to {_MAX_DIMS} dimensions, got {num_dims}")
        shape = tuple(reversed([self._integer(8) for _ in range(num_dims)]))
        if 0 in shape or math.prod(shape) >= 1 << 63:
            raise self._error(f"shape {list(shape)} is empty or too large")
        type_id, offset = self._integer(4), self._integer(8)
        type_name = _TYPE_NAMES.get(type_id)
        if type_name is None:
            raise self._error(f"type {type_id} is not known")
        if type_name not in BLOCK_SIZES:
            raise UnsupportedError(
                f"{self._path}: tensor {name!r} has type {type_name}, which is not supported; get the model in another "
                f"quantisation: {', '.join(kind for kind in BLOCK_SIZES if kind[0] != 'I' or kind[1] == 'Q')}"
            )
        if shape[-1] % BLOCK_SIZES[type_name][0]:
            raise self._error(
                f"rows of {shape[-1]} elements cannot be {type_name}, whose blocks have {BLOCK_SIZES[type_name][0]}"
            )
        return name, type_name, shape, offset

    def _place(self, entries: Sequence[tuple[str, str, tuple[int, ...], int]], alignment: int) -> dict[str, GgufTensor]:
        """Return the tensors: each must begin where the previous one ends, aligned, and all must lie inside the file."""
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        next_offset = 0
        end = data_start
        for name, type_name, shape, offset in entries:
            self._where = f"tensor {name!r}"
            if name in tensors:
                raise self._error("the name is there twice")
            if offset != next_offset:
                raise self._error(f"it must begin at byte {next_offset} of the data, where the one before ends, got {offset}")
            block_elements, block_bytes = BLOCK_SIZES[type_name]
            num_bytes = math.prod(shape) // block_elements * block_bytes
            end = data_start + offset + num_bytes
            if end > self._size:
                raise self._error(f"its data ends at byte {end}, the file has {self._size}")
            tensors[name] = GgufTensor(name, type_name, shape, self._path, data_start + offset, num_bytes)
            next_offset = -(-(offset + num_bytes) // alignment) * alignment
        if self._size > data_start + next_offset:
            logger.warning("%s has %d bytes after its last tensor, which are ignored", self._path, self._size - end)
        return tensors
