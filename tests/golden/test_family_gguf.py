"""GGUF files of further families: the logits of checkpoints that are converted as the format's converters do."""

from __future__ import annotations

import pytest
import torch

from quire.base.errors import UnsupportedError
from quire.model.build import whole_prompt_logits
from quire.model.checkpoint import load_parameters
from quire.model.config_reader import read_model_spec
from quire.model.decoder import Decoder
from tests.gguf_writer import write_gguf
from tests.golden import make_checkpoints
from tests.golden.make_checkpoints import reference_model
from tests.golden.make_family_gguf import ARCHITECTURES, convert

pytestmark = pytest.mark.golden

TOLERANCE = 5e-5
_MOE = make_checkpoints._DEEPSEEK_MOE
_LATENT = make_checkpoints._LATENT
# Where files say less than a config.json does, what they leave out is as in the released models.
OWN_CASES = {
    "gguf-smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "gguf-smollm3-bias": ("smollm3", {"num_hidden_layers": 4, "attention_bias": True, "mlp_bias": True}),
    "gguf-olmo3": ("olmo3", {"num_hidden_layers": 4, "sliding_window": 11}),
    "gguf-qwen2-moe": (
        "qwen2_moe",
        {
            **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "decoder_sparse_step": 1},
            **{"shared_expert_intermediate_size": 56, "norm_topk_prob": False},
        },
    ),
    "gguf-ernie-moe": (
        "ernie4_5_moe",
        {
            **{"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 40, "num_hidden_layers": 4},
            **{"moe_layer_end_index": -1, "tie_word_embeddings": False},
        },
    ),
    "gguf-dots1": ("dots1", {**_MOE, "head_dim": 16, "sliding_window": None}),
    "gguf-deepseek-v3-yarn": (
        "deepseek_v3",
        {
            **_MOE,
            **_LATENT,
            "rope_parameters": {**make_checkpoints._LONG_YARN, "mscale": 1.2, "mscale_all_dim": 1.2},
        },
    ),
    "gguf-deepseek-v2-lite": (
        "deepseek_v2",
        {**_MOE, **_LATENT, "q_lora_rank": None, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    ),
    "gguf-deepseek-v2": (
        "deepseek_v2",
        {**_MOE, **_LATENT, "topk_method": "group_limited_greedy", "norm_topk_prob": False},
    ),
    "gguf-starcoder2": ("starcoder2", {"sliding_window": None, "tie_word_embeddings": False}),
}
CASES = (
    *OWN_CASES,
    *("arcee", "cohere", "cohere-bias", "cohere2", "ernie4-5", "ernie4-5-moe-bias", "exaone4", "exaone4-full", "glm4"),
    *("glm4-moe", "glm4-moe-no-renorm", "gpt-neox", "gpt-neox-sequential", "granitemoe", "granitemoe-shared", "hunyuan-dense"),
    *(
        "hunyuan-moe-alpha",
        "minimax-m2",
        "nemotron",
        "olmoe",
        "phi",
        "phi-qk-norm",
        "seed-oss",
        "stablelm",
        "starcoder2-no-bias",
    ),
)
PROMPT = torch.randint(0, 131, (40,), generator=torch.Generator().manual_seed(40)).tolist()


@pytest.fixture(autouse=True)
def own_cases(monkeypatch):
    for name, case in OWN_CASES.items():
        monkeypatch.setitem(make_checkpoints._CONFIGS, name, case)


def check(path, reference):
    spec = read_model_spec(path, "float32")
    decoder = Decoder(spec, load_parameters(path, spec), 64)
    for length in (1, 40):
        with torch.inference_mode():
            want = reference(torch.tensor([PROMPT[:length]])).logits[0]
        assert (whole_prompt_logits(decoder, PROMPT[:length]) - want).abs().max() <= TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_converted_checkpoint_gives_the_logits_of_transformers(checkpoint, tmp_path, case):
    folder = checkpoint(case, "v4")
    reference = reference_model(folder)
    check(convert(folder, reference, tmp_path / "model.gguf"), reference)


@pytest.mark.parametrize("case", ["gguf-deepseek-v3-yarn", "gguf-deepseek-v2-lite"])
def test_keys_and_values_of_latent_rows_may_be_stored_apart(checkpoint, tmp_path, case):
    folder = checkpoint(case, "v4")
    reference = reference_model(folder)
    check(convert(folder, reference, tmp_path / "model.gguf", splits_kv_b=True), reference)


def test_an_unknown_architecture_is_refused_with_the_nearest(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": ("string", "deepseek3")})
    with pytest.raises(UnsupportedError, match=r"deepseek3 \(did you mean deepseek2"):
        read_model_spec(path, "float32")


def test_every_architecture_of_the_family_readers_is_converted():
    from quire.model.gguf_families import FAMILY_READERS

    # These have the layout of one that is: Llama, with or without its rows permuted, Granite and Qwen3.
    assert set(FAMILY_READERS) - set(ARCHITECTURES.values()) == {"baichuan", "minicpm", "qwen3vl"}
