"""Loading weights: canonical names, views of the file, the head, and errors that list names."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base.errors import ModelFormatError
from quire.model.checkpoint import load_parameters, tie_missing_head
from quire.model.config_reader import read_model_spec
from quire.model.parameters import parameter_shapes
from tests.tiny_checkpoint import write_checkpoint

HIDDEN = 32


@pytest.fixture
def tiny(tmp_path):
    """Return a function (family, **changes of config.json) -> folder of a small checkpoint of its own."""

    def write(family, **changes):
        folder = write_checkpoint(tmp_path / family, family)
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
        return folder

    return write


def _load(folder, dtype="auto"):
    return load_parameters(folder, read_model_spec(folder, dtype))


def _edit(folder, change):
    """Pass the stored tensors to `change` and write what it returns into a new file: loaded ones are maps of the old."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


def _mapped_file(tensor):
    """Return the path of the file that the tensor's memory is a map of, or ''."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *fields = line.split(None, 5)
        start, stop = (int(bound, 16) for bound in span.split("-"))
        if start <= tensor.data_ptr() < stop:
            return fields[4].strip() if len(fields) > 4 else ""
    return ""


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2", "qwen3_moe", "gpt_oss"])
def test_names_shapes_and_dtype_are_those_of_the_spec(tiny, family):
    folder = tiny(family)
    for dtype in ("float32", "bfloat16"):
        spec = read_model_spec(folder, dtype)
        parameters = load_parameters(folder, spec)
        assert {name: tuple(tensor.shape) for name, tensor in parameters.items()} == parameter_shapes(spec)
        assert {tensor.dtype for tensor in parameters.values()} == {getattr(torch, dtype)}
        assert all(tensor.is_contiguous() for tensor in parameters.values())


def test_gemma2_norms_take_their_own_roles(tiny):
    folder = tiny("gemma2")
    stored, parameters = load_file(folder / "model.safetensors"), _load(folder)
    roles = {
        "attn_in": "input_layernorm",
        "attn_out": "post_attention_layernorm",
        "mlp_in": "pre_feedforward_layernorm",
        "mlp_out": "post_feedforward_layernorm",
    }
    for role, name in roles.items():
        assert torch.equal(parameters[f"layers.1.{role}.weight"], stored[f"model.layers.1.{name}.weight"])


def test_experts_are_stacked_gate_rows_first(tiny):
    folder = tiny("qwen3_moe")
    stored, parameters = load_file(folder / "model.safetensors"), _load(folder)
    gate_up, down = parameters["layers.1.experts.gate_up.weight"], parameters["layers.1.experts.down.weight"]
    for expert in range(4):
        prefix = f"model.layers.1.mlp.experts.{expert}"
        assert torch.equal(gate_up[expert, :24], stored[f"{prefix}.gate_proj.weight"])
        assert torch.equal(gate_up[expert, 24:], stored[f"{prefix}.up_proj.weight"])
        assert torch.equal(down[expert], stored[f"{prefix}.down_proj.weight"])


def test_experts_of_gpt_oss_are_turned_and_their_rows_sorted(tiny):
    folder = tiny("gpt_oss")
    stored, parameters = load_file(folder / "model.safetensors"), _load(folder)
    prefix = "model.layers.1.mlp.experts"
    whole, bias = stored[f"{prefix}.gate_up_proj"], stored[f"{prefix}.gate_up_proj_bias"]
    gate, up = whole[:, :, 0::2].transpose(1, 2), whole[:, :, 1::2].transpose(1, 2)
    assert torch.equal(parameters["layers.1.experts.gate_up.weight"], torch.cat((gate, up), 1))
    assert torch.equal(parameters["layers.1.experts.gate_up.bias"], torch.cat((bias[:, 0::2], bias[:, 1::2]), 1))
    assert torch.equal(parameters["layers.1.experts.down.weight"], stored[f"{prefix}.down_proj"].transpose(1, 2))
    assert torch.equal(parameters["layers.1.experts.down.bias"], stored[f"{prefix}.down_proj_bias"])
    assert torch.equal(parameters["layers.1.sinks.weight"], stored["model.layers.1.self_attn.sinks"])


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("self_attn.sinks", lambda sinks: sinks[:3], r"sinks has \[3\], expected \[4\]"),
        ("self_attn.sinks", lambda sinks: sinks[:, None], r"sinks has \[4, 1\], expected \[4\]"),
        ("self_attn.sinks", lambda sinks: sinks.int(), r"sinks is torch\.int32"),
        ("self_attn.sinks", None, r"1 missing \(layers\.1\.self_attn\.sinks\)"),
        ("mlp.router.bias", None, r"1 missing \(layers\.1\.mlp\.router\.bias\)"),
        ("mlp.experts.gate_up_proj", lambda w: w.transpose(1, 2), r"gate_up_proj has \[4, 96, 32\], expected \[4, 32, 96\]"),
        ("mlp.experts.gate_up_proj", lambda w: w[:3], r"gate_up_proj has \[3, 32, 96\], expected \[4, 32, 96\]"),
        ("mlp.experts.gate_up_proj_bias", lambda b: b[:, :48], r"_bias has \[4, 48\], expected \[4, 96\]"),
        ("mlp.experts.down_proj", lambda w: w[0], r"down_proj has \[48, 32\], expected \[4, 48, 32\]"),
        ("mlp.experts.down_proj_bias", lambda b: b.t(), r"_bias has \[32, 4\], expected \[4, 32\]"),
    ],
)
def test_tensors_of_gpt_oss_that_do_not_fit_are_refused_with_their_shapes(tiny, name, change, message):
    folder, full = tiny("gpt_oss"), f"model.layers.1.{name}"

    def edit(tensors):
        edited = {} if change is None else {full: change(tensors[full])}
        return {**{name: tensor for name, tensor in tensors.items() if name != full}, **edited}

    _edit(folder, edit)
    with pytest.raises(ModelFormatError, match=message):
        _load(folder)


def test_experts_may_be_stored_in_one_tensor(tiny):
    folder = tiny("qwen3_moe")
    before = _load(folder)

    def fuse(tensors):
        kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
        for index in range(2):
            for part, name in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
                kept[f"model.layers.{index}.mlp.experts.{name}"] = before[f"layers.{index}.experts.{part}.weight"]
        return kept

    _edit(folder, fuse)
    after = _load(folder)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_parameters_are_views_of_the_file(tiny, file):
    folder = tiny("qwen3")
    if file == "pytorch_model.bin":
        torch.save(load_file(folder / "model.safetensors"), folder / file)
        (folder / "model.safetensors").unlink()
    parameters = _load(folder)
    assert {_mapped_file(tensor) for tensor in parameters.values()} == {str(folder / file)}
    assert _mapped_file(_load(folder, "bfloat16")["layers.0.q.weight"]) != str(folder / file)


def test_phi3_rows_are_views(write_config):
    folder = write_config("phi3", num_hidden_layers=1, num_key_value_heads=2)
    stored = {
        "model.embed_tokens.weight": torch.randn(101, HIDDEN),
        "model.norm.weight": torch.randn(HIDDEN),
        "lm_head.weight": torch.randn(101, HIDDEN),
        "model.layers.0.input_layernorm.weight": torch.randn(HIDDEN),
        "model.layers.0.post_attention_layernorm.weight": torch.randn(HIDDEN),
        "model.layers.0.self_attn.qkv_proj.weight": torch.randn(64, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": torch.randn(HIDDEN, HIDDEN),
        "model.layers.0.mlp.gate_up_proj.weight": torch.randn(96, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": torch.randn(HIDDEN, 48),
    }
    save_file(stored, folder / "model.safetensors")
    parameters = _load(folder)
    qkv = stored["model.layers.0.self_attn.qkv_proj.weight"]
    for name, rows in (("q", slice(0, 32)), ("k", slice(32, 48)), ("v", slice(48, 64))):
        assert torch.equal(parameters[f"layers.0.{name}.weight"], qkv[rows])
    assert torch.equal(parameters["layers.0.up.weight"], stored["model.layers.0.mlp.gate_up_proj.weight"][48:])
    _edit(folder, lambda tensors: {**tensors, "model.layers.0.self_attn.qkv_proj.weight": torch.randn(65, HIDDEN)})
    with pytest.raises(ModelFormatError, match=r"qkv_proj\.weight has \[65, 32\], expected \[64, 32\]"):
        _load(folder)


def test_positions_that_the_first_gpt_was_saved_with_are_ignored(write_config):
    folder = write_config("openai-gpt", n_embd=HIDDEN, n_head=4, n_layer=4, n_positions=20, hidden_size=...)
    spec = read_model_spec(folder)
    pieces = {"tokens_embed.weight": (spec.vocab_size, HIDDEN), "positions_embed.weight": (20, HIDDEN), "position_ids": (1, 20)}
    linears = {"attn.c_attn": (32, 96), "attn.c_proj": (32, 32), "mlp.c_fc": (32, 128), "mlp.c_proj": (128, 32)}
    for name, shape in {**linears, "ln_1": (32,), "ln_2": (32,)}.items():
        pieces |= {
            f"h.{i}.{name}.{kind}": shape[-1:] if kind == "bias" else shape for i in range(4) for kind in ("weight", "bias")
        }
    save_file({name: torch.randn(shape) for name, shape in pieces.items()}, folder / "model.safetensors")
    assert set(_load(folder)) == set(parameter_shapes(spec))


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_as_on_the_hub(write_config, prefix):
    folder = write_config("gpt2", n_embd=HIDDEN, n_head=4, n_layer=1, n_positions=20, **dict.fromkeys(("hidden_size",), ...))
    config = json.loads((folder / "config.json").read_text())
    for key in ("num_hidden_layers", "num_attention_heads"):
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    stored = {
        "wte.weight": torch.randn(101, HIDDEN),
        "wpe.weight": torch.randn(20, HIDDEN),
        "h.0.attn.bias": torch.ones(1, 1, 20, 20),
        "h.0.attn.masked_bias": torch.tensor(-1e4),
        "h.0.attn.c_attn.weight": torch.randn(HIDDEN, 96),
        "h.0.attn.c_attn.bias": torch.randn(96),
        "h.0.attn.c_proj.weight": torch.randn(HIDDEN, HIDDEN),
        "h.0.attn.c_proj.bias": torch.randn(HIDDEN),
        "h.0.mlp.c_fc.weight": torch.randn(HIDDEN, 128),
        "h.0.mlp.c_fc.bias": torch.randn(128),
        "h.0.mlp.c_proj.weight": torch.randn(128, HIDDEN),
        "h.0.mlp.c_proj.bias": torch.randn(HIDDEN),
    }
    for norm in ("ln_f", "h.0.ln_1", "h.0.ln_2"):
        stored |= {f"{norm}.weight": torch.randn(HIDDEN), f"{norm}.bias": torch.randn(HIDDEN)}
    save_file({prefix + name: tensor for name, tensor in stored.items()}, folder / "model.safetensors")
    parameters = _load(folder)
    assert {name: tuple(tensor.shape) for name, tensor in parameters.items()} == parameter_shapes(read_model_spec(folder))
    assert torch.equal(parameters["layers.0.k.weight"], stored["h.0.attn.c_attn.weight"][:, 32:64].t())
    assert torch.equal(parameters["layers.0.v.bias"], stored["h.0.attn.c_attn.bias"][64:])
    assert torch.equal(parameters["layers.0.up.weight"], stored["h.0.mlp.c_fc.weight"].t())


@pytest.mark.parametrize(
    "prefix, head", [("language_model.model.", "language_model.lm_head"), ("model.language_model.", "lm_head")]
)
def test_multimodal_gemma3_names(tiny, prefix, head):
    folder = tiny("gemma2")

    def nest(tensors):
        tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
        for index in range(2):
            for norm in ("q_norm", "k_norm"):
                tensors[f"{prefix}layers.{index}.self_attn.{norm}.weight"] = torch.randn(8)
        tensors[f"{head}.weight"] = tensors[f"{prefix}embed_tokens.weight"].clone()
        for name in (
            "vision_tower.a.weight",
            "multi_modal_projector.b",
            "model.vision_tower.c",
            "model.multi_modal_projector.d",
        ):
            tensors[name] = torch.randn(3)
        return tensors

    _edit(folder, nest)
    text = json.loads((folder / "config.json").read_text())
    text = {key: value for key, value in text.items() if key not in ("model_type", "architectures", "rope_theta")}
    config = {"model_type": "gemma3", "text_config": text, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    spec = read_model_spec(folder)
    assert {n: tuple(t.shape) for n, t in load_parameters(folder, spec).items()} == parameter_shapes(spec)


def test_a_tied_head_that_is_stored_too_and_equal_is_dropped(tiny):
    folder = tiny("gemma2")
    _edit(folder, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert "lm_head.weight" not in _load(folder)


def test_a_tied_head_that_differs_is_used(tiny, caplog):
    folder, head = tiny("gemma2"), torch.randn(301, HIDDEN)
    _edit(folder, lambda tensors: {**tensors, "lm_head.weight": head})
    assert torch.equal(_load(folder)["lm_head.weight"], head)
    assert "lm_head.weight is used" in caplog.text


def _without_head(folder):
    _edit(folder, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"})
    return folder


def test_a_missing_head_of_an_untied_model_is_an_error_that_says_how_to_go_on(tiny):
    folder = _without_head(tiny("qwen3"))
    with pytest.raises(ModelFormatError, match=r"no lm_head\.weight.*tie_word_embeddings.*--allow-missing-head") as caught:
        _load(folder)
    assert str(folder) in str(caught.value)


def test_a_missing_head_is_the_embedding_when_that_is_allowed(tiny, caplog):
    folder = _without_head(tiny("qwen3"))
    spec = tie_missing_head(folder, read_model_spec(folder))
    assert spec == dataclasses.replace(read_model_spec(folder), is_tied=True)
    assert "the embedding is used" in caplog.text
    parameters = load_parameters(folder, spec)
    assert "lm_head.weight" not in parameters
    _edit(folder, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] * 2})
    assert tie_missing_head(folder, read_model_spec(folder)) == read_model_spec(folder)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "qwen3_moe", "gpt_oss"])
def test_no_missing_tensor_is_replaced_in_silence(tiny, family):
    folder = tiny(family)
    whole = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name in whole:
        _edit(folder, lambda _, name=name: {other: tensor for other, tensor in whole.items() if other != name})
        with pytest.raises(ModelFormatError, match=re.escape(name.removeprefix("model."))):
            _load(folder)


def test_a_tied_embedding_may_be_stored_as_the_head(tiny):
    folder = tiny("gemma2")
    before = _load(folder)
    _edit(folder, lambda tensors: {name.replace("model.embed_tokens", "lm_head"): t for name, t in tensors.items()})
    after = _load(folder)
    assert torch.equal(before["embed.weight"], after["embed.weight"])
    assert "lm_head.weight" not in after


def test_missing_embedding_of_an_untied_model_is_an_error(tiny):
    folder = tiny("qwen3")
    _edit(folder, lambda tensors: {n: t for n, t in tensors.items() if n != "model.embed_tokens.weight"})
    with pytest.raises(ModelFormatError, match="embed_tokens.weight"):
        _load(folder)


def test_missing_and_unexpected_names_are_listed(tiny):
    folder = tiny("qwen3")

    def change(tensors):
        del tensors["model.layers.1.self_attn.q_norm.weight"], tensors["model.norm.weight"]
        return {
            **tensors,
            "model.layers.0.self_attn.q_proj.bias": torch.ones(32),
            "model.layers.0.rotary_emb.inv_freq": torch.ones(4),
        }

    _edit(folder, change)
    with pytest.raises(ModelFormatError) as caught:
        _load(folder)
    message = str(caught.value)
    assert "2 missing (layers.1.self_attn.q_norm.weight, norm.weight)" in message
    assert "1 unexpected (layers.0.self_attn.q_proj.bias)" in message


def test_wrong_shapes_are_listed(tiny):
    folder = tiny("qwen3")
    _edit(folder, lambda tensors: {**tensors, "model.norm.weight": torch.ones(33)})
    with pytest.raises(ModelFormatError, match=r"1 tensors .*norm\.weight has \[33\], expected \[32\]"):
        _load(folder)


def test_quantised_weights_are_refused(tiny):
    folder = tiny("qwen3")
    _edit(folder, lambda tensors: {**tensors, "model.norm.weight": torch.ones(32, dtype=torch.int8)})
    with pytest.raises(ModelFormatError, match=r"norm\.weight in the form of int8, but config.json has no quantization_config"):
        _load(folder)
