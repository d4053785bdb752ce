"""One page per model family: how to read its config.json into a ModelSpec and where its parameters are stored."""

from quire.model.families import (
    gemma,
    gemma2,
    gemma3,
    gpt2,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)
from quire.model.families.page import FAMILIES, FamilyPage, find_family

for _page in (gemma, gemma2, gemma3, gpt2, gpt_oss, granite, llama, mistral, mixtral, olmo2, phi3, qwen2, qwen3, qwen3_moe):
    FAMILIES.register(_page.MODEL_TYPE)(_page.PAGE)

__all__ = ["FAMILIES", "FamilyPage", "find_family"]
