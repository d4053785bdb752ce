"""`quire inspect`: show a model's structure and memory plan without loading its weights; damaged files are errors."""

from __future__ import annotations

import argparse
import dataclasses
import math
from itertools import groupby
from typing import TYPE_CHECKING

from quire.base.numa import describe_thread_places
from quire.cli import options
from quire.contracts.memory import format_bytes

if TYPE_CHECKING:
    from quire.contracts.memory import ModelReport
    from quire.contracts.model_spec import LayerSpec, ModelSpec
    from quire.engine.inspect import RankMemory, StageMemory


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "inspect", **options.PARSER, help="show a model's structure and memory plan", description=__doc__
    )
    options.add_model_argument(parser)
    parser.add_argument("--parameters", action="store_true", help="list every parameter with its shape")
    options.add_engine_options(parser)
    options.add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    config = options.engine_config(args, takes_replicas=True)
    from quire.engine.inspect import check_weights, inspect_model, rank_memories, stage_memories, thread_places
    from quire.engine.replica_setup import replica_setups

    num_replicas, config = config.data_parallel_size, replica_setups(config)[0].config
    report = inspect_model(config)
    has_weights = check_weights(report)
    print("\n".join(describe(report, args.parameters)))
    if num_replicas > 1:
        print(f"\nreplicas    {num_replicas}: each has these weights, this KV cache and {config.num_threads} threads")
    if places := thread_places(config, report):
        print(f"\nnuma        {describe_thread_places(places)}")
    if config.pipeline_parallel_size > 1:
        print("\n".join(_stage_lines(stage_memories(config, report))))
    elif config.parallel.world_size > 1:
        print("\n".join(_rank_lines(rank_memories(config, report))))
    if not has_weights:
        print("\nno weights are stored there, so that they could not be checked")
    return 0


def describe(report: ModelReport, with_parameters: bool = False) -> list[str]:
    """Return the lines of the report."""
    spec = report.spec
    total = sum(math.prod(shape) for shape in report.parameters.values())
    lines = [
        f"{spec.model_type} in {spec.dtype}: {total:,} parameters, {len(spec.layers)} layers, hidden size "
        f"{spec.hidden_size}, vocabulary {spec.vocab_size:,}, {spec.max_positions:,} positions",
        f"from {report.folder}",
        "",
        *(_library_lines(spec) if spec.implementation == "transformers" else (*_model_lines(spec), *_layer_lines(spec))),
        "",
        *report.memory.describe().splitlines(),
    ]
    if with_parameters:
        lines.append("")
        lines += [f"{name:44} {list(shape)}" for name, shape in report.parameters.items()]
    return lines


def _rank_lines(ranks: list[RankMemory]) -> list[str]:
    lines = [""]
    for rank, memory in enumerate(ranks):
        heads, kv = memory.heads, memory.kv_heads
        has = f"heads {heads.start} to {heads.stop - 1}, kv heads {kv.start} to {kv.stop - 1}" if heads.size else "no attention"
        lines.append(
            f"rank {rank:<6} weights {format_bytes(memory.weight_bytes)}, KV cache {format_bytes(memory.kv_bytes)}; {has}"
            + ("" if memory.num_experts is None else f", {memory.num_experts} experts")
            + ("" if memory.tokens is None else f"; {memory.tokens}")
        )
    return lines


def _stage_lines(stages: list[StageMemory]) -> list[str]:
    lines = [""]
    for memory in stages:
        stage = memory.stage
        parts = ["the embedding"] * stage.is_first + ["the LM head"] * stage.is_last
        has = f"layers {stage.start} to {stage.stop - 1}" + "".join(f" and {part}" for part in parts)
        sizes = f"weights {format_bytes(memory.weight_bytes)}, KV cache {format_bytes(memory.kv_bytes)}"
        if memory.shard is None:
            lines.append(f"stage {stage.index:<5} {sizes}; {has}")
        else:
            own_heads = (layer.heads for layer in memory.shard.layers[stage.start : stage.stop] if layer.heads.heads.size > 0)
            own = next((heads.describe() for heads in own_heads), "no attention")
            lines.append(f"stage {stage.index}, rank {memory.shard.rank:<2} {sizes}; {has}; {own}")
    return lines


def _model_lines(spec: ModelSpec) -> list[str]:
    facts = {
        "embedding": f"{'tied to the head' if spec.is_tied else 'own head'}, scale {spec.embed_scale:g}",
        "learned positions": spec.num_learned_positions or None,
        "final norm": _show(spec.final_norm),
        "logits": f"scale {spec.logit_scale:g}, softcap {spec.final_softcap}",
        "end of sequence": sorted(spec.eos_token_ids) or "none",
    }
    return [f"{name:18} {value}" for name, value in facts.items() if value is not None]


def _library_lines(spec: ModelSpec) -> list[str]:
    """Return what is known of a model that the transformers library computes: how it attends."""
    kinds = [(attention, len(list(run))) for attention, run in groupby(layer.attention for layer in spec.layers)]
    return [
        "computed by transformers (model_impl)",
        f"{'end of sequence':18} {sorted(spec.eos_token_ids) or 'none'}",
        *(f"{f'{count} x attention':18} {_show(attention)}" for attention, count in kinds),
    ]


def _layer_lines(spec: ModelSpec) -> list[str]:
    lines: list[str] = []
    first = 0
    for layer, run_of in groupby(spec.layers):
        last = first + len(list(run_of)) - 1
        lines += ["", f"layers {first}-{last}" if last > first else f"layer {first}", *_layer_fields(layer)]
        first = last + 1
    return lines


def _layer_fields(layer: LayerSpec) -> list[str]:
    parts = ((field.name, getattr(layer, field.name)) for field in dataclasses.fields(layer))
    return [f"  {name:16} {_show(part)}" for name, part in parts if part is not None]


def _show(part: object) -> str:
    """Return the fields of a spec that differ from their defaults, as `kind(field=value, ...)`."""
    if not dataclasses.is_dataclass(part):
        return str(part)
    shown = [
        f"{field.name}={_show(getattr(part, field.name))}"
        for field in dataclasses.fields(part)
        if field.default is dataclasses.MISSING or getattr(part, field.name) != field.default
    ]
    return f"{type(part).__name__.removesuffix('Spec').lower()}({', '.join(shown)})"
