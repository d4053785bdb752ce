"""docs/models.md is what the code says: run this module with QUIRE_WRITE_DOCS=1 to write it anew."""

from __future__ import annotations

import contextlib
import importlib
import os
from pathlib import Path

import pytest

from quire.base.errors import ConfigError, UnsupportedError
from quire.contracts.speculative import SpeculativeConfig
from quire.model.device_refusal import device_refusal
from quire.model.families import FAMILIES, WRAPPERS, find_family
from quire.model.families.config_view import ConfigView
from quire.model.gguf_names import ARCHITECTURES, find_architecture
from quire.model.native_model import native_refusal
from quire.speculate.sources import check_state_drafts

pytest.importorskip("transformers", reason="the page counts the configurations that are compared with transformers")
from tests.golden.make_checkpoints import cases_by_type

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
BLOCK_SIZE = 16
_HEAD = """# Models

This page is generated from the code (`tests/unit/model/test_models_page.py`). A model is supported where `config.json` has
one of these values of `model_type`; every other one is refused with the nearest supported type, and may run with
[`--model-impl transformers`](reference/models.md#models-of-the-transformers-library).

- **CPU**: "native" means the native kernels run it. Otherwise torch runs it, more slowly; the log says why.
- **GPU**: "yes" means that it may run with `device="cuda"`, as its layers have nothing that the GPU kernels lack. Tests compare
  types whose layers differ from those of all others with the CPU, in Triton's interpreter; not every type.
- **GGUF**: values of `general.architecture` that it is loaded from, read as llama.cpp's converter writes them; "-": from
  safetensors only, as that converter does not know the type (files of Bamba, which have a rope, of MPT, Sarvam
  30B, Laguna, Baichuan 2 and of Granite mixtures with windows are refused). Weights of every model may be
  [quantised](guides/quantisation.md) as they are loaded, or be stored in any of the formats of that page.
- **Drafts**: "all" means [every method](guides/speculative-decoding.md), as far as heads for the model exist; models with a
  recurrent state, compressed keys or an indexer of blocks verify chains only.
- **Tested**: small random models of different configurations, whose logits and greedy tokens tests compare with transformers:
  64 tokens in one configuration of each type at least, batched, alone, in chunks, cached, preempted, and with drafts.
- **Wrappers** are models of text and images whose language model is served. Their vision tensors are skipped; images in a
  request are refused.

| model type | classes | CPU | GPU | GGUF | drafts | tested | wrappers | what it is |
|---|---|---|---|---|---|---|---|---|
"""


_NEEDED = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "minimax_m3_vl_text": {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57},
    "lfm2": {"full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}
"""What a config must say because the defaults of its class are no model."""


def _spec(model_type):
    """Return the spec that a family's defaults make."""
    values = _NEEDED.get(model_type, {})
    return FAMILIES.get(model_type).read_spec(ConfigView(model_type, values, Path("config.json")))


def _description(model_type):
    """Return the first paragraph of the module of a family, or of the one that reads it, which reads others too."""
    reader = FAMILIES.get(model_type).read_spec.__module__.rpartition(".")[2]
    names = (model_type, model_type.removesuffix("_text"), reader)
    module = next(module for name in names if (module := _module(name)) is not None)
    if model_type != module.MODEL_TYPE:
        return f"See `{module.MODEL_TYPE}`."
    return " ".join(module.__doc__.split("\n\n")[0].split())


def _module(name):
    try:
        return importlib.import_module(f"quire.model.families.{name}")
    except ModuleNotFoundError:
        return None


def _gguf(model_type):
    names = [name for name, found in ARCHITECTURES.items() if model_type in (found.model_type, *found.also)]
    if find_architecture("llama", 8).model_type == model_type:
        names.append("llama")  # with experts
    return ", ".join(f"`{name}`" for name in sorted(names))


def _drafts(spec):
    """Return the methods of drafts that a model verifies."""
    methods = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mtp")
    allowed = []
    for method in methods:
        with contextlib.suppress(ConfigError):
            config = {"method": method, "num_speculative_tokens": 3}
            if method in ("draft_model", "eagle", "eagle3", "medusa"):
                config["model"] = "a model"
            check_state_drafts(SpeculativeConfig(**config), spec)
            allowed.append(method)
    return "all" if len(allowed) == len(methods) else ", ".join(allowed)


def _row(model_type):
    spec, page = _spec(model_type), FAMILIES.get(model_type)
    native, device = native_refusal(spec, BLOCK_SIZE), device_refusal(spec)
    wrappers = ", ".join(f"`{name}`" for name, wrapper in WRAPPERS.items() if model_type in wrapper.text_types)
    cells = (
        f"`{model_type}`",
        ", ".join(page.architectures),
        "native" if native is None else f"torch: {native}",
        "yes" if device is None else f"no: {device}",
        _gguf(model_type) or "-",
        _drafts(spec),
        str(len(cases_by_type().get(model_type, []))),
        wrappers or "-",
        _description(model_type),
    )
    return f"| {' | '.join(cells)} |\n"


def models_page():
    return _HEAD + "".join(_row(model_type) for model_type in sorted(FAMILIES))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "ExaoneForCausalLM"])
def test_a_class_without_a_model_type_is_of_the_type_that_is_named_after_it(name):
    model_type, _ = find_family({"architectures": [name]})
    assert FAMILIES.get(model_type).architectures[0] == name


def test_models_page_is_what_the_code_says():
    if os.environ.get("QUIRE_WRITE_DOCS") == "1":
        PAGE.write_text(models_page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == models_page()


@pytest.mark.parametrize(
    ("config", "nearest"),
    [
        ({"model_type": "qwen33"}, "qwen3"),
        ({"model_type": "smollm4", "architectures": ["SmolLM4ForCausalLM"]}, "smollm3"),
        ({"architectures": ["Olmo4ForCausalLM"]}, "olmo"),
    ],
)
def test_unknown_types_are_refused_with_the_nearest_supported_one(config, nearest):
    with pytest.raises(UnsupportedError, match="the nearest supported type is") as caught:
        find_family(config)
    assert f"the nearest supported type is '{nearest}" in str(caught.value)
    assert "supported model types: " in str(caught.value)
