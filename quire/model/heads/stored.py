"""Shared code of all layouts of draft heads: files, config, and checks of names and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from quire.model.config_reader import read_json_object
from quire.model.families import FAMILIES
from quire.model.families.config_view import ConfigView
from quire.model.families.sources import PRE_NORM_LAYER
from quire.model.parameters import Shape, parameter_shapes
from quire.model.resolve import MEDUSA_FILE
from quire.model.stored_tensors import listing, open_file, open_tensors

_LONE_FILES = ("medusa_lm_head.safetensors", MEDUSA_FILE)
"""Files of Medusa heads without the model; pickles are read without executing code (open_file)."""


@dataclass(frozen=True, slots=True)
class HeadFolder:
    """A folder with a head: its config.json and its tensors, by name."""

    folder: Path
    config: Mapping[str, object]
    tensors: Mapping[str, Tensor]

    @classmethod
    def open(cls, folder: Path) -> HeadFolder:
        """Open a folder; data is read at its first use. Raises ModelFormatError."""
        file = folder / "config.json"
        if not file.is_file():
            raise ModelFormatError(f"{folder} has no config.json; give the folder of a head that drafts")
        lone = next((folder / name for name in _LONE_FILES if (folder / name).is_file()), None)
        found = open_tensors(folder) if lone is None else open_file(lone)
        tensors = {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}
        return cls(folder, read_json_object(file), tensors)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a positive integer of the config. Raises ModelFormatError."""
        value = self.config.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelFormatError(f"{self.folder / 'config.json'}: {name} must be a positive integer, got {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean of the config. Raises ModelFormatError."""
        value = self.config.get(name, default)
        if not isinstance(value, bool):
            raise ModelFormatError(f"{self.folder / 'config.json'}: {name} must be true or false, got {value!r}")
        return value

    def table(self, name: str) -> dict[str, object]:
        """Return an object of the config, empty if absent. Raises ModelFormatError."""
        value = self.config.get(name) or {}
        if not isinstance(value, dict):
            raise ModelFormatError(f"{self.folder / 'config.json'}: {name} must be an object, got {value!r}")
        return value

    def refuse(self, names: tuple[str, ...]) -> None:
        """Refuse options that change what a head computes and are not implemented. Raises UnsupportedError."""
        for name in names:
            if self.config.get(name):
                raise UnsupportedError(f"{self.folder / 'config.json'}: {name} {self.config[name]!r} is not supported (yet)")

    def take(
        self, wanted: Mapping[str, str], shapes: Mapping[str, Shape], dtype: str, own: tuple[str, ...]
    ) -> dict[str, Tensor]:
        """Return canonical name -> tensor in `dtype`, of the stored names in `wanted`. Raises ModelFormatError.

        own  prefixes of the head's own tensors: an unexpected one is refused with UnsupportedError
        """
        missing = [stored for stored in wanted.values() if stored not in self.tensors]
        if missing:
            raise ModelFormatError(
                f"{self.folder}: the head lacks {listing(missing)}; it has {listing(sorted(self.tensors), 12)}"
            )
        wrong = [
            f"{stored} has {list(self.tensors[stored].shape)}, expected {list(shapes[name])}"
            for name, stored in wanted.items()
            if tuple(self.tensors[stored].shape) != tuple(shapes[name])
        ]
        if wrong:
            raise ModelFormatError(f"{self.folder}: {len(wrong)} tensors have the wrong shape: {listing(wrong)}")
        read = set(wanted.values())
        unread = [name for name in sorted(self.tensors) if name.startswith(own) and name not in read]
        unread = [name for name in unread if not name.endswith("rotary_emb.inv_freq")]
        if unread:
            raise UnsupportedError(
                f"{self.folder}: the head has tensors that quire does not read, without which it would draft something else: "
                f"{listing(unread)}"
            )
        return {name: self.tensors[stored].to(getattr(torch, dtype)) for name, stored in wanted.items()}


def read_body(folder: HeadFolder, values: Mapping[str, object], target: ModelSpec, vocab_size: int) -> ModelSpec:
    """Return the spec of a head's one layer, a Llama-like one, from a config. Raises ModelFormatError or UnsupportedError."""
    kept = {key: value for key, value in values.items() if key not in ("layer_types", "num_hidden_layers", "vocab_size")}
    kept |= {"num_hidden_layers": 1, "vocab_size": vocab_size}
    spec = FAMILIES.get("llama").read_spec(ConfigView("llama", kept, folder.folder / "config.json"))
    check_width(folder, spec.hidden_size, target)
    return replace(spec, dtype=target.dtype, is_tied=False)


def check_width(folder: HeadFolder, hidden_size: int, target: ModelSpec) -> None:
    """Refuse a draft head with another hidden size than the model. Raises ModelFormatError."""
    if hidden_size != target.hidden_size:
        raise ModelFormatError(
            f"{folder.folder}: the head is of hidden size {hidden_size}, the model of {target.hidden_size}; "
            "take a head that was trained for this model"
        )


def layer_sources(layer: LayerSpec, prefix: str, names: Mapping[str, str] = PRE_NORM_LAYER) -> dict[str, str]:
    """Return canonical name, below layers.0., -> stored name below `prefix`, of a layer with those norms and biases."""
    if not isinstance(layer.mlp, MlpSpec) or layer.attn_out is not None or layer.mlp_out is not None:
        got = "norms after its blocks" if isinstance(layer.mlp, MlpSpec) else "experts"
        raise UnsupportedError(f"speculative_config: a head's layer must be dense and pre-norm, got {got}: take another method")
    has_norm = {"attn_in": layer.attn_in, "mlp_in": layer.mlp_in, "q_norm": layer.attention.qk_norm}
    has_norm["k_norm"] = has_norm["q_norm"]
    biases = _biases(layer.attention, layer.mlp)
    found: dict[str, str] = {}
    for name, stored in names.items():
        if name in has_norm and has_norm[name] is None:
            continue
        found[f"layers.0.{name}.weight"] = f"{prefix}{stored}.weight"
        if name in biases:
            found[f"layers.0.{name}.bias"] = f"{prefix}{stored}.bias"
    return found


def _biases(attention: AttentionSpec, mlp: MlpSpec) -> set[str]:
    named = {"q", "k", "v"} if attention.has_qkv_bias else set()
    named |= {"o"} if attention.has_o_bias else set()
    return named | ({"gate", "up", "down"} if mlp.has_bias else set())


def body_shapes(body: ModelSpec, attended_size: int) -> dict[str, Shape]:
    """Return the shapes of a head's layer, final norm, embedding and output; attention reads `attended_size` values."""
    shapes = parameter_shapes(body)
    for name in ("q", "k", "v"):
        shapes[f"layers.0.{name}.weight"] = (shapes[f"layers.0.{name}.weight"][0], attended_size)
    shapes["lm_head.weight"] = (body.vocab_size, body.hidden_size)
    return shapes
