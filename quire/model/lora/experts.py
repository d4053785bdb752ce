"""Adapters of the experts of a mixture: PEFT's layouts of them, and the pairs of each expert."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from quire.base.errors import ModelFormatError
from quire.contracts.model_spec import ModelSpec, MoeSpec
from quire.model.families.sources import Source, Sources
from quire.model.lora.adapter_config import CONFIG_FILE, AdapterConfig
from quire.model.parameters import Shape

_STACK = re.compile(r"(layers\.(\d+)\.experts)\.(gate_up|down)\.weight")
_STACKED_MODULE = re.compile(r"(layers\.(\d+)\.(?:.*\bexperts|block_sparse_moe\.(?:input|output)_linear))(?:\.base_layer)*")
_EXPERT = re.compile(r"layers\.\d+\.experts\.\d+\.\w+")
_ROUTER = re.compile(r"layers\.\d+\.router")


class LowRankPair(NamedTuple):
    """What an adapter adds to a linear layer's output y = W x: b (a x).

    a  [rank, in] and b [out, rank] in the model's dtype; b includes the scale
    """

    a: Tensor
    b: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of both."""
        return self.a.nbytes + self.b.nbytes


def is_expert(name: str) -> bool:
    """Return whether a canonical name without ".weight" is that of a linear layer of one expert, as layers.0.experts.3.up."""
    return _EXPERT.fullmatch(name) is not None


def is_router(name: str) -> bool:
    """Return whether a canonical name without ".weight" is that of the router of a mixture."""
    return _ROUTER.fullmatch(name) is not None


def expert_shapes(spec: ModelSpec, shapes: Mapping[str, Shape]) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return name of a stack, as layers.0.experts.gate_up -> the shape of its weight [E, out, in], and how many layers of an
    expert it joins, each with out / that many outputs.

    shapes  canonical name of a parameter -> its shape
    """
    found: dict[str, tuple[tuple[int, ...], int]] = {}
    for name, shape in shapes.items():
        match = _STACK.fullmatch(name)
        if match is not None:
            mlp = spec.layers[int(match[2])].mlp
            assert isinstance(mlp, MoeSpec)
            found[name.removesuffix(".weight")] = shape, 2 if match[3] == "gate_up" and mlp.expert.is_gated else 1
    return found


def expert_adapter_bytes(spec: ModelSpec, shapes: Mapping[str, Shape], rank: int, width: int, copies: tuple[int, int]) -> int:
    """Return the bytes of an adapter of this rank of all experts.

    width   bytes of a value
    copies  of the first and of the second matrices, on all ranks together
    """
    stacks = expert_shapes(spec, shapes).values()
    values = sum(experts * (copies[0] * parts * columns + copies[1] * rows) for (experts, rows, columns), parts in stacks)
    return rank * width * values


def expert_sources(sources: Sources, shapes: Mapping[str, Shape]) -> tuple[Sources, dict[str, Shape]]:
    """Return sources and shapes of single experts, which have names as layers.0.experts.3.down.weight; gate and up are one
    weight. Experts that are stored in stacks are left out."""
    found: Sources = {}
    own_shapes: dict[str, Shape] = {}
    for name, source in sources.items():
        match = _STACK.fullmatch(name)
        if match is None or name not in shapes or not source.is_stacked:
            continue
        for expert, group in enumerate(source.groups):
            if all(piece.entry is None for piece in group):
                own = f"{match[1]}.{expert}.{match[3]}.weight"
                found[own], own_shapes[own] = Source((group,)), shapes[name][1:]
    return found, own_shapes


def is_stack(module: str, spec: ModelSpec) -> bool:
    """Return whether PEFT names the adapter of a stack of experts so (`target_parameters`); module: without its prefix."""
    match = _STACKED_MODULE.fullmatch(module)
    return match is not None and int(match[2]) < len(spec.layers) and isinstance(spec.layers[int(match[2])].mlp, MoeSpec)


def split_stack(
    module: str, a: Tensor, b: Tensor, spec: ModelSpec, shapes: Mapping[str, Shape], config: AdapterConfig, file: Path
) -> dict[str, LowRankPair]:
    """Return canonical name, as layers.0.experts.3.gate_up -> pair in f32 of each expert of a stack.

    a  [E * rank, in], the rows of an expert together; b [out, rank * E], the columns of a rank together

    PEFT names the adapters of the two stacks of a layer alike: their sizes tell which is which. Where it does not know that a
    stack is stored [E, in, out], as those of Llama 4, a has the outputs and b the inputs. Raises ModelFormatError.
    """
    match = _STACKED_MODULE.fullmatch(module)
    assert match is not None
    layer = spec.layers[int(match[2])]
    assert isinstance(layer.mlp, MoeSpec)
    num_experts, sizes = layer.mlp.num_experts, (b.shape[0], a.shape[1])
    stacks = {name: tuple(shapes[f"layers.{match[2]}.experts.{name}.weight"][1:]) for name in ("gate_up", "down")}
    is_swapped = sizes not in stacks.values() or (spec.model_type == "llama4_text" and sizes[::-1] in stacks.values())
    wanted = sizes[::-1] if is_swapped else sizes
    kind = next((name for name, shape in stacks.items() if shape == wanted), None)
    if kind is None:
        raise ModelFormatError(
            f"{file}: the adapter of {module} is for experts of {sizes[1]} inputs and {sizes[0]} outputs, but those of the "
            f"base model have {' or '.join(f'{columns} and {rows}' for rows, columns in stacks.values())}: the adapter is for "
            "another base model"
        )
    stored = f"{match[1]}.{kind}_proj" if match[1].endswith("experts") else f"{match[1]}.weight"
    rank = config.rank_of(stored)
    if a.shape[0] != num_experts * rank or b.shape[1] != num_experts * rank:
        raise ModelFormatError(
            f"{file}: {module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, but {CONFIG_FILE} gives {stored} "
            f"rank {rank}: for {num_experts} experts lora_A must be [{num_experts * rank}, in] and lora_B "
            f"[out, {num_experts * rank}]"
        )
    firsts = a.float().view(num_experts, rank, -1)
    seconds = (b.float() * config.scale_of(stored)).view(len(b), rank, num_experts).permute(2, 0, 1)
    if is_swapped:
        firsts, seconds = seconds.transpose(1, 2), firsts.transpose(1, 2)
    if kind == "gate_up" and spec.model_type == "gpt_oss":  # whose rows of gate and up take turns
        seconds = seconds.reshape(num_experts, -1, 2, rank).transpose(1, 2).reshape(num_experts, -1, rank)
    pairs = zip(firsts, seconds, strict=True)
    return {f"layers.{match[2]}.experts.{expert}.{kind}": LowRankPair(*pair) for expert, pair in enumerate(pairs)}


def split_gate_up(pairs: Mapping[str, LowRankPair], spec: ModelSpec) -> dict[str, LowRankPair]:
    """Return pairs in which gate and up of each expert have pairs of their own, without the ranks that add nothing."""
    found: dict[str, LowRankPair] = {}
    for name, pair in pairs.items():
        stem, _, kind = name.rpartition(".")
        if kind != "gate_up" or not is_expert(name):
            found[name] = pair
            continue
        mlp = spec.layers[int(name.split(".")[1])].mlp
        assert isinstance(mlp, MoeSpec)
        parts = pair.b.chunk(2) if mlp.expert.is_gated else (pair.b,)
        for module, b in zip(("gate", "up") if mlp.expert.is_gated else ("up",), parts, strict=True):
            used = b.any(0)
            used[0] |= ~used.any()  # an adapter that was not trained has a pair, too
            found[f"{stem}.{module}"] = LowRankPair(pair.a[used].contiguous(), b[:, used].contiguous())
    return found
