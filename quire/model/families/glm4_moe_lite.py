"""GLM-4.7-Flash: DeepSeek-V3 with a pattern of dense layers by name."""

from __future__ import annotations

from quire.model.families.deepseek_v3 import read_spec
from quire.model.families.latent import find_sources
from quire.model.families.page import FamilyPage

MODEL_TYPE = "glm4_moe_lite"

PAGE = FamilyPage(("Glm4MoeLiteForCausalLM",), read_spec, find_sources)
