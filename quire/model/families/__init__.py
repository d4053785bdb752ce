"""One page per model family: how to read its config.json into a ModelSpec and where its parameters are stored."""

from quire.model.families import (
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    dots1,
    ernie4_5_moe,
    exaone_moe,
    flex_olmo,
    gemma,
    gemma2,
    gemma3,
    glm4_moe,
    glm4_moe_lite,
    gpt2,
    gpt_oss,
    granite,
    granitemoe,
    hunyuan_v1_moe,
    llama,
    minicpm3,
    minimax_m2,
    mistral,
    mistral4,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    phimoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    solar_open,
)
from quire.model.families.page import FAMILIES, FamilyPage, find_family

_PAGES = (
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    dots1,
    ernie4_5_moe,
    exaone_moe,
    flex_olmo,
    gemma,
    gemma2,
    gemma3,
    glm4_moe,
    glm4_moe_lite,
    gpt2,
    gpt_oss,
    granite,
    granitemoe,
    hunyuan_v1_moe,
    llama,
    minicpm3,
    minimax_m2,
    mistral,
    mistral4,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    phimoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    solar_open,
)
for _page in _PAGES:
    FAMILIES.register(_page.MODEL_TYPE)(_page.PAGE)
FAMILIES.register(deepseek_v3.KIMI_MODEL_TYPE)(deepseek_v3.PAGE)
FAMILIES.register(deepseek_v32.GLM_MODEL_TYPE)(deepseek_v32.GLM_PAGE)
FAMILIES.register(granitemoe.SHARED_MODEL_TYPE)(granitemoe.SHARED_PAGE)

__all__ = ["FAMILIES", "FamilyPage", "find_family"]
