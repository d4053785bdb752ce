"""Every field of a family's config class: what quire does not read has no effect in transformers, the rest has the same one."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoConfig

from quire.base.errors import QuireError
from quire.model import config_reader
from quire.model.build import load_model, whole_prompt_logits
from quire.model.config_reader import read_model_spec
from quire.model.families.config_view import ConfigView
from tests.golden import dense_cases
from tests.golden.make_checkpoints import LATENT_CASES, case_params, make_checkpoint, reference_model

pytestmark = pytest.mark.golden

TOLERANCE = 1e-4
CASES = (
    *("llama", "mistral-window", "qwen2-window", "qwen3", "gemma", "gemma2", "gemma3", "phi3-window", "gpt2", "olmo2"),
    *("gpt-oss", "granite", "mixtral-window", "qwen3-moe"),
    *("qwen2-moe-window", "olmoe", "flex-olmo", "glm4-moe", "minimax-m2", "ernie4-5-moe-bias", "hunyuan-moe", "phimoe"),
    *("granitemoe-shared", "dots1-window", "solar-open", "exaone-moe", "deepseek-v2", "deepseek-v3", "glm4-moe-lite"),
    *("mistral4", "minicpm3", "deepseek-v32", "deepseek-v4", "mimo-v2-flash", "glm-moe-dsa"),
)
IDS = torch.randint(3, 126, (40,), generator=torch.Generator().manual_seed(1)).tolist()
_OF_TRANSFORMERS = {
    # What says how transformers itself runs, loads or shows a model.
    *("model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "id2label", "label2id", "problem_type"),
    *("output_attentions", "output_hidden_states", "return_dict", "use_cache", "is_encoder_decoder", "per_layer_config"),
    # Read outside of the ConfigView (config_reader), see test_classifiers.py.
    "use_bidirectional_attention",
    # Of stored tensors alone, and checked by neither.
    "word_embed_proj_dim",
    *("summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout", "summary_type"),
}
# Fields of other families and of hub files, which the classes do not have.
_ELSEWHERE = {
    **{"clip_qkv": 0.5, "qk_layernorm": True, "use_qk_norm": True, "rotary_pct": 0.5, "attention_scale": 3.0},
    **{"norm_eps": 0.1, "layer_norm_eps": 0.1, "scale_embedding": 3.0, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **{"no_rope_layer_interval": 2, "attention_chunk_size": 8, "routed_scaling_factor": 2.0, "num_nextn_predict_layers": 2},
    **{"use_bias": True, "qkv_bias": True, "kv_channels": 4, "scoring_func": "sigmoid", "logit_scale": 3.0},
}
_BIDIRECTIONAL = {"is_causal", "use_bidirectional_attention"}
"""Fields that are read of the whole config.json, before those of a family; test_classifiers.py compares what they change."""
_REFUSED = {"deepseek-v2": ("scoring_func",), "iquestcoder": ("clip_qkv",)}
"""Of these what a family knows and refuses."""
_OF_LATENT_CLASSES = {"head_dim", "qk_head_dim"}
"""Sums and copies of other fields in classes with latent attention, which fail in transformers with other values."""


class _Watched(ConfigView):
    views: list[ConfigView] = []  # noqa: RUF012 - of one test at a time

    def __init__(self, *args):
        super().__init__(*args)
        self.views.append(self)


def unread_keys(folder, monkeypatch):
    """Return the keys of config.json that quire does not read."""
    _Watched.views.clear()
    monkeypatch.setattr(config_reader, "ConfigView", _Watched)
    read_model_spec(folder)
    monkeypatch.undo()
    return _Watched.views[0].unread_keys()


def changed(name, value):
    """Return another value of the same type, or None where the type says nothing."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value if value else 7
    if isinstance(value, float):
        return value / 2 if value else 0.25
    if isinstance(value, str):
        return "relu" if name.endswith(("_act", "_activation", "activation_function")) else None
    if isinstance(value, list) and len(set(map(str, value))) > 1:
        return value[::-1]
    return None


def written(checkpoint, case, tmp_path):
    """Return a folder whose config.json names every field of its class that has a plain value, and that config."""
    folder = shutil.copytree(checkpoint(case, "v5"), tmp_path / case)
    stored = json.loads((folder / "config.json").read_text())
    elsewhere = {name: value for name, value in _ELSEWHERE.items() if name not in _REFUSED.get(case, ())}
    config = {**elsewhere, **AutoConfig.from_pretrained(folder).to_dict(), **stored}
    config = {name: value for name, value in config.items() if name in stored or is_plain(value)}
    return folder, config


def is_plain(value):
    return isinstance(value, bool | int | float | str)


def write(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def reference_logits(folder):
    with torch.inference_mode():
        return reference_model(folder)(torch.tensor([IDS])).logits[0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", case_params((*CASES, *dense_cases.CASES)))
def test_fields_that_are_not_read_have_no_effect(checkpoint, tmp_path, monkeypatch, case):
    folder, config = written(checkpoint, case, tmp_path)
    want = reference_logits(folder)
    skipped = {*_OF_TRANSFORMERS, *_BIDIRECTIONAL, *config_reader._NEUTRAL}  # the latter are refused
    if case in LATENT_CASES:
        skipped |= _OF_LATENT_CLASSES
    unread = [name for name in unread_keys(write(folder, config), monkeypatch) if name not in skipped]
    others = {name: changed(name, config[name]) for name in unread}
    others = {name: value for name, value in others.items() if value is not None}
    assert len(others) > len(_ELSEWHERE) // 2
    write(folder, {**config, **others})
    assert (reference_logits(folder) - want).abs().max() == 0, sorted(others)
    assert (whole_prompt_logits(load_model(folder, "float32"), IDS) - want).abs().max() <= TOLERANCE


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", case_params((*CASES, *dense_cases.CASES)))
def test_fields_that_are_read_are_refused_or_have_the_effect_that_they_have_in_transformers(
    checkpoint, tmp_path, monkeypatch, case
):
    folder, config = written(checkpoint, case, tmp_path)
    unread = set(unread_keys(write(folder, config), monkeypatch))
    num_equal = 0
    for name, value in config.items():
        other = changed(name, value)
        if name in unread or name in _OF_TRANSFORMERS or other is None:
            continue
        write(folder, {**config, name: other})
        try:
            decoder = load_model(folder, "float32")
        except QuireError:
            continue  # most of them: the weights do not fit any more
        error = (whole_prompt_logits(decoder, IDS) - reference_logits(folder)).abs().max()
        assert error <= TOLERANCE, (name, other)
        num_equal += 1
    assert num_equal > 3


@pytest.mark.parametrize("name", ["indexed_attention", "deepseek_sparse_attention"])
def test_layers_with_an_indexer_have_the_names_of_each_release_of_transformers(tmp_path, name):
    folder = make_checkpoint("deepseek-v32", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    expected = read_model_spec(folder, "float32")
    config["layer_types"] = [name] * config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    assert read_model_spec(folder, "float32") == expected
    config["layer_types"][0] = "full_attention"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuireError, match="deepseek_sparse_attention or indexed_attention, got full_attention"):
        read_model_spec(folder, "float32")
