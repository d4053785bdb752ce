"""IQuest-Coder (2026): Llama; windows and clipped projections, which its code has and no checkpoint uses, are refused."""

from __future__ import annotations

from quire.contracts.model_spec import ModelSpec
from quire.model.families import llama
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage

MODEL_TYPE = "iquestcoder"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of an IQuest-Coder model."""
    config.refuse_other("clip_qkv", None)
    config.refuse_other("use_sliding_window", False)
    return llama.read_spec(config)


PAGE = FamilyPage(("IQuestCoderForCausalLM", "LlamaForCausalLM"), read_spec, llama.find_sources)
