"""Open the tensors of a GGUF file, memory-mapped, under the names and in the layout of a Hugging Face checkpoint."""

from __future__ import annotations

import mmap
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.base.gguf_file import GgufFile, GgufTensor, read_gguf
from quire.model.gguf_common import num_layers_of
from quire.model.gguf_config import gguf_config
from quire.model.gguf_keys import GgufKeys
from quire.model.gguf_names import ROPE_FACTORS, GgufArchitecture, find_architecture
from quire.model.mapped_files import MappedFiles
from quire.quant.gguf_blocks import FLOAT_TYPES, check_is_weight, unpack_blocks
from quire.quant.weight import QuantizedWeight, StoredWeight

_ROTATED = re.compile(r"blk\.\d+\.attn_(q|k)\.(weight|bias)")
_QKV = re.compile(r"blk\.\d+\.attn_qkv\.(weight|bias)")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_LATENT_PART = re.compile(r"blk\.\d{1,6}\.attn_(k|v)_b\.weight")
_STATE_TENSOR = re.compile(
    r"blk\.\d{1,6}\.(ssm_a|ssm_d|ssm_norm\.weight|ssm_conv1d(?:_[qkv])?\.weight|shortconv\.conv\.weight)"
)
_VALUE_HEADS = re.compile(r"blk\.\d{1,6}\.(attn_qkv|attn_gate|ssm_(?:alpha|beta|a|dt|conv1d|out))(?:\.(?:weight|bias))?")
_STACKS = {"altup_proj.weight": "altup_projections", "altup_unembd_proj.weight": "altup_unembed_projections"}
"""Stacks of matrices that the checkpoint has one by one."""
_IN_LAYER = re.compile(r"blk\.(\d{1,6})\.")
_XIELU = {"beta": 0.5, "eps": -1e-6}
_NORM = re.compile(r"(.*[._])?norm\.weight")


def open_gguf_tensors(path: Path, mapped: MappedFiles | None = None) -> dict[str, Tensor | StoredWeight]:
    """Return name in a checkpoint -> tensor, a view of the mapped file, or a weight that is unpacked when it is asked for.

    Rows of q and k are put into the order that rotates halves, norms are stored as they were before conversion, and stacked
    experts are one weight each. Raises ModelFormatError or UnsupportedError.

    mapped  is told which files were mapped
    """
    file = read_gguf(path)
    config = gguf_config(file)
    num_experts = config.get("num_local_experts")
    architecture = find_architecture(
        file.metadata.string("general.architecture") or "", num_experts if isinstance(num_experts, int) else 0
    )
    files = {shard: _MappedFile(shard, size) for shard, size in file.sizes.items()}
    if mapped is not None:
        for shard in files.values():
            shard.add_to(mapped)
    tensors: dict[str, Tensor | StoredWeight] = {}
    keys = GgufKeys(file, file.metadata.string("general.architecture") or "")
    first_drafting = num_layers_of(keys) if keys.integer("nextn_predict_layers") else None
    for name, tensor in file.tensors.items():
        if name in ROPE_FACTORS or _is_drafting(name, first_drafting):
            continue
        check_is_weight(tensor.type_name, name)
        opened = _Opener(files[tensor.path], architecture, config).open(tensor)
        repeated = next((new for new in opened if new in tensors), None)
        if repeated is not None:
            raise ModelFormatError(f"{path} holds {repeated!r} twice, the second time as {name!r}")
        tensors |= opened
    if config.get("hidden_act") == "xielu":
        tensors |= _xielu_numbers(file, config)
    return _join_latent_parts(path, tensors, config) if "kv_lora_rank" in config else tensors


def _is_drafting(name: str, first: int | None) -> bool:
    """Return whether a tensor is of a layer that only drafts: the first of them, and those after it."""
    found = _IN_LAYER.match(name)
    return first is not None and found is not None and int(found[1]) >= first


def _xielu_numbers(file: GgufFile, config: dict[str, object]) -> dict[str, Tensor]:
    """Return the two learned numbers of xIELU in each layer, which are metadata; the other two must be those of all models."""
    num_layers, found = config["num_hidden_layers"], dict[str, Tensor]()
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        key = f"xielu.{name}"
        raw = file.metadata.raw(key)
        is_array = raw is not None and raw.kind.endswith("[]")
        values = file.metadata.array(key, "f32") if is_array else [file.metadata.number(key)] * cast("int", num_layers)
        if values is None or len(values) != num_layers or None in values:
            raise file.metadata.error(key, f"{num_layers} numbers, one for each layer")
        numbers = torch.tensor(values, dtype=torch.float32)
        if name in _XIELU:
            if not torch.allclose(numbers, torch.tensor(_XIELU[name]), rtol=1e-2, atol=0):
                raise UnsupportedError(f"{file.path}: {key} must be {_XIELU[name]} in all layers, got {numbers.tolist()}")
            continue
        found |= {f"layers.{index}.mlp.act_fn.{name}": numbers[index : index + 1] for index in range(len(values))}
    return found


def _join_latent_parts(
    path: Path, tensors: dict[str, Tensor | StoredWeight], config: dict[str, object]
) -> dict[str, Tensor | StoredWeight]:
    """Return the tensors with keys and values of latent rows in one matrix, as the checkpoint has them.

    A file may store them apart: for each head the keys [rank, size], transposed, and the values [size, rank].
    """
    sizes = [config[key] for key in ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")]
    num_heads, rank, key_dim, value_dim = (size if isinstance(size, int) else 0 for size in sizes)
    for name in [name for name in tensors if _LATENT_PART.fullmatch(name)]:
        if ".attn_k_b." not in name:
            continue
        keys, values = tensors.pop(name), tensors.pop(name.replace("attn_k_b", "attn_v_b"), None)
        if not isinstance(keys, StoredWeight) or keys.shape != (num_heads * rank, key_dim):
            raise ModelFormatError(f"{path}: {name} must hold {num_heads} heads of {rank} x {key_dim}")
        if not isinstance(values, StoredWeight) or values.shape != (num_heads * value_dim, rank):
            raise ModelFormatError(
                f"{path}: {name} must have an attn_v_b of {num_heads} heads of {value_dim} x {rank} next to it"
            )
        joined = _LatentRows(keys, values, num_heads)
        read = (*keys.tensors, *values.tensors)
        shape = (num_heads * (key_dim + value_dim), rank)
        new = f"layers.{int(name.split('.')[1])}.self_attn.kv_b_proj.weight"
        tensors[new] = StoredWeight(shape, joined.load, read, is_integer=False, form=f"{keys.form}+{values.form}")
    return tensors


@dataclass(frozen=True, slots=True)
class _LatentRows:
    """What makes keys and values of latent rows, stored apart."""

    keys: StoredWeight
    values: StoredWeight
    num_heads: int

    def load(self) -> Tensor:
        """Return the rows of keys and of values of the first head, then of the next."""
        keys, values = (
            weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
            for weight in (self.keys.load(), self.values.load())
        )
        rank = values.shape[1]
        by_head = keys.view(self.num_heads, rank, -1).transpose(1, 2)
        parts = (by_head, values.view(self.num_heads, -1, rank).to(by_head.dtype))
        return torch.cat(parts, 1).reshape(-1, rank)


class _MappedFile:
    """A file in memory, read where it is used."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        try:
            with path.open("rb") as stream:
                # It keeps a descriptor of its own, so that a file put in its place does not matter.
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelFormatError(f"{path} cannot be read: {error}") from error
        self.check()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def check(self) -> None:
        """Raise ModelFormatError where the file has another size than its header was read with: reading could crash."""
        if self._map.size() != self._size:
            raise ModelFormatError(f"{self._path} was changed while it was read: it had {self._size} bytes; load it again")

    def add_to(self, files: MappedFiles) -> None:
        """Tell of this file, and where it lies."""
        files.add(self._path, self._size, (self._bytes,))

    def bytes_at(self, start: int, count: int) -> Tensor:
        """Return a view of `count` bytes."""
        self.check()
        return self._bytes[start : start + count]


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix [O, K] in a file, and the order in which its rows, or its columns, are wanted."""

    file: _MappedFile
    type_name: str
    name: str
    shape: tuple[int, int]
    start: int
    num_bytes: int
    rows: Tensor | None = None
    columns: Tensor | None = None

    def load(self) -> QuantizedWeight | Tensor:
        """Return the weight, its rows in order: a view of the file where nothing has to change."""
        packed = self.file.bytes_at(self.start, self.num_bytes).view(self.shape[0], -1)
        if self.rows is not None:
            packed = packed[self.rows]
        if self.type_name in FLOAT_TYPES:
            values = packed.view(FLOAT_TYPES[self.type_name])
            return values if self.columns is None else values[:, self.columns]
        weight = unpack_blocks(self.type_name, packed, self.name)
        if self.columns is None:
            return weight
        if isinstance(weight, QuantizedWeight) and weight.columns is None:
            return replace(weight, columns=torch.argsort(self.columns))
        return (weight.dequantize() if isinstance(weight, QuantizedWeight) else weight)[:, self.columns]


class _Opener:
    """Opens the tensors of one file as an architecture wants them."""

    def __init__(self, file: _MappedFile, architecture: GgufArchitecture, config: dict[str, object]) -> None:
        self._file, self._architecture, self._config = file, architecture, config

    def open(self, tensor: GgufTensor) -> dict[str, Tensor | StoredWeight]:
        """Return what one tensor of the file is: itself under its name, or its experts."""
        if self._architecture.is_qkv_split and _QKV.fullmatch(tensor.name):
            return self._split_qkv(tensor)
        if (found := _STATE_TENSOR.fullmatch(tensor.name)) is not None:
            return {self._architecture.rename(tensor.name): self._state_tensor(tensor, found[1])}
        if len(tensor.shape) == 3:
            return self._heads(tensor) if _LATENT_PART.fullmatch(tensor.name) else self._experts(tensor)
        name = self._architecture.rename(tensor.name)
        if len(tensor.shape) == 1 and tensor.type_name in FLOAT_TYPES:
            values = self._vector(tensor)
            return {name: values[None] if tensor.name.split(".")[-2] in self._architecture.rows else values}
        if len(tensor.shape) != 2:
            raise _shape_error(tensor)
        matrix = self._matrix(tensor, (tensor.shape[0], tensor.shape[1]), tensor.start, tensor.num_bytes)
        is_transposed = self._architecture.is_transposed and tensor.name.startswith("blk.")
        # What the checkpoint stores transposed is given as a weight, which is [out, in] by definition.
        return {
            name: self._lazy(matrix)
            if is_transposed or matrix.rows is not None or matrix.columns is not None
            else self._opened(matrix)
        }

    def _split_qkv(self, tensor: GgufTensor) -> dict[str, Tensor | StoredWeight]:
        num_heads, num_kv_heads, head_dim = self._sizes("num_attention_heads", "num_key_value_heads", "head_dim")
        counts = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
        if tensor.shape[0] != sum(counts.values()):
            raise _shape_error(tensor)
        opened: dict[str, Tensor | StoredWeight] = {}
        start, row_bytes = tensor.start, tensor.num_bytes // tensor.shape[0]
        for one, count in counts.items():
            name, shape, num_bytes = (
                tensor.name.replace("attn_qkv", f"attn_{one}"),
                (count, *tensor.shape[1:]),
                count * row_bytes,
            )
            opened |= self.open(replace(tensor, name=name, shape=shape, start=start, num_bytes=num_bytes))
            start += num_bytes
        return opened

    def _heads(self, tensor: GgufTensor) -> dict[str, Tensor | StoredWeight]:
        """Return a part of what makes keys and values of latent rows, under its own name; see join_latent_parts."""
        num_heads, height, width = tensor.shape
        if "kv_lora_rank" not in self._config or num_heads != self._config["num_attention_heads"]:
            raise _shape_error(tensor)
        return {tensor.name: self._lazy(self._matrix(tensor, (num_heads * height, width), tensor.start, tensor.num_bytes))}

    def _experts(self, tensor: GgufTensor) -> dict[str, Tensor | StoredWeight]:
        """Return the matrices of a stack, one by one."""
        count, num_rows, width = tensor.shape
        if tensor.name in _STACKS:
            names: list[str] | None = [f"{_STACKS[tensor.name]}.{index}.weight" for index in range(count)]
        elif count in [self._config.get(key) for key in _EXPERT_COUNTS]:
            names = self._architecture.expert_names(tensor.name, count)
        else:
            names = None
        if names is None or num_rows * count % len(names):
            raise _shape_error(tensor)
        size, shape = tensor.num_bytes // len(names), (num_rows * count // len(names), width)
        return {
            name: self._opened(self._matrix(tensor, shape, tensor.start + index * size, size))
            for index, name in enumerate(names)
        }

    def _state_tensor(self, tensor: GgufTensor, what: str) -> Tensor:
        """Return a tensor of a mixer in the form of the checkpoint.

        Files have -exp(A_log) as ssm_a; what the checkpoint has in one dimension may be stored as a matrix; and convolutions
        lack the dimension of their one input channel.
        """
        if tensor.type_name not in FLOAT_TYPES or sum(size > 1 for size in tensor.shape) > 2:
            raise _shape_error(tensor)
        values = self._file.bytes_at(tensor.start, tensor.num_bytes).view(FLOAT_TYPES[tensor.type_name])
        if len(tensor.shape) > 1:  # others than these two dimensions are 1
            values = values.view(-1, tensor.shape[-1])
        rows = self._row_order(tensor)
        values = values if rows is None else values[rows]
        if "conv" in what:
            return values[:, None]
        if what == "ssm_a":
            if not bool((values < 0).all()):
                raise ModelFormatError(f"{tensor.path}: {tensor.name} must hold negative numbers, -exp(A_log)")
            values = torch.log(-values.float())
            if "linear_attn_config" in self._config:  # Kimi Linear has it in four dimensions
                return values.view(1, 1, -1, 1)
            return values if values.ndim == 2 and values.shape[1] > 1 else values.flatten()
        return values.flatten()

    def _vector(self, tensor: GgufTensor) -> Tensor:
        values = self._file.bytes_at(tensor.start, tensor.num_bytes).view(FLOAT_TYPES[tensor.type_name])
        rows = self._row_order(tensor)
        if rows is not None:
            values = values[rows]
        if self._architecture.has_norm_offset and _NORM.fullmatch(tensor.name):
            values = values.float() - 1
        return values

    def _matrix(self, tensor: GgufTensor, shape: tuple[int, int], start: int, num_bytes: int) -> _Matrix:
        return _Matrix(
            self._file,
            tensor.type_name,
            tensor.name,
            shape,
            start,
            num_bytes,
            self._row_order(tensor),
            self._column_order(tensor),
        )

    @staticmethod
    def _opened(matrix: _Matrix) -> Tensor | StoredWeight:
        if matrix.type_name not in FLOAT_TYPES:
            return _Opener._lazy(matrix)
        loaded = matrix.load()
        return loaded if isinstance(loaded, Tensor) else _Opener._lazy(matrix)

    @staticmethod
    def _lazy(matrix: _Matrix) -> StoredWeight:
        tensors = (matrix.file.bytes_at(matrix.start, matrix.num_bytes),)
        is_integer = matrix.type_name not in FLOAT_TYPES
        return StoredWeight(matrix.shape, matrix.load, tensors, is_integer, form=matrix.type_name)

    def _row_order(self, tensor: GgufTensor) -> Tensor | None:
        """Return which row of the file comes where, for q and k that are stored for rotating neighbours [O] i64."""
        values = _VALUE_HEADS.fullmatch(tensor.name) if self._architecture.is_value_tiled else None
        if values is not None:
            return None if values[1] == "ssm_out" else self._value_rows(tensor, values[1])
        if self._architecture.is_qkv_by_head and _QKV.fullmatch(tensor.name):
            return self._rows_by_head(tensor)
        rotated = _ROTATED.fullmatch(tensor.name)
        if rotated is None or not self._architecture.is_permuted:
            return None
        num_heads = self._config["num_attention_heads" if rotated[1] == "q" else "num_key_value_heads"]
        num_rows = tensor.shape[0]
        if not isinstance(num_heads, int) or num_rows % (2 * num_heads):
            raise ModelFormatError(f"{tensor.path}: {tensor.name} has {num_rows} rows, which are not {num_heads} heads")
        return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).reshape(-1)

    def _column_order(self, tensor: GgufTensor) -> Tensor | None:
        """Return which column of the file comes where, for the output projection of tiled value heads [K] i64."""
        if not self._architecture.is_value_tiled or not tensor.name.endswith(".ssm_out.weight"):
            return None
        return self._value_order(tensor, tensor.shape[1], self._sizes("linear_value_head_dim")[0])

    def _value_rows(self, tensor: GgufTensor, module: str) -> Tensor:
        num_k_heads, k_dim, v_dim = self._sizes("linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim")
        first = 2 * num_k_heads * k_dim if module in ("attn_qkv", "ssm_conv1d") else 0
        per_head = v_dim if module in ("attn_qkv", "attn_gate", "ssm_conv1d") else 1
        order = self._value_order(tensor, tensor.shape[0] - first, per_head)
        return torch.cat((torch.arange(first), first + order))

    def _value_order(self, tensor: GgufTensor, count: int, per_head: int) -> Tensor:
        num_k_heads, num_v_heads = self._sizes("linear_num_key_heads", "linear_num_value_heads")
        if count != num_v_heads * per_head or num_v_heads % num_k_heads:
            raise _shape_error(tensor)
        return torch.arange(count).view(-1, num_k_heads, per_head).transpose(0, 1).reshape(-1)

    def _sizes(self, *keys: str) -> tuple[int, ...]:
        return tuple(size if isinstance(size := self._config[key], int) else 0 for key in keys)

    def _rows_by_head(self, tensor: GgufTensor) -> Tensor:
        num_heads, num_rows = self._config["num_attention_heads"], tensor.shape[0]
        if not isinstance(num_heads, int) or num_rows % (3 * num_heads):
            raise ModelFormatError(
                f"{tensor.path}: {tensor.name} has {num_rows} rows, which are not q, k, v of {num_heads} heads"
            )
        return torch.arange(num_rows).view(3, num_heads, -1).transpose(0, 1).reshape(-1)


def _shape_error(tensor: GgufTensor) -> ModelFormatError:
    kind = f"{tensor.type_name} {list(tensor.shape)}"
    return ModelFormatError(f"{tensor.path}: {tensor.name} is {kind}, which fits nothing in a model of this architecture")
