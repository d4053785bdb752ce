"""CodeGen (Salesforce, 2022): GPT-J whose q, v and k lie in one matrix, in four parts."""

from __future__ import annotations

from collections.abc import Collection

from quire.contracts.model_spec import ModelSpec
from quire.model.families import gptj
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import Piece, Source, Sources

MODEL_TYPE = "codegen"
_NUM_PARTS = 4
"""The matrix of q, v and k is that of the four devices on which the model was trained, one after the other."""


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a CodeGen model."""
    spec = gptj.read_spec(config)
    if spec.layers[0].attention.num_heads % _NUM_PARTS:
        raise config.error("n_head", spec.layers[0].attention.num_heads, f"a multiple of {_NUM_PARTS}")
    return spec


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    sources = gptj.find_sources(spec, stored)
    for index, layer in enumerate(spec.layers):
        dim, rope = layer.attention.head_dim, layer.attention.rope
        assert rope is not None
        per_part = layer.attention.num_heads // _NUM_PARTS
        halves = [run for run in ((0, rope.dim, 2), (1, rope.dim, 2), (rope.dim, dim, 1)) if run[0] < run[1]]
        for place, name in enumerate("qvk"):
            starts = [((3 * part + place) * per_part + head) * dim for part in range(_NUM_PARTS) for head in range(per_part)]
            runs = [(0, dim, 1)] if name == "v" else halves
            pieces = tuple(
                Piece(f"h.{index}.attn.qkv_proj.weight", (start + first, start + last), step=step)
                for start in starts
                for first, last, step in runs
            )
            sources[f"layers.{index}.{name}.weight"] = Source((pieces,))
    return sources


PAGE = FamilyPage(("CodeGenForCausalLM",), read_spec, find_sources, prefixes=("transformer.",), ignored=gptj.IGNORED)
