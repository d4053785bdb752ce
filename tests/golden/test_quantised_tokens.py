"""Greedy tokens of the native step from quantised checkpoints and GGUF files of others: those of the dequantised weights."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.kernels.native import load_native
from quire.model.build import build_model, load_model, whole_prompt_logits
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.decoder import DecoderLayer
from quire.model.native_decoder import NativeDecoder

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "quantised"
INT8_INPUTS = FOLDER / "llama-ct-w8a8-dynamic"
"""Declares inputs that are quantised token by token, in any dtype."""
PATHS = sorted(path for path in FOLDER.glob("*") if (path.is_dir() or path.suffix == ".gguf") and path != INT8_INPUTS)
PROMPTS = ([5, 9, 20], [33, 2, 7, 100], [200, 11])
NUM_STEPS = 20
TOLERANCE, INT8_SHARE = 1e-4, 0.03
FLIP_SHARE = 0.003
"""Of the range of the logits: an input between two integers is rounded to the other one where sums have another order."""

pytestmark = [
    pytest.mark.golden,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="../shared/data is not there"),
    pytest.mark.skipif(load_native() is None, reason="the native kernels are not built"),
]


def native_model(path):
    spec = read_model_spec(path, "float32")
    model = build_model(spec, open_parameters(path, spec), 64, block_size=16)
    assert isinstance(model, NativeDecoder)
    return model


def greedy(model, prompt):
    token_ids = list(prompt)
    for _ in range(NUM_STEPS):
        token_ids.append(int(whole_prompt_logits(model, token_ids)[-1].argmax()))
    return token_ids


@pytest.mark.one_in(4)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_greedy_tokens_are_those_of_the_dequantised_weights(path):
    native, reference = native_model(path), load_model(path, "float32")
    for prompt in PROMPTS:
        # Where the reference chooses each token in its turn it would have generated them.
        token_ids = greedy(native, prompt)
        chosen = whole_prompt_logits(reference, token_ids[:-1])[len(prompt) - 1 :].argmax(1)
        assert token_ids[len(prompt) :] == chosen.tolist()


def as_int8(x, steps=127.0):
    """Return rows as they are in int8 with a scale for each, by which the largest is so many steps."""
    scale = x.abs().amax(-1, keepdim=True) / steps
    return (x / scale).round().clamp(-128, 127) * scale


@contextmanager
def inputs_as(monkeypatch, quantize):
    """Let the reference quantise what linear layers read."""
    linear = DecoderLayer._linear
    with monkeypatch.context() as patch:
        patch.setattr(DecoderLayer, "_linear", lambda self, x, name: linear(self, quantize(x), name))
        yield


def test_logits_are_those_of_inputs_in_int8_where_a_checkpoint_declares_them(monkeypatch):
    golden = np.load(INT8_INPUTS / "golden.npz")
    token_ids = golden["ids"].reshape(-1).tolist()
    recorded = torch.from_numpy(golden["logits_act"]).view(len(token_ids), -1)
    reference = load_model(INT8_INPUTS, "float32")
    with inputs_as(monkeypatch, lambda x: as_int8(x, 127.5)):
        assert (whole_prompt_logits(reference, token_ids) - recorded).abs().max() <= TOLERANCE
    # The kernels have 254 steps instead of 255, which is another rounding of as many bits.
    native = whole_prompt_logits(native_model(INT8_INPUTS), token_ids)
    with inputs_as(monkeypatch, as_int8):
        assert (native - whole_prompt_logits(reference, token_ids)).abs().max() <= TOLERANCE
    assert (native - recorded).abs().max() <= INT8_SHARE * (recorded.max() - recorded.min())


def test_greedy_tokens_are_those_of_inputs_in_int8_where_a_checkpoint_declares_them(monkeypatch):
    native, reference = native_model(INT8_INPUTS), load_model(INT8_INPUTS, "float32")
    for prompt in PROMPTS:
        token_ids = greedy(native, prompt)
        with inputs_as(monkeypatch, as_int8):
            logits = whole_prompt_logits(reference, token_ids[:-1])[len(prompt) - 1 :]
        chosen = logits[range(NUM_STEPS), token_ids[len(prompt) :]]
        assert ((logits.amax(1) - chosen) <= FLIP_SHARE * (logits.max() - logits.min())).all()
