"""Heads in every published layout: what the engine drafts with them is what the papers' formulas give over transformers.

Each checkpoint is written here, under the names that its authors use. A head that is read or fed wrongly changes no output.
"""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from tests.golden import draft_formulas as formulas
from tests.tiny_checkpoint import VOCAB_SIZE, write_checkpoint

pytestmark = pytest.mark.golden

HIDDEN, INNER, QUERY, KEY, HEAD_DIM, SAID = 32, 48, 32, 16, 8, 90
COUNT = 4
PROMPTS = [[7, 8, 9, 250, 3], list(range(40, 63))]
TAPS = (2, 4, 5)  # of eight layers, where a config says nothing
MODEL = {"num_hidden_layers": 8, "sliding_window": None}


def weights(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        scale = 0.3 if len(shape) == 2 else 0.2
        found[name] = torch.randn(shape, generator=generator) * scale + ("norm" in name and len(shape) == 1)
    return found


def layer(prefix, attended=HIDDEN, norms=("post_attention_layernorm",), has_qk_norm=False):
    shapes = {
        f"{prefix}self_attn.{name}_proj.weight": (size, attended) for name, size in zip("qkv", (QUERY, KEY, KEY), strict=True)
    }
    shapes |= {f"{prefix}self_attn.o_proj.weight": (HIDDEN, QUERY), f"{prefix}mlp.down_proj.weight": (HIDDEN, INNER)}
    shapes |= {f"{prefix}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
    shapes |= {f"{prefix}{norm}.weight": (HIDDEN,) for norm in norms}
    return shapes | ({f"{prefix}self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"} if has_qk_norm else {})


LLAMA = {
    **{"model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": HEAD_DIM, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
    **{"max_position_embeddings": 256, "vocab_size": VOCAB_SIZE, "num_hidden_layers": 1},
}
EAGLE3_NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")


def eagle1(folder, base):
    """Of SafeAILab: a torch file, an embedding of its own, no norm before attention."""
    shapes = layer("layers.0.") | {"fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,)}
    found = weights({**shapes, "embed_tokens.weight": (VOCAB_SIZE, HIDDEN)}, 1)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "bias": True, **LLAMA}))
    torch.save(found, folder / "pytorch_model.bin")
    return base, {"method": "eagle", "model": str(folder)}, found


def eagle3_weights(prefix, seed):
    shapes = layer(prefix, 2 * HIDDEN, EAGLE3_NORMS) | {"fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,)}
    found = weights({**shapes, "lm_head.weight": (SAID, HIDDEN)}, seed)
    ids = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))[:SAID].sort().values
    said = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    said[ids] = True
    return {**found, "d2t": ids - torch.arange(SAID), "t2d": said}


def eagle3(folder, base):
    """Of SafeAILab, and SpecForge: midlayer.*, the model's embedding, layers that nothing says."""
    found = eagle3_weights("midlayer.", 2)
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLMEagle3"], **LLAMA, "draft_vocab_size": SAID}
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(found, folder / "pytorch_model.bin")
    return base, {"method": "eagle3", "model": str(folder)}, found


def speculators(folder, base):
    """Of the speculators library: layers.0.*, a nested config, layers that it names, a residual behind the norm."""
    found = eagle3_weights("layers.0.", 3) | weights({"embed_tokens.weight": (VOCAB_SIZE, HIDDEN)}, 4)
    folder.mkdir()
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"proposal_type": "greedy"}]},
        "transformer_layer_config": LLAMA,
        "draft_vocab_size": SAID,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        "norm_before_residual": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(found, str(folder / "model.safetensors"))
    return base, {"method": "eagle3", "model": str(folder)}, found


def medusa_weights(stem):
    shapes = {f"{stem}{i}.0.linear.weight": (HIDDEN, HIDDEN) for i in range(COUNT)}
    shapes |= {f"{stem}{i}.0.linear.bias": (HIDDEN,) for i in range(COUNT)}
    return weights(shapes | {f"{stem}{i}.1.weight": (VOCAB_SIZE, HIDDEN) for i in range(COUNT)}, 5)


def medusa1(folder, base):
    """Of FasterDecoding: heads alone, a config that says too few."""
    found = medusa_weights("")
    folder.mkdir()
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "someone/model"}
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(found, folder / "medusa_lm_head.pt")
    return base, {"method": "medusa", "model": str(folder)}, found


def whole(folder, base, found):
    """Store tensors among those of the model."""
    shutil.copytree(base, folder)
    save_file({**load_file(base / "model.safetensors"), **found}, str(folder / "model.safetensors"), {"format": "pt"})
    return folder


def medusa2(folder, base):
    """The model that was trained with its heads: all in one checkpoint."""
    found = medusa_weights("medusa_head.")
    return whole(folder, base, found), {"method": "medusa", "model": str(folder)}, found


def vllm_weights(num_said):
    shapes = {f"blocks.{i}.layers.{j}.weight": (HIDDEN, HIDDEN) for i in range(COUNT) for j in range(2)}
    shapes |= {f"blocks.{i}.layers.{j}.bias": (HIDDEN,) for i in range(COUNT) for j in range(2)}
    found = weights(shapes | {f"lm_heads.{i}.weight": (num_said, HIDDEN) for i in range(COUNT)}, 8)
    token_map = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(8))[:SAID]
    return {**found, "token_map": token_map}


def medusa_vllm(folder, base, num_said=SAID, **changes):
    """Of vLLM: two layers a block, the most frequent tokens alone."""
    found = vllm_weights(num_said)
    folder.mkdir()
    config = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB_SIZE}
    config |= {"num_heads": COUNT, "num_hidden_layers": 2, "medusa_fc_bias": True, "truncated_vocab_size": SAID, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    stored = {"lm_heads.0.weight"} if changes.get("original_lm_head") else found.keys()
    kept = {name: tensor for name, tensor in found.items() if not name.startswith("lm_heads.") or name in stored}
    save_file(kept, str(folder / "model.safetensors"))
    if changes.get("original_lm_head"):
        found |= {f"lm_heads.{i}.weight": found["lm_heads.0.weight"] for i in range(COUNT)}
    return base, {"method": "medusa", "model": str(folder)}, found


def mtp_qwen(folder, base):
    """Of Qwen: mtp.*, the model's embedding and output."""
    norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    shapes = layer("mtp.layers.0.", HIDDEN, EAGLE3_NORMS[1:], has_qk_norm=True)
    shapes |= {"mtp.fc.weight": (HIDDEN, 2 * HIDDEN), **{f"{norm}.weight": (HIDDEN,) for norm in norms}}
    found = weights(shapes, 6)
    return whole(folder, base, found), {"method": "mtp"}, found


def mtp_deepseek(folder, base):
    """Of DeepSeek: the layer behind the last one, with an embedding and an output of its own."""
    prefix = "model.layers.8."
    shapes = layer(prefix, HIDDEN, (*EAGLE3_NORMS[1:], "enorm", "hnorm", "shared_head.norm"))
    shapes |= {f"{prefix}{name}.weight": (VOCAB_SIZE, HIDDEN) for name in ("embed_tokens", "shared_head.head")}
    found = weights({**shapes, f"{prefix}eh_proj.weight": (HIDDEN, 2 * HIDDEN)}, 7)
    return whole(folder, base, found), {"method": "deepseek_mtp"}, found


MIMO_LAYER = "model.mtp_layers.0."


def mtp_mimo(folder, base, has_qk_norm=False):
    """Of MiMo: a layer of Qwen2's kind, whose state comes first; has_qk_norm: as it is written for models with such norms."""
    modules = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    shapes = layer(MIMO_LAYER, HIDDEN, (*EAGLE3_NORMS[1:], *modules), has_qk_norm)
    shapes |= {f"{MIMO_LAYER}input_proj.weight": (HIDDEN, 2 * HIDDEN)}
    sizes = zip("qkv", (QUERY, KEY, KEY), strict=True)
    shapes |= {f"{MIMO_LAYER}self_attn.{name}_proj.bias": (size,) for name, size in sizes}
    found = weights(shapes, 9)
    if has_qk_norm:
        found |= {name: torch.zeros_like(tensor) for name, tensor in found.items() if name.endswith(".bias")}
    folder.mkdir()
    config = {"architectures": ["MiMoForCausalLM"], **LLAMA, "model_type": "qwen2", "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps({**config, "qk_norm": has_qk_norm}))
    save_file(found, str(folder / "model.safetensors"))
    return base, {"method": "mtp", "model": str(folder)}, found


MIMO_FUSE = f"{MIMO_LAYER}input_proj.weight"
MIMO = tuple(f"{MIMO_LAYER}{name}.weight" for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"))
QWEN = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight")
DEEPSEEK = tuple(f"model.layers.8.{name}.weight" for name in ("enorm", "hnorm", "shared_head.norm"))
OWN = tuple(f"model.layers.8.{name}.weight" for name in ("embed_tokens", "shared_head.head"))
LAYOUTS = {
    "EAGLE-1": (eagle1, "mistral", formulas.eagle1, ()),
    "EAGLE-3": (eagle3, "mistral", formulas.eagle3_of("midlayer."), TAPS),
    "EAGLE-3 of speculators": (speculators, "mistral", formulas.eagle3_of("layers.0.", adds_normed=True), (1, 3, 6)),
    "Medusa-1": (medusa1, "mistral", "", ()),
    "Medusa-2": (medusa2, "mistral", "medusa_head.", ()),
    "Medusa of vLLM": (medusa_vllm, "mistral", formulas.draft_with_medusa_of_vllm, ()),
    "Medusa of vLLM, whole outputs": (
        partial(medusa_vllm, num_said=VOCAB_SIZE),
        "mistral",
        formulas.draft_with_medusa_of_vllm,
        (),
    ),
    "Medusa of vLLM, one output": (
        partial(medusa_vllm, original_lm_head=True),
        "mistral",
        formulas.draft_with_medusa_of_vllm,
        (),
    ),
    "MTP of Qwen": (mtp_qwen, "qwen3", formulas.multi_token("mtp.fc.weight", QWEN, "mtp.layers.0."), ()),
    "MTP of MiMo": (mtp_mimo, "qwen2", formulas.multi_token(MIMO_FUSE, MIMO, MIMO_LAYER, has_state_first=True), ()),
    "MTP of MiMo with norms": (
        partial(mtp_mimo, has_qk_norm=True),
        "qwen3",
        formulas.multi_token(MIMO_FUSE, MIMO, MIMO_LAYER, has_state_first=True),
        (),
    ),
    "MTP of DeepSeek": (
        mtp_deepseek,
        "mistral",
        formulas.multi_token("model.layers.8.eh_proj.weight", DEEPSEEK, "model.layers.8.", *OWN),
        (),
    ),
}


def drafter(layout, base, found):
    """Return a function of known tokens: what the paper's formula drafts behind them."""
    _, _, step, taps = LAYOUTS[layout]
    model = formulas.Model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval())
    if isinstance(step, str):
        return partial(formulas.draft_with_medusa, model, found, step)
    if step is formulas.draft_with_medusa_of_vllm:
        return partial(step, model, found)
    return partial(formulas.draft_with_layer, model, found, step, taps)


def run(folder, config):
    """Return known tokens and drafts, of all that the engine drafts for the prompts."""
    more = {} if config["method"] == "medusa" else {"draft_p_min": 0.0}
    config = {**config, **more, "num_speculative_tokens": COUNT, "adaptive": False}
    llm = LLM(str(folder), dtype="float32", num_kv_blocks=40, speculative_config=config)
    proposer, seen = llm.llm_engine.speculator.proposer, []
    propose = proposer.propose

    def note(wanted):
        known = [list(sequence.token_ids) for sequence, _ in wanted]
        drafts = propose(wanted)
        seen.extend((tokens, list(draft.tokens)) for tokens, draft in zip(known, drafts, strict=True))
        return drafts

    proposer.propose = note
    llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    llm.close()
    return seen


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    return {family: write_checkpoint(root / family, family, **MODEL) for family in ("mistral", "qwen2", "qwen3")}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_are_those_of_the_formula(bases, tmp_path, layout):
    write, family, *_ = LAYOUTS[layout]
    folder, config, found = write(tmp_path / "head", bases[family])
    draft = drafter(layout, bases[family], found)
    seen = run(folder, config)
    assert len(seen) >= 8
    assert sum(len(drafts) == COUNT for _, drafts in seen) >= 4
    for tokens, drafts in seen:
        assert draft(tokens, len(drafts)) == drafts


WRONG = {
    "EAGLE-3": (formulas.eagle3_of("midlayer."), (2, 4, 6)),
    "EAGLE-3 of speculators": (formulas.eagle3_of("layers.0."), (1, 3, 6)),
    "MTP of Qwen": (formulas.multi_token("mtp.fc.weight", (*QWEN[1::-1], QWEN[2]), "mtp.layers.0."), ()),
    "MTP of MiMo": (formulas.multi_token(MIMO_FUSE, MIMO, MIMO_LAYER), ()),
}


@pytest.mark.parametrize("layout", WRONG)
def test_drafts_are_others_when_the_formula_is_another(bases, tmp_path, monkeypatch, layout):
    write, family, *_ = LAYOUTS[layout]
    folder, config, found = write(tmp_path / "head", bases[family])
    monkeypatch.setitem(LAYOUTS, layout, (write, family, *WRONG[layout]))
    draft = drafter(layout, bases[family], found)
    assert any(draft(tokens, len(drafts)) != drafts for tokens, drafts in run(folder, config))
