"""GGUF files: logits of stored goldens, and of converted checkpoints against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels.native import load_native
from quire.model.build import build_model, whole_prompt_logits
from quire.model.checkpoint import load_parameters, open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.decoder import Decoder
from quire.model.native_decoder import NativeDecoder
from quire.quant.weight import QuantizedWeight
from tests.gguf_writer import write_gguf
from tests.golden import make_checkpoints
from tests.golden.make_checkpoints import reference_model
from tests.golden.make_gguf import convert, parts_of, quantize_q8_0

pytestmark = pytest.mark.golden

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "quantised"
FILES = sorted(SHARED.glob("*.gguf"))
GOLDEN_TOLERANCE, CONVERTED_TOLERANCE = 1e-4, 5e-5
NATIVE_SHARE = 0.03
"""Of the range of the logits, in bfloat16: native kernels quantise the inputs of integers to int8, and round to the dtype."""
CASES = (
    *("llama", "llama-mqa", "llama-bias", "llama-head-dim", "llama-linear", "llama-llama3", "llama-yarn"),
    *("mistral", "mistral-window", "mixtral", "mixtral-window", "qwen2", "qwen3", "qwen3-moe", "gemma", "gemma2", "gemma3"),
    *("phi3", "phi3-window", "phi3-longrope", "gpt2", "olmo2", "granite", "granite-bias", "gguf-gpt-oss"),
)
LENGTHS = (1, 17, 40)


def load(path: Path, max_model_len: int | None = None) -> Decoder:
    spec = read_model_spec(path, "float32")
    return Decoder(spec, load_parameters(path, spec), max_model_len or spec.max_positions)


@pytest.mark.skipif(not FILES, reason=f"{SHARED} is absent")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_logits_are_those_of_the_dequantised_model(path):
    golden = np.load(path.with_suffix(".golden.npz"))
    spec = read_model_spec(path, "float32")
    parameters = load_parameters(path, spec)
    is_quantized = path.stem.startswith("llama-")
    assert isinstance(parameters["layers.1.q.weight"], QuantizedWeight if is_quantized else torch.Tensor)
    decoder = Decoder(spec, parameters, spec.max_positions)
    for ids, logits in zip(
        np.atleast_2d(golden["ids"]), golden["logits"].reshape(-1, golden["ids"].shape[-1], 288), strict=True
    ):
        got = whole_prompt_logits(decoder, ids.tolist())
        assert (got - torch.from_numpy(logits)).abs().max() <= GOLDEN_TOLERANCE


@pytest.mark.skipif(not FILES or load_native() is None, reason=f"{SHARED} is absent, or the native kernels are not built")
@pytest.mark.covering
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_native_logits_are_near_those_of_the_dequantised_model(path, dtype):
    golden = np.load(path.with_suffix(".golden.npz"))
    spec = read_model_spec(path, dtype)
    decoder = build_model(spec, open_parameters(path, spec), spec.max_positions, block_size=16)
    assert isinstance(decoder, NativeDecoder)
    for ids, logits in zip(
        np.atleast_2d(golden["ids"]), golden["logits"].reshape(-1, golden["ids"].shape[-1], 288), strict=True
    ):
        expected = torch.from_numpy(logits)
        error = (whole_prompt_logits(decoder, ids.tolist()) - expected).abs()
        share = NATIVE_SHARE * (expected.max() - expected.min())
        assert error.max() <= (GOLDEN_TOLERANCE if dtype == "float32" else share)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASES)
def test_converted_checkpoint_gives_the_logits_of_transformers(checkpoint, tmp_path, monkeypatch, case):
    # The files do not say the limit of the gate; it is the same in all models.
    gpt_oss = {**make_checkpoints._GPT_OSS, "swiglu_limit": 7.0}
    monkeypatch.setitem(make_checkpoints._CONFIGS, "gguf-gpt-oss", ("gpt_oss", gpt_oss))
    folder = checkpoint(case, "v4")
    reference = reference_model(folder)
    if case in ("gemma2", "gemma3"):
        # The files do not say query_pre_attn_scalar; it is the size of a head in all models but the 27B ones.
        for layer in reference.model.layers:
            layer.self_attn.scaling = layer.self_attn.head_dim**-0.5
    path = convert(folder, reference, tmp_path / "model.gguf")
    for length in LENGTHS:
        ids = torch.randint(0, 131, (length,), generator=torch.Generator().manual_seed(length))
        with torch.inference_mode():
            want = reference(ids[None]).logits[0]
        got = whole_prompt_logits(load(path, max_model_len=length), ids.tolist())
        assert (got - want).abs().max() <= CONVERTED_TOLERANCE


WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
WIDE_CASES = {
    "wide-gpt2": ("gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128, "vocab_size": 131}),
    "wide-gpt-oss": ("gpt_oss", {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 11}),
    "wide-granite": ("granite", {"hidden_size": 64, "intermediate_size": 96, "attention_multiplier": 0.1}),
    "wide-llama": ("llama", {**WIDE, "attention_bias": True, "tie_word_embeddings": True}),
    "wide-mixtral": ("mixtral", {**WIDE, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}),
    "wide-phi3": ("phi3", {"hidden_size": 64, "intermediate_size": 96, "sliding_window": None}),
    "wide-qwen3-moe": ("qwen3_moe", {**WIDE, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("case", WIDE_CASES)
def test_quantised_matrices_are_put_where_float_ones_are(checkpoint, tmp_path, monkeypatch, case):
    monkeypatch.setitem(make_checkpoints._CONFIGS, case, WIDE_CASES[case])
    folder = checkpoint(case, "v4")
    metadata, tensors = parts_of(folder, reference_model(folder))
    # Of two matrices of experts one is left as it is: pieces of a parameter may be stored differently.
    kept = ("blk.1.ffn_up_exps.weight", "position_embd.weight")

    def is_matrix(name):
        return name.endswith(".weight") and name not in kept

    both = {name: quantize_q8_0(t) for name, t in tensors.items() if t.ndim > 1 and is_matrix(name)}
    quantized = write_gguf(tmp_path / "q.gguf", metadata, tensors | {name: packed for name, (packed, _) in both.items()})
    dense = write_gguf(tmp_path / "d.gguf", metadata, tensors | {name: values for name, (_, values) in both.items()})
    assert quantized.stat().st_size < dense.stat().st_size / 2
    ids = list(range(3, 40))
    got, want = (whole_prompt_logits(load(path), ids) for path in (quantized, dense))
    assert (got - want).abs().max() <= CONVERTED_TOLERANCE


@pytest.mark.skipif(not FILES, reason=f"{SHARED} is absent")
@pytest.mark.parametrize("name", ["llama-Q4_K", "llamas-spm-F32"])
def test_llm_generates_and_chats_from_a_file(name):
    path = SHARED / f"{name}.gguf"
    llm = LLM(model=str(path), dtype="float32", max_num_seqs=2)
    try:
        prompt = "the cat"
        output = llm.generate([prompt], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))[0]
        decoder = load(path)
        ids = list(output.prompt_token_ids)
        assert ids
        for token_id in output.outputs[0].token_ids:
            assert token_id == whole_prompt_logits(decoder, ids)[-1].argmax().item()
            ids.append(token_id)
        chat = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=2, temperature=0))[0]
        assert chat.prompt_token_ids
    finally:
        llm.close()
