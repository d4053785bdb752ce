"""IQuest-Coder (2026): Llama; windows and clipped projections, which its code has and no checkpoint uses, are refused."""

from __future__ import annotations

from quire.base.errors import UnsupportedError
from quire.contracts.model_spec import ModelSpec
from quire.model.families import llama
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage

MODEL_TYPE = "iquestcoder"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of an IQuest-Coder model."""
    for key in ("clip_qkv", "use_sliding_window"):
        if config.raw(key):
            raise UnsupportedError(f"{key} {config.raw(key)!r} is not supported in a {config.model_type!r} model; leave it out")
    return llama.read_spec(config)


PAGE = FamilyPage(("IQuestCoderForCausalLM", "LlamaForCausalLM"), read_spec, llama.find_sources)
