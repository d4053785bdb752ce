"""Write a quantised copy of a checkpoint: a Hugging Face folder in compressed-tensors format."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from quire.base.bundled import tokenizer_folder
from quire.base.errors import ConfigError, ModelFormatError, UnsupportedError
from quire.contracts.model_spec import ModelSpec, MoeSpec
from quire.model.config_reader import read_json_object, read_model_spec, read_quantization_config
from quire.model.families import FAMILIES
from quire.model.families.sources import Piece
from quire.model.mapped_files import MappedFiles
from quire.model.stored_tensors import open_tensors
from quire.quant.policy import QuantizationPolicy
from quire.quant.quantize import INT8, Scheme, quantize_weight, sqnr_db
from quire.quant.weight import QuantizedWeight

_MAX_SHARD_BYTES = 2 << 30
_COPIED = re.compile(r".*\.(json|jinja|txt|model)|(LICENSE|LICENCE|NOTICE).*", re.IGNORECASE)
_NOT_COPIED = re.compile(r"config\.json|.*\.index\.json|training_args.*|(trainer|optimizer)_.*|README.*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LayerQuality:
    """One quantised weight: its stored module, bits of a weight with its scales, and signal to noise in decibels."""

    module: str
    num_weights: int
    bits_per_weight: float
    sqnr_db: float


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """The result: bytes of all tensors before and after, and every quantised weight."""

    folder: Path
    source_bytes: int
    written_bytes: int
    layers: tuple[LayerQuality, ...]

    @property
    def bits_per_weight(self) -> float:
        """Mean over the quantised weights, including scales."""
        num_weights = sum(layer.num_weights for layer in self.layers)
        return sum(layer.bits_per_weight * layer.num_weights for layer in self.layers) / num_weights


def write_quantized(
    source: Path,
    out: Path,
    scheme: Literal["int8", "int4"],
    group_size: int = 32,
    max_shard_bytes: int = _MAX_SHARD_BYTES,
    show_progress: bool = False,
) -> WrittenCheckpoint:
    """Quantise a checkpoint folder into another, one tensor at a time; the peak memory is one tensor and one shard.

    scheme      "int8": a scale per row; "int4": levels -8..7 in groups of columns, int8 for some weights (`_writing_policy`)
    group_size  of int4: 32, 64 or 128

    Scales are stored in the dtype of their weight, or in float32 if float16 would lose precision. config.json is written last,
    so an interrupted result cannot be loaded.

    Raises ConfigError if `out` has files or the checkpoint is already quantised; ModelFormatError and UnsupportedError
    if it cannot be read, or its weights do not fit the format or are not finite.
    """
    if not source.is_dir():
        raise ConfigError(f"{source} is a file; only folders of Hugging Face checkpoints can be quantised")
    config = read_json_object(source / "config.json")
    if read_quantization_config(source) is not None:
        raise ConfigError(f"{source} is quantised already; take the checkpoint in its original precision")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder; give a new one")
    spec = read_model_spec(source)
    files = MappedFiles()
    stored = _open_plain(source, files)
    schemes = _choose_schemes(spec, stored, _writing_policy(spec, scheme, group_size))
    out.mkdir(parents=True, exist_ok=True)
    shards = _Shards(out, max_shard_bytes)
    layers: list[LayerQuality] = []
    for name, tensor in tqdm(stored.items(), "quantising", disable=None if show_progress else True):
        files.check((tensor,))
        if name not in schemes:
            shards.add({name: tensor})
            continue
        module = name.removesuffix(".weight")
        parts, quality = _pack(module, tensor, schemes[name])
        shards.add(parts)
        layers.append(quality)
    shards.close()
    own = tokenizer_folder(source)  # a bundled model may have that of another
    for file in sorted({*source.iterdir(), *own.glob("tokenizer*")}):
        if file.is_file() and _COPIED.fullmatch(file.name) and not _NOT_COPIED.fullmatch(file.name):
            shutil.copyfile(file, out / file.name)
    config["quantization_config"] = _quantization_config(stored, schemes)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    source_bytes = sum(tensor.nbytes for tensor in stored.values())
    return WrittenCheckpoint(out, source_bytes, shards.num_bytes, tuple(layers))


def _open_plain(source: Path, files: MappedFiles) -> dict[str, Tensor]:
    opened = open_tensors(source, files)
    plain = {name: tensor for name, tensor in opened.items() if isinstance(tensor, Tensor)}
    if len(plain) < len(opened):
        raise ConfigError(f"{source} is quantised already; take the checkpoint in its original precision")
    return plain


def _writing_policy(spec: ModelSpec, scheme: Literal["int8", "int4"], group_size: int) -> QuantizationPolicy:
    """Return the scheme of each weight, such that readers of the format can load the checkpoint.

    Embedding and LM head keep their precision. With int4, q, k and v all get int8, because some readers join them; so do
    the MLPs of the first and last layer; and in MoE models everything except the experts, because some readers support only one
    scheme for the experts and one for the rest.
    """
    if scheme == "int8":
        return QuantizationPolicy(INT8, None, None)
    has_experts = any(isinstance(layer.mlp, MoeSpec) for layer in spec.layers)
    int8_linears = ("q", "k", "v", "o", "gate", "up", "down") if has_experts else ("q", "k", "v")
    return QuantizationPolicy(Scheme("linear", group_size), None, None, frozenset(int8_linears), has_int8_ends=True)


def _choose_schemes(spec: ModelSpec, stored: Mapping[str, Tensor], policy: QuantizationPolicy) -> dict[str, Scheme]:
    """Return stored name -> scheme of every tensor that is quantised. Raises UnsupportedError."""
    page = FAMILIES.get(spec.model_type)
    full_names = {page.strip(name): name for name in stored}
    schemes: dict[str, Scheme] = {}
    for parameter, source in page.find_sources(spec, full_names).items():
        for piece in (piece for group in source.groups for piece in group):
            tensor = stored.get(full_names.get(piece.name, ""))
            scheme = None if tensor is None else policy.scheme_of(parameter, tensor.shape[-1], len(spec.layers))
            if tensor is None or scheme is None:
                continue
            _check_linear(piece, tensor, spec)
            name = full_names[piece.name]
            # Parts of one tensor get one scheme: the one with more bits.
            schemes[name] = INT8 if INT8 in (scheme, schemes.get(name)) else scheme
    if not schemes:
        raise UnsupportedError("no weight of this checkpoint has enough columns to be quantised; leave it as it is")
    return schemes


def _check_linear(piece: Piece, tensor: Tensor, spec: ModelSpec) -> None:
    reason = None
    if piece.is_transposed:
        reason = "is stored transposed"
    elif tensor.ndim != 2 or not piece.name.endswith(".weight"):
        reason = "holds the weights of several experts"
    if reason is not None:
        raise UnsupportedError(
            f"{piece.name} of this {spec.model_type} checkpoint {reason}, which compressed-tensors has no form for; "
            "use the option quantization, which quantises when the model is loaded"
        )


def _pack(module: str, weight: Tensor, scheme: Scheme) -> tuple[dict[str, Tensor], LayerQuality]:
    scale_dtype = weight.dtype
    quantized = quantize_weight(weight, scheme, scale_dtype)
    if not bool(torch.isfinite(quantized.scale).all()):
        raise ModelFormatError(
            f"{module}.weight holds values that are not finite, or too large for scales of {scale_dtype}; nothing could load "
            "it quantised: get the checkpoint again"
        )
    if scale_dtype == torch.float16 and _has_lost_scales(weight, quantized):
        scale_dtype = torch.float32
        quantized = quantize_weight(weight, scheme, scale_dtype)
    bits = 8 if scheme.kind == "int8" else 4
    parts = {
        f"{module}.weight_packed": _pack_codes(quantized.codes, bits),
        f"{module}.weight_scale": quantized.scale.to(scale_dtype),
        f"{module}.weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
    num_bytes = sum(part.nbytes for part in parts.values())
    return parts, LayerQuality(module, weight.numel(), 8 * num_bytes / weight.numel(), sqnr_db(weight, quantized))


def _has_lost_scales(weight: Tensor, quantized: QuantizedWeight) -> bool:
    """Return whether scales of a weight are below the normal numbers of float16, and so lose precision."""
    largest = weight.view(len(weight), quantized.scale.shape[1], -1).abs().amax(2)
    return bool(((quantized.scale.abs() < torch.finfo(torch.float16).tiny) & (largest > 0)).any())


def _pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes [O, K] of 4 or 8 bits as int32 words [O, ceil(K * bits / 32)], plus 2**(bits - 1), the first one lowest."""
    octets = (codes.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    octets = torch.nn.functional.pad(octets, (0, -octets.shape[1] % (32 // bits)))
    if bits == 4:
        octets = octets[:, ::2] | (octets[:, 1::2] << 4)
    return octets.contiguous().view(torch.int32)


class _Shards:
    """Shard files, each written when the next tensor would exceed the maximum size."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._open: dict[str, Tensor] = {}
        self._open_bytes = 0
        self._homes: list[list[str]] = []
        self.num_bytes = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Add tensors that stay together."""
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if self._open and self._open_bytes + num_bytes > self._max_bytes:
            self._write()
        # Copied: tensors of pickled checkpoints may share their memory, which safetensors refuses.
        self._open |= {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        self._open_bytes += num_bytes
        self.num_bytes += num_bytes

    def close(self) -> None:
        """Write the last shard, rename the files to the names that loaders expect, and write their index."""
        self._write()
        count = len(self._homes)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)] if count > 1 else ["model.safetensors"]
        for index, name in enumerate(names):
            self._part(index).rename(self._folder / name)
        if count > 1:
            homes = {tensor: name for name, tensors in zip(names, self._homes, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": homes}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        part = self._part(len(self._homes))
        part.touch()
        mode = part.stat().st_mode  # apply the user's umask; the library makes files that only the owner can read
        save_file(self._open, part, metadata={"format": "pt"})
        part.chmod(mode)
        self._homes.append(list(self._open))
        self._open, self._open_bytes = {}, 0

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index:05}.safetensors.tmp"


def _quantization_config(stored: Mapping[str, Tensor], schemes: Mapping[str, Scheme]) -> dict[str, object]:
    """Return quantization_config: a group for each scheme, whose targets are patterns that no other group's match."""
    targets: dict[Scheme, dict[str, set[str]]] = {}
    for name, scheme in schemes.items():
        template, layer = _template(name.removesuffix(".weight"))
        targets.setdefault(scheme, {}).setdefault(template, set()).add(layer)
    groups = {
        f"group_{number}": {
            "targets": [_pattern(template, layers) for template, layers in templates.items()],
            "weights": _weights_config(scheme),
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }
        for number, (scheme, templates) in enumerate(targets.items())
    }
    plain = [_template(n.removesuffix(".weight")) for n, t in stored.items() if t.ndim == 2 and n not in schemes]
    ignored = {template: {layer for other, layer in plain if other == template} for template, _ in plain}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(dict.fromkeys(["lm_head", *(_pattern(template, layers) for template, layers in ignored.items())])),
    }


def _weights_config(scheme: Scheme) -> dict[str, object]:
    shared = {"type": "int", "symmetric": True, "dynamic": False}
    if scheme.kind == "int8":
        return {"num_bits": 8, "strategy": "channel", "group_size": None, **shared}
    return {"num_bits": 4, "strategy": "group", "group_size": scheme.group_size, **shared}


def _template(module: str) -> tuple[str, str]:
    """Return a pattern for a module and its counterparts in other layers and experts, with `{}` for the layer, and its
    layer."""
    _, dot, rest = module.partition("layers.")
    layer, _, rest = rest.partition(".")
    if not dot or not layer.isdigit():
        return re.escape(module), ""
    rest = re.sub(r"experts\\\.[0-9]+", r"experts\.[0-9]+", re.escape(rest))
    return rf"layers\.{{}}\.{rest}", layer


def _pattern(template: str, layers: set[str]) -> str:
    """Return a target: the modules of a template in some layers, with any prefix."""
    if layers == {""}:
        return f"re:(.*\\.)?{template}$"
    return f"re:(.*\\.)?{template.replace('{}', '(' + '|'.join(sorted(layers, key=int)) + ')')}$"
