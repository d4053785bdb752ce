"""The files of heads that draft: every layout is read, what is no such head is refused, and which method a head is of."""

import json
import shutil

import head_checkpoints as heads
import pytest
import torch
from head_oracle import PROMPTS
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, ModelFormatError, UnsupportedError
from quire.contracts.speculative import SpeculativeConfig
from quire.kernels.native import load_native
from quire.model.config_reader import read_model_spec
from quire.model.heads.build import find_head_kind, read_layer_head, read_parallel_head
from quire.model.resolve import resolve_model
from quire.model.stored_tensors import open_tensors
from quire.speculate.sources import settle_method

needs_native = pytest.mark.skipif(load_native() is None, reason="needs the native kernels, whose sums have one order")


def test_the_layouts_of_a_head_are_read_as_one(tiny_model, tmp_path):
    spec = read_model_spec(tiny_model)

    def same(a, b):
        assert a.parameters.keys() == b.parameters.keys()
        assert all(torch.equal(tensor, b.parameters[name]) for name, tensor in a.parameters.items())
        assert (a.aux_hidden_state_layers, a.recycles_normed, a.body.layers) == (
            b.aux_hidden_state_layers,
            b.recycles_normed,
            b.body.layers,
        )

    same(
        read_layer_head(heads.eagle3(tmp_path / "a"), "eagle3", spec),
        read_layer_head(heads.speculators(tmp_path / "b"), "eagle3", spec),
    )
    same(
        read_layer_head(heads.mtp(tmp_path / "c"), "mtp", spec),
        read_layer_head(heads.mtp(tmp_path / "d", "deepseek"), "mtp", spec),
    )
    same(
        read_layer_head(tmp_path / "c", "mtp", spec),
        read_layer_head(heads.mtp(tmp_path / "e", "mimo"), "mtp", spec),  # without biases that are zero
    )
    found = [read_parallel_head(heads.medusa(tmp_path / name, name), spec) for name in ("medusa", "full", "vllm")]
    assert len(found[0].heads) == 3  # the config says 2, as published ones do
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0].heads, other.heads, strict=True))
        assert all(torch.equal(a[0][0], b[0][0]) for a, b in zip(found[0].blocks, other.blocks, strict=True))


class Unwanted:
    def __reduce__(self):
        return (print, ("executed",))


def test_lone_medusa_files_are_read_and_no_pickle_is_executed(tiny_model, tmp_path, capsys):
    """As the hub has them: the heads of FasterDecoding in a torch file, and converted ones beside it."""
    spec = read_model_spec(tiny_model)
    folder = heads.medusa(tmp_path / "head")
    expected = read_parallel_head(folder, spec)
    tensors = {name: tensor.clone() for name, tensor in torch.load(folder / "medusa_lm_head.pt").items()}
    save_file(tensors, str(folder / "medusa_lm_head.safetensors"))
    (folder / "medusa_lm_head.pt").unlink()  # what was read of it is mapped
    (folder / "medusa_lm_head.pt").write_bytes(b"not read, as there is the other")
    found = read_parallel_head(folder, spec)
    assert all(torch.equal(a, b) for a, b in zip(found.heads, expected.heads, strict=True))
    (folder / "medusa_lm_head.safetensors").unlink()
    torch.save({"0.0.linear.weight": Unwanted()}, folder / "medusa_lm_head.pt")
    with pytest.raises(ModelFormatError, match="cannot be read as weights"):
        read_parallel_head(folder, spec)
    assert capsys.readouterr().out == ""


def test_medusa_heads_alone_are_fetched_from_the_hub(tmp_path, monkeypatch):
    """A repository with nothing but a config and medusa_lm_head.pt."""
    source = heads.medusa(tmp_path / "source")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()

    def download(model, revision, allow_patterns, ignore_patterns):
        for file in source.iterdir():
            if any(file.match(p) for p in allow_patterns) and not any(file.match(p) for p in ignore_patterns if "/" not in p):
                (snapshot / file.name).write_bytes(file.read_bytes())
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert (resolve_model("someone/medusa") / "medusa_lm_head.pt").is_file()


@pytest.mark.parametrize(
    "make, kind, error, words",
    [
        (heads.mtp, "eagle3", ModelFormatError, "lacks"),
        (heads.eagle3, "mtp", ModelFormatError, "no layer for multi-token prediction"),
        (lambda folder: heads.eagle3(folder, norm_output=True), "eagle3", UnsupportedError, "norm_output"),
        (lambda folder: heads.eagle3(folder, hidden_size=64), "eagle3", ModelFormatError, "hidden size 64, the model of 32"),
        (lambda folder: heads.eagle3(folder, draft_vocab_size=99), "eagle3", ModelFormatError, "wrong shape"),
        (
            lambda folder: heads.eagle3(folder, eagle_aux_hidden_state_layer_ids=[0, 7]),
            "eagle3",
            ModelFormatError,
            "layers from 0 to 1",
        ),
        (lambda folder: heads.eagle1(folder, model_type="llama", mlp_bias=True), "eagle", ModelFormatError, "lacks"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(tiny_model, tmp_path, make, kind, error, words):
    with pytest.raises(error, match=words):
        read_layer_head(make(tmp_path / "head"), kind, read_model_spec(tiny_model))


def test_layer_is_refused_by_name(tiny_model, tmp_path):
    folder = heads.mtp(tmp_path / "head", "deepseek")
    tensors = dict(open_tensors(folder)) | {"model.layers.2.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(4, 4)}
    heads.write(tmp_path / "other", json.loads((folder / "config.json").read_text()), tensors)
    with pytest.raises(UnsupportedError, match="latent attention"):
        read_layer_head(tmp_path / "other", "mtp", read_model_spec(tiny_model))
    with pytest.raises(UnsupportedError, match="got experts"):
        read_layer_head(folder, "mtp", read_model_spec(resolve_model("demo-moe")))


def test_contradicting_vocabularies_are_refused(tiny_model, tmp_path):
    folder = heads.eagle3(tmp_path / "head")
    tensors = {name: tensor.clone() for name, tensor in open_tensors(folder).items()}
    tensors["t2d"][:] = ~tensors["t2d"]
    heads.write(folder, json.loads((folder / "config.json").read_text()), tensors)
    with pytest.raises(ModelFormatError, match="contradict"):
        read_layer_head(folder, "eagle3", read_model_spec(tiny_model))


def test_method_is_what_the_folder_holds_when_only_a_model_is_given(tiny_model, tmp_path):
    folder = heads.eagle3(tmp_path / "head")
    llm = LLM(str(tiny_model), num_kv_blocks=20, speculative_config={"model": str(folder)})
    try:
        assert llm.llm_engine.config.speculative_config.method == "eagle3"
    finally:
        llm.close()
    settled = settle_method(SpeculativeConfig(model=str(tiny_model)))
    assert (settled.method, settled.max_tokens) == ("draft_model", 4)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (heads.eagle1, "eagle"),
        (heads.eagle3, "eagle3"),
        (heads.speculators, "eagle3"),
        (heads.mtp, "mtp"),
        (lambda folder: heads.mtp(folder, "deepseek"), "mtp"),
        (lambda folder: heads.mtp(folder, "mimo"), "mtp"),
        *[(lambda folder, layout=layout: heads.medusa(folder, layout), "medusa") for layout in ("medusa", "vllm", "full")],
    ],
    ids=["eagle", "eagle3", "speculators", "mtp", "deepseek", "mimo", "medusa", "blocks", "full"],
)
def test_a_head_that_is_given_as_a_model_is_told_its_method(tiny_model, tmp_path, make, kind):
    folder = make(tmp_path / "head")
    assert find_head_kind(folder) == kind
    with pytest.raises(ConfigError, match=f'"method": "{kind}"'):
        LLM(str(tiny_model), num_kv_blocks=20, speculative_config={"method": "draft_model", "model": str(folder)})
    with pytest.raises(ConfigError, match=f'is no model, but a head .* speculative_config {{"method": "{kind}", "model": "'):
        LLM(str(folder), num_kv_blocks=20)


@pytest.mark.parametrize(
    ("make", "kind", "method"),
    [
        (heads.eagle1, "eagle", "eagle3"),
        (heads.eagle3, "eagle3", "mtp"),
        (heads.mtp, "mtp", "medusa"),
        (heads.medusa, "medusa", "deepseek_mtp"),
    ],
)
def test_a_head_that_is_given_with_another_method_is_told_its_own(tiny_model, tmp_path, make, kind, method):
    config = {"method": method, "model": str(make(tmp_path / "head"))}
    with pytest.raises(ConfigError, match=f'is a head of another kind; use it with "method": "{kind}"'):
        LLM(str(tiny_model), num_kv_blocks=20, speculative_config=config)


def test_a_whole_model_is_no_head(tiny_model):
    assert find_head_kind(tiny_model) is None


STORED_INSIDE = {
    "qwen": (heads.mtp, {"method": "mtp"}),
    "deepseek": (lambda folder: heads.mtp(folder, "deepseek"), {"method": "deepseek_mtp"}),
    "medusa": (lambda folder: heads.medusa(folder, "full"), {"method": "medusa", "model": "ITSELF"}),
}


@needs_native
@pytest.mark.parametrize("layout", STORED_INSIDE)
def test_what_drafts_may_be_stored_among_the_weights_of_the_model(tiny_model, tmp_path, layout):
    """Multi-token prediction comes with its model, and Medusa-2 is trained with it."""
    make, config = STORED_INSIDE[layout]
    whole = shutil.copytree(tiny_model, tmp_path / "whole")
    tensors = {**open_tensors(tiny_model), **open_tensors(make(tmp_path / "head"))}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, str(whole / "model.safetensors"))
    assert find_head_kind(whole) is None
    request = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = []
    config = {**config, **({"model": str(whole)} if "model" in config else {"draft_p_min": 0.0}), "adaptive": False}
    for drafting in ({}, {"speculative_config": config}):
        llm = LLM(str(whole), num_kv_blocks=80, **drafting)
        found.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, request, use_tqdm=False)])
        assert (llm.llm_engine.stats.num_draft_tokens > 0) is bool(drafting)
        llm.close()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("make", "kind", "name"),
    [
        (heads.eagle1, "eagle", "layers.1.self_attn.q_proj.weight"),
        (heads.eagle3, "eagle3", "fc.bias"),
        (heads.eagle3, "eagle3", "midlayer.self_attn.q_norm.weight"),
        (heads.eagle3, "eagle3", "fc_norm.0.weight"),
        (heads.mtp, "mtp", "mtp.layers.0.mlp.down_proj.weight_scale_inv"),
        (lambda folder: heads.mtp(folder, "deepseek"), "mtp", "model.layers.2.self_attn.q_proj.bias"),
    ],
)
def test_a_head_is_refused_when_it_has_a_tensor_that_would_not_be_read(tiny_model, tmp_path, make, kind, name):
    """What is left out changes no token, and costs acceptance alone: nobody would see it."""
    folder, spec = make(tmp_path / "head"), read_model_spec(tiny_model)
    tensors = {key: tensor.clone() for key, tensor in open_tensors(folder).items()}
    config = json.loads((folder / "config.json").read_text())
    for more, is_refused in ((name, True), ("layers.0.self_attn.rotary_emb.inv_freq", False), ("verifier_norm.weight", False)):
        heads.write(tmp_path / more, config, {**tensors, more: torch.ones(heads.HIDDEN)})
        if is_refused:
            with pytest.raises(UnsupportedError, match=f"does not read.*{name}"):
                read_layer_head(tmp_path / more, kind, spec)
        else:
            read_layer_head(tmp_path / more, kind, spec)
