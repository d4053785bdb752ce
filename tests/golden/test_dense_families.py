"""Logits of dense families and of wrappers against transformers, with torch and with the native kernels."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.kernels.native import load_native
from quire.model.build import whole_prompt_logits
from quire.model.checkpoint import load_parameters, open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.decoder import Decoder
from quire.model.families import WRAPPERS, baichuan
from quire.model.native_decoder import NativeDecoder
from quire.model.native_model import native_refusal
from tests.golden import gemma_cases, recurrent_cases
from tests.golden.dense_cases import WRAPPED, convert
from tests.golden.make_checkpoints import DENSE_CASES, TORCH_CASES, reference_model

pytestmark = pytest.mark.golden

VOCAB_SIZE, MAX_MODEL_LEN = 131, 64
# Longer than a KV block (16), a window (11) and the original length of the scaled ropes (16, 32).
PROMPT = torch.randint(0, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(40)).tolist()
F32_TOLERANCE, NATIVE_TOLERANCE = 3e-5, 5e-5


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", DENSE_CASES)
def test_f32_logits_are_those_of_transformers(checkpoint, case):
    folder = checkpoint(case, "v5")
    spec = read_model_spec(folder)
    with torch.inference_mode():
        want = reference_model(folder)(torch.tensor([PROMPT])).logits[0]
    found = whole_prompt_logits(Decoder(spec, load_parameters(folder, spec), MAX_MODEL_LEN), PROMPT)
    assert (found - want).abs().max() <= F32_TOLERANCE
    assert (native_refusal(spec, 16) is None) == (case not in TORCH_CASES)
    if load_native() is not None and case not in TORCH_CASES:
        native = NativeDecoder(load_native(), spec, load_parameters(folder, spec), MAX_MODEL_LEN)
        assert (whole_prompt_logits(native, PROMPT) - want).abs().max() <= NATIVE_TOLERANCE


@pytest.mark.parametrize("num_layers", [40, 2])
def test_baichuan_13b_has_alibi_for_its_rope_and_baichuan_2_a_head_of_normalised_rows(tmp_path, monkeypatch, num_layers):
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": num_layers, "num_attention_heads": 6}
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, attn_implementation="eager", **sizes)).eval()
    model.save_pretrained(tmp_path)
    convert(tmp_path, "baichuan")
    if num_layers == 2:
        monkeypatch.setattr(baichuan, "VOCAB_SIZE_OF_2", VOCAB_SIZE)
        head = model.lm_head.weight.data
        head /= head.norm(dim=1, keepdim=True)
    distance = torch.arange(len(PROMPT))[:, None] - torch.arange(len(PROMPT))
    slopes = torch.tensor([2.0**-power for power in (2, 4, 6, 8, 1, 3)])[:, None, None]
    mask = (-slopes * distance).masked_fill(distance < 0, -torch.inf)
    still = {"attention_mask": mask[None], "position_ids": torch.zeros(1, len(PROMPT), dtype=int)}  # a rope turns nothing at 0
    with torch.inference_mode():
        want = model(torch.tensor([PROMPT]), **(still if num_layers == 40 else {})).logits
    spec = read_model_spec(tmp_path)
    found = whole_prompt_logits(Decoder(spec, load_parameters(tmp_path, spec), MAX_MODEL_LEN), PROMPT)
    assert (found - want[0]).abs().max() <= F32_TOLERANCE
    if load_native() is not None:
        native = NativeDecoder(load_native(), spec, load_parameters(tmp_path, spec), MAX_MODEL_LEN)
        assert (whole_prompt_logits(native, PROMPT) - want[0]).abs().max() <= NATIVE_TOLERANCE


@pytest.mark.parametrize("case", ["mistral3-ministral3", "qwen3-vl"])
def test_tensors_of_images_are_skipped_with_one_line_in_the_log(checkpoint, caplog, case):
    folder = checkpoint(case, "v5")
    with caplog.at_level(logging.INFO, logger="quire"):
        open_parameters(folder, read_model_spec(folder))
    lines = [record.message for record in caplog.records if "tensors of images are skipped" in record.message]
    assert len(lines) == 1
    assert not lines[0].startswith(f"{folder}: 0 ")


@pytest.mark.parametrize("case", ["mistral3-mistral", "cohere", "stablelm-parallel", "apertus", "gpt-neox", "internlm2"])
def test_missing_tensor_is_named(checkpoint, tmp_path, case):
    folder = shutil.copytree(checkpoint(case, "v5"), tmp_path / case)
    file = folder / "model.safetensors"
    whole = {name: tensor.clone() for name, tensor in load_file(file).items()}
    prefixes = ("language_model.model.", "language_model.", "model.", "gpt_neox.")
    skipped = ("vision_tower", "multi_modal", "lm_head", "embed_out", "output", "beta", "eps")
    needed = [name for name in whole if not any(part in name for part in skipped)]
    for name in needed[:: max(1, len(needed) // 8)]:
        file.unlink()
        save_file({other: tensor for other, tensor in whole.items() if other != name}, file)
        short = next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name)
        with pytest.raises(ModelFormatError, match="missing") as caught:
            open_parameters(folder, read_model_spec(folder))
        assert short in str(caught.value)


def test_a_text_that_a_wrapper_does_not_take_is_refused(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("mistral3-mistral", "v5"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["model_type"] = "opt"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="text_config of model_type 'opt'.*mistral, ministral3"):
        read_model_spec(folder)


def test_every_wrapper_has_a_case():
    cases = (WRAPPED, gemma_cases.WRAPPED, recurrent_cases.WRAPPED)
    others = {"gemma3", "gemma3n"}  # see make_checkpoints.py and test_gemma_models.py
    assert {wrapper for group in cases for wrapper, *_ in group.values()} | others == set(WRAPPERS)
