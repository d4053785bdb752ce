"""Write GGUF files, whole ones and piece by piece for damaged ones; written from the format alone, not from the reader."""

import struct
from pathlib import Path

import numpy as np

SCALAR_CODES = {
    **{"u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f")},
    **{"bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d")},
}
STRING, ARRAY = 8, 9
F32, F16, Q4_0, Q8_0, Q4_K, I8, BF16, MXFP4 = 0, 1, 2, 8, 12, 24, 30, 39
ALIGNMENT = 32


def string(text: str | bytes) -> bytes:
    """Return a string as it is stored."""
    content = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(content)) + content


def value(kind: str, content) -> bytes:
    """Return a value with its type; kind is a scalar's name, "string", or either with []."""
    if kind == "string":
        return struct.pack("<I", STRING) + string(content)
    if kind == "string[]":
        return struct.pack("<IIQ", ARRAY, STRING, len(content)) + b"".join(map(string, content))
    code, letter = SCALAR_CODES[kind.removesuffix("[]")]
    if kind.endswith("[]"):
        return struct.pack("<IIQ", ARRAY, code, len(content)) + struct.pack(f"<{len(content)}{letter}", *content)
    return struct.pack(f"<I{letter}", code, content)


def pair(key: str | bytes, kind: str, content) -> bytes:
    """Return a key with its value."""
    return string(key) + value(kind, content)


def entry(name: str | bytes, dims, type_id: int, offset: int) -> bytes:
    """Return an entry of the directory of tensors; dims are as stored, fastest first."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def header(num_tensors: int, num_pairs: int, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    """Return the fixed part."""
    return magic + struct.pack("<IQQ", version, num_tensors, num_pairs)


def padded(content: bytes, alignment: int = ALIGNMENT) -> bytes:
    """Return the bytes with zeros up to a multiple of the alignment."""
    return content + bytes(-len(content) % alignment)


def write_gguf(path: Path, metadata, tensors=(), version: int = 3) -> Path:
    """Write a whole file and return its path.

    metadata  key -> (kind, content)
    tensors   name -> array (f32, f16), or (type id, shape with the outermost dimension first, bytes)
    """
    alignment = metadata.get("general.alignment", ("u32", ALIGNMENT))[1]
    entries, data = b"", b""
    for name, tensor in dict(tensors).items():
        if isinstance(tensor, np.ndarray):
            tensor = ({np.dtype("f4"): F32, np.dtype("f2"): F16}[tensor.dtype], tensor.shape, tensor.tobytes())
        type_id, shape, content = tensor
        entries += entry(name, shape[::-1], type_id, len(data))
        data += padded(content, alignment)
    start = header(len(tensors), len(metadata), version) + b"".join(pair(key, *item) for key, item in metadata.items())
    path.write_bytes(padded(start + entries, alignment) + data)
    return path
