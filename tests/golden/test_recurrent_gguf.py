"""GGUF files of models with a recurrent state: the logits of checkpoints that are converted as the format's converters do."""

from __future__ import annotations

import pytest
import torch

from quire.base.errors import ModelFormatError
from quire.model.build import whole_prompt_logits
from quire.model.checkpoint import load_parameters
from quire.model.config_reader import read_model_spec
from quire.model.decoder import Decoder
from quire.model.gguf_recurrent import RECURRENT_READERS
from tests.gguf_writer import write_gguf
from tests.golden import make_checkpoints, recurrent_cases
from tests.golden.make_checkpoints import reference_model
from tests.golden.make_recurrent_gguf import ARCHITECTURES, convert

pytestmark = pytest.mark.golden

TOLERANCE = 1e-4
_NEMOTRON = {**recurrent_cases._NEMOTRON, "num_attention_heads": 4}
# Where files say less than a config.json does, what they leave out is as in the released models.
OWN_CASES = {
    "gguf-granite-hybrid-dense": ("granitemoehybrid", {**recurrent_cases._GRANITE, "num_local_experts": 0}),
    "gguf-nemotron-h": (
        "nemotron_h",
        {**_NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
    ),
    "gguf-nemotron-h-moe": (
        "nemotron_h",
        {
            **{**_NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "n_group": 4},
            **{"topk_group": 2, "moe_latent_size": 20},
        },
    ),
    "gguf-kimi-linear": ("kimi_linear", {**recurrent_cases._KIMI, "linear_num_heads": 4}),
    "gguf-kimi-linear-latent": (
        "kimi_linear",
        {**recurrent_cases._KIMI, "linear_num_heads": 4, "q_lora_rank": 24, "mlp_layer_types": ["sparse"] * 4},
    ),
    "gguf-lfm2-moe": ("lfm2_moe", {**recurrent_cases._LFM2, **recurrent_cases._EXPERTS, "num_dense_layers": 1}),
}
CASES = (
    *OWN_CASES,
    *("qwen3-next", "qwen3-5", "qwen3-5-moe", "lfm2", "granite-hybrid", "falcon-h1", "falcon-h1-gate", "jamba", "jamba-dense"),
    *("mamba", "falcon-mamba", "mamba2"),
)
PROMPT = torch.randint(0, 131, (40,), generator=torch.Generator().manual_seed(40)).tolist()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASES)
def test_converted_checkpoint_gives_the_logits_of_transformers(checkpoint, tmp_path, monkeypatch, case):
    for name, own in OWN_CASES.items():
        monkeypatch.setitem(make_checkpoints._CONFIGS, name, own)
    reference = reference_model(checkpoint(case))
    path = convert(reference, tmp_path / "model.gguf")
    spec = read_model_spec(path, "float32")
    decoder = Decoder(spec, load_parameters(path, spec), 64)
    with torch.inference_mode():
        want = reference(torch.tensor([PROMPT])).logits[0]
    assert (whole_prompt_logits(decoder, PROMPT) - want).abs().max() <= TOLERANCE


def test_every_architecture_of_the_recurrent_readers_is_converted():
    assert {*RECURRENT_READERS} == {*ARCHITECTURES.values(), "nemotron_h_moe"}


@pytest.mark.parametrize("counts", [[0, 0, 0], [2, 0], [2, 0, 1], [-1, 0, 2]])
def test_kv_heads_of_layers_that_fit_no_model_are_refused(tmp_path, counts):
    metadata = {
        "general.architecture": ("string", "lfm2"),
        "lfm2.block_count": ("u32", 3),
        "lfm2.attention.head_count_kv": ("i32[]", counts),
    }
    zeros = torch.zeros(4, 4).numpy()
    tensors = dict.fromkeys(("token_embd.weight", "blk.0.a.weight", "blk.1.a.weight", "blk.2.a.weight"), zeros)
    path = write_gguf(tmp_path / "m.gguf", metadata, tensors)
    with pytest.raises(ModelFormatError, match=r"lfm2\.attention\.head_count_kv"):
        read_model_spec(path, "float32")
