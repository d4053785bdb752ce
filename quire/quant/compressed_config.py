"""The config of compressed-tensors checkpoints: groups of modules, each with its scheme."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.quant.fields import JsonFields
from quire.quant.patterns import MatchingBudget, ModulePattern

Layout = Literal["pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"]
Strategy = Literal["tensor", "channel", "group", "block", "tensor_group"]

_MAX_PATTERNS = 256
_MAX_GROUPS = 256
_STRATEGIES: dict[Layout, tuple[Strategy, ...]] = {
    "pack-quantized": ("tensor", "channel", "group"),
    "int-quantized": ("tensor", "channel", "group"),
    "float-quantized": ("tensor", "channel", "group", "block"),
    "nvfp4-pack-quantized": ("tensor_group",),
    "mxfp4-pack-quantized": ("group",),
}
_FORMATS = (*_STRATEGIES, "naive-quantized")
_FLOAT_BITS: dict[Layout, int] = {"float-quantized": 8, "nvfp4-pack-quantized": 4, "mxfp4-pack-quantized": 4}
_FLOAT4_GROUPS: dict[Layout, int] = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}
_CLASSES = ("Linear",)


@dataclass(frozen=True, slots=True)
class CompressedScheme:
    """How the weights of a group of modules are stored.

    strategy            what shares a scale: the tensor, a row, group_size columns of a row, or a block [rows, columns]
    is_token_quantized  inputs are quantised at run time to int8 with one scale per token
    is_ordered          columns are assigned to groups in activation order; each weight must store its weight_g_idx
    """

    layout: Layout
    bits: int
    is_symmetric: bool
    strategy: Strategy
    group_size: int | None = None
    block: tuple[int, int] | None = None
    is_token_quantized: bool = False
    is_ordered: bool = False


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Names of modules: exact ones, patterns ("re:..."), and classes."""

    exact: frozenset[str]
    patterns: tuple[ModulePattern, ...]

    def holds(self, module: str) -> bool:
        """Return whether a module is included by name."""
        return module in self.exact or any(pattern.matches(module) for pattern in self.patterns)

    def holds_class(self) -> bool:
        """Return whether linear modules are included by class."""
        return any(name in self.exact for name in _CLASSES)


@dataclass(frozen=True, slots=True)
class CompressedTensorsConfig:
    """The groups of a compressed-tensors checkpoint.

    notes  log lines about declared options that are not used
    """

    groups: tuple[tuple[ModuleNames, CompressedScheme], ...]
    ignore: ModuleNames
    notes: tuple[str, ...] = ()

    def find_scheme(self, module: str) -> CompressedScheme | None:
        """Return the scheme of a linear module, or None if it should not be quantised. A name takes precedence over a class."""
        if self.ignore.holds(module):
            return None
        by_name = next((scheme for targets, scheme in self.groups if targets.holds(module)), None)
        return by_name or next((scheme for targets, scheme in self.groups if targets.holds_class()), None)


def read_compressed_tensors(fields: JsonFields) -> CompressedTensorsConfig:
    """Return the config of a compressed-tensors checkpoint. Raises ModelFormatError or UnsupportedError."""
    nested = fields.raw("quantization_config")
    if nested is not None:
        return read_compressed_tensors(JsonFields(nested, f"{fields.where}.quantization_config"))
    _refuse_sparsity(fields)
    for key in ("transform_config", "moe_sparsity_config"):
        if fields.raw(key):
            raise fields.unsupported(key, "null or absent")
    notes: list[str] = []
    if fields.has("kv_cache_scheme"):
        notes.append(f"{fields.where}: kv_cache_scheme is not used; the KV cache is kept in the model's dtype")
    groups = fields.table("config_groups").items()
    if not groups:
        raise fields.wrong("config_groups", "an object with at least one group")
    if len(groups) > _MAX_GROUPS:
        raise UnsupportedError(f"{fields.where}: config_groups has {len(groups)} groups; at most {_MAX_GROUPS} are read")
    default = fields.string("format", default="mixed-precision")
    budget = _PatternBudget(fields.where)
    read: list[tuple[ModuleNames, CompressedScheme]] = []
    for name, values in groups:
        group = JsonFields(values, f"{fields.where}.config_groups[{name[:40]!r}]")
        if group.has("weights"):
            scheme = _read_scheme(group, default)
            targets = budget.names(group.strings("targets"))
            _refuse_other_scheme(group, targets, scheme, read)
            read.append((targets, scheme))
            notes += _activation_notes(group, scheme)
    return CompressedTensorsConfig(tuple(read), budget.names(fields.strings("ignore")), tuple(notes))


class _PatternBudget:
    """Compiles lists of names, with a limit on the total number of patterns."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._num_left = _MAX_PATTERNS
        self._matching = MatchingBudget()
        self._compiled: dict[str, ModulePattern] = {}

    def names(self, items: list[str]) -> ModuleNames:
        patterns = [item.removeprefix("re:") for item in dict.fromkeys(items) if item.startswith("re:")]
        self._num_left -= len(patterns)
        if self._num_left < 0:
            raise UnsupportedError(f"{self._where} has more patterns of module names than the {_MAX_PATTERNS} that are read")
        for text in patterns:
            if text not in self._compiled:
                self._compiled[text] = ModulePattern(text, self._matching)
        exact = frozenset(item for item in items if not item.startswith("re:"))
        return ModuleNames(exact, tuple(self._compiled[text] for text in patterns))


def _refuse_other_scheme(
    group: JsonFields, targets: ModuleNames, scheme: CompressedScheme, before: list[tuple[ModuleNames, CompressedScheme]]
) -> None:
    """Raise ModelFormatError if a name has different schemes in two groups."""
    for other, other_scheme in before:
        shared = sorted(targets.exact & other.exact)
        if shared and other_scheme != scheme:
            raise ModelFormatError(
                f"{group.where}: its target {shared[0][:80]!r} is one of another group, with a different scheme: the "
                "checkpoint contradicts itself; get another version of it"
            )


def _activation_notes(group: JsonFields, scheme: CompressedScheme) -> list[str]:
    """Return log lines about declared activation quantisation, and what is done instead."""
    notes: list[str] = []
    if group.has("input_activations") and not scheme.is_token_quantized:
        done = (
            "activations stay in the model's dtype"
            if scheme.layout == "float-quantized"
            else "on a CPU inputs are rounded to int8, with a scale for each group of them, unless dtype is float32"
        )
        notes.append(f"{group.where}: input_activations are not used as they are declared; {done}")
    if group.has("output_activations"):
        notes.append(f"{group.where}: output_activations are not used; outputs stay in the model's dtype")
    return notes


def _refuse_sparsity(fields: JsonFields) -> None:
    sparsity = fields.table("sparsity_config")
    if sparsity.string("format", default="dense") != "dense":
        raise sparsity.unsupported("format", "dense")


def _read_scheme(group: JsonFields, default: str) -> CompressedScheme:
    weights = group.table("weights")
    kind = weights.string("type", default="int")
    if kind not in ("int", "float"):
        raise weights.wrong("type", "int or float")
    layout = _read_layout(group, default, kind)
    bits = weights.integer("num_bits", minimum=1, maximum=8, default=8)
    wanted = ("float", _FLOAT_BITS[layout]) if layout in _FLOAT_BITS else ("int", bits)
    if (kind, bits) != wanted:
        key = "num_bits" if kind == wanted[0] else "type"
        raise weights.unsupported(key, f"{wanted[0]} of {wanted[1]} bits in {layout}")
    if weights.raw("dynamic"):
        raise weights.unsupported("dynamic", "false")
    group_size = weights.raw("group_size")
    strategy = weights.string(
        "strategy", default="tensor" if group_size is None else "channel" if group_size == -1 else "group"
    )
    allowed = _STRATEGIES[layout]
    if strategy not in allowed:
        raise weights.unsupported("strategy", f"{', '.join(allowed)} in {layout}")
    if layout in _FLOAT4_GROUPS and weights.raw("group_size") != _FLOAT4_GROUPS[layout]:
        raise weights.unsupported("group_size", f"{_FLOAT4_GROUPS[layout]} in {layout}")
    return CompressedScheme(
        layout,
        bits,
        weights.boolean("symmetric", default=True),
        strategy,
        weights.group_size("group_size") if strategy == "group" else None,
        _read_block(weights) if strategy == "block" else None,
        _reads_tokens_as_int8(group),
        _is_ordered(weights, strategy),
    )


def _is_ordered(weights: JsonFields, strategy: Strategy | str) -> bool:
    """Return whether a group's columns may be anywhere in a row; with "weight" and "static" they are consecutive."""
    order = weights.raw("actorder")
    if order not in (None, False, True, "group", "dynamic", "weight", "static"):
        raise weights.unsupported("actorder", "group, dynamic, weight, static, false, true or null")
    return strategy == "group" and order in (True, "group", "dynamic")


def _read_layout(group: JsonFields, default: str, kind: str) -> Layout:
    name = group.string("format", default=default)
    if name == "naive-quantized":
        return "int-quantized" if kind == "int" else "float-quantized"
    for layout in _STRATEGIES:
        if name == layout:
            return layout
    if group.has("format"):
        raise group.unsupported("format", ", ".join(_FORMATS))
    raise UnsupportedError(
        f"{group.where}: format {name[:80]!r} is not supported; supported: {', '.join(_FORMATS)}; "
        "take another version of the checkpoint, or the one that is not quantised"
    )


def _read_block(weights: JsonFields) -> tuple[int, int]:
    block = weights.raw("block_structure")
    if isinstance(block, str) and block.count("x") == 1 and len(block) < 16:
        block = [int(side) if side.isascii() and side.isdigit() else None for side in block.split("x")]
    if not isinstance(block, list) or len(block) != 2 or not all(type(side) is int and 1 <= side <= 1 << 16 for side in block):
        raise weights.wrong("block_structure", "two integers from 1 to 65536")
    return block[0], block[1]


def _reads_tokens_as_int8(group: JsonFields) -> bool:
    """Return whether inputs are declared as int8 with one symmetric scale per token."""
    inputs = group.table("input_activations")
    declared = (inputs.string("type", default="int"), inputs.raw("num_bits"), inputs.raw("strategy"), inputs.raw("dynamic"))
    return declared == ("int", 8, "token", True) and inputs.boolean("symmetric", default=True)
