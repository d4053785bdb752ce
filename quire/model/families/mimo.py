"""MiMo 7B (Xiaomi, code of its own): Qwen2; the layers that only draft are not read."""

from __future__ import annotations

import re

from quire.model.families import llama
from quire.model.families.page import FamilyPage
from quire.model.families.qwen2 import read_spec

MODEL_TYPE = "mimo"


PAGE = FamilyPage(("MiMoForCausalLM",), read_spec, llama.find_sources, ignored=re.compile(r"mtp_layers\..*"))
