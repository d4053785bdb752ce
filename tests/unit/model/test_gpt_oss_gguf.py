"""gpt-oss from a GGUF file is the model of the checkpoint that it was converted from."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.kernels.native import load_native
from quire.model.build import build_model, load_model, whole_prompt_logits
from quire.model.checkpoint import load_parameters, open_parameters
from quire.model.config_reader import read_model_spec
from quire.quant.parameters import QuantizedStack
from tests.gguf_writer import F32, MXFP4, write_gguf
from tests.unit.model.gpt_oss_gguf import convert_gpt_oss, gpt_oss_parts
from tests.unit.model.mxfp4_checkpoint import write_mxfp4

PROMPT = [5, 100, 7, 44, 300, 2, 9, 250, 17, 80, 3, 3, 71, 120]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with the limit of the gate that all released models have, as files do not say it."""
    return write_mxfp4(tmp_path_factory.mktemp("gpt_oss"), swiglu_limit=7.0)[0]


@pytest.fixture
def path(folder, tmp_path):
    return convert_gpt_oss(folder, tmp_path / "model.gguf")


@pytest.fixture
def write(folder, tmp_path):
    """Return a function that writes the file with other keys (without gpt-oss. in front) and tensors; None leaves one out."""

    def write(tensors=None, **changes):
        metadata, stored = gpt_oss_parts(folder)
        metadata |= {key if key.startswith("tokenizer") else f"gpt-oss.{key}": item for key, item in changes.items()}
        stored |= tensors or {}
        kept = ({key: item for key, item in part.items() if item is not None} for part in (metadata, stored))
        return write_gguf(tmp_path / "changed.gguf", *kept)

    return write


def windows(path):
    return [layer.attention.window for layer in read_model_spec(path).layers]


def test_metadata_say_the_spec_of_the_checkpoint(folder, path):
    # A file without a tokenizer names no tokens.
    expected = replace(read_model_spec(folder, "float32"), bos_token_id=None, eos_token_ids=frozenset())
    assert read_model_spec(path, "float32") == expected
    rope = expected.layers[0].attention.rope
    assert (rope.kind, rope.factor, rope.truncate) == ("yarn", 4.0, False)
    assert windows(path) == [11, None]


def test_parameters_and_logits_are_exactly_those_of_the_checkpoint(folder, path):
    spec = read_model_spec(path, "float32")
    found, expected = load_parameters(path, spec), load_parameters(folder, spec)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert type(found[name]) is type(value)
        if isinstance(value, QuantizedStack):
            assert [weight.levels for weight in found[name].weights] == [weight.levels for weight in value.weights]
        dense = [v.dequantize() if isinstance(v, QuantizedStack) else v for v in (found[name], value)]
        assert torch.equal(*dense), name
    logits = [whole_prompt_logits(load_model(model, "float32"), PROMPT) for model in (path, folder)]
    assert torch.equal(*logits)


@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
def test_native_logits_and_bytes_are_those_of_the_checkpoint(folder, path):
    spec = read_model_spec(path, "bfloat16")
    ours, its = (build_model(spec, open_parameters(model, spec), 64, 16) for model in (path, folder))
    assert torch.equal(whole_prompt_logits(ours, PROMPT), whole_prompt_logits(its, PROMPT))
    assert ours.weight_bytes == its.weight_bytes


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (("u32", 2), [11, None]),
        (("u32", 0), [11, 11]),
        (("u32", 1), [None, None]),
        (("u32", 3), [11, 11]),
        (("bool[]", [False, True]), [None, 11]),
    ],
)
def test_windows_follow_a_pattern_that_the_file_states(write, pattern, expected):
    assert windows(write(**{"attention.sliding_window_pattern": pattern})) == expected


def test_file_without_scaling_is_not_scaled(write):
    spec = read_model_spec(write(**{"rope.scaling.type": None, "rope.scaling.factor": None}))
    assert spec.layers[0].attention.rope.kind == "default"


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"attention.sliding_window": None}, ModelFormatError, "sliding_window must be an integer >= 1"),
        ({"attention.sliding_window_pattern": ("bool[]", [True])}, ModelFormatError, "layer_types"),
        ({"expert_feed_forward_length": None}, ModelFormatError, "expert_feed_forward_length"),
        ({"expert_count": None}, ModelFormatError, "expert_count"),
        ({"expert_used_count": ("u32", 5)}, ModelFormatError, "num_experts_per_tok"),
        ({"rope.freq_base_swa": ("f32", 5e3)}, UnsupportedError, "freq_base_swa"),
        ({"expert_weights_scale": ("f32", 2.5)}, UnsupportedError, "expert_weights_scale"),
    ],
)
def test_metadata_that_fit_no_gpt_oss_are_refused(write, changes, error, reason):
    with pytest.raises(error, match=reason):
        read_model_spec(write(**changes))


def expert_tensor(rows, columns):
    return MXFP4, (4, rows, columns), bytes(4 * rows * columns // 32 * 17)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"blk.1.ffn_up_exps.weight": None}, r"missing \(layers\.1\.mlp\.experts\.0\.up_proj\.weight"),
        ({"blk.1.ffn_up_exps.bias": None}, r"1 missing \(layers\.1\.mlp\.experts\.up_proj\.bias"),
        ({"blk.1.ffn_gate_inp.bias": None}, r"1 missing \(layers\.1\.mlp\.router\.bias"),
        ({"blk.0.attn_sinks.weight": None}, r"1 missing \(layers\.0\.self_attn\.sinks"),
        ({"blk.0.attn_sinks.weight": np.ones(3, np.float32)}, r"sinks has \[3\]"),
        ({"blk.0.ffn_gate_exps.bias": np.ones((4, 64), np.float32)}, r"experts\.gate_proj\.bias has \[4, 64\]"),
        ({"blk.0.ffn_up_exps.weight": expert_tensor(96, 32)}, r"experts\.0\.up_proj\.weight has \[96, 32\]"),
        ({"blk.0.ffn_up_exps.weight": expert_tensor(95, 64)}, r"experts\.0\.up_proj\.weight has \[95, 64\]"),
        ({"blk.0.ffn_gate_up_exps.weight": expert_tensor(192, 64)}, "twice, the second time as .blk.0.ffn_gate_up_exps.weight"),
        ({"blk.0.ffn_up_exps.weight": (MXFP4, (4, 96, 48), bytes(4 * 96 * 34))}, "rows of 48 elements cannot be MXFP4"),
        ({"zzz.weight": (MXFP4, (4, 32), bytes(1))}, "its data ends at byte"),
        ({"blk.0.ffn_up_exps.weight": (MXFP4, (4, 96, 64), b"\xff" * (4 * 96 * 34))}, "not finite"),
        ({"blk.0.attn_q.bias": None}, "unexpected"),
    ],
)
def test_tensors_that_fit_no_gpt_oss_are_named(write, tensors, reason):
    path = write(tensors)
    with pytest.raises(ModelFormatError, match=reason):
        load_model(path, "float32")


def test_experts_of_floats_are_the_same_model(folder, write):
    _, stored = gpt_oss_parts(folder)
    spec = read_model_spec(folder, "float32")
    parameters, floats = load_parameters(folder, spec), {}
    for index in range(2):
        gate, up = parameters[f"layers.{index}.experts.gate_up.weight"].dequantize().chunk(2, 1)
        floats |= {
            f"blk.{index}.ffn_{which}_exps.weight": (F32, tuple(part.shape), part.numpy().tobytes())
            for which, part in (("gate", gate), ("up", up))
        }
    assert floats.keys() <= stored.keys()
    logits = [whole_prompt_logits(load_model(model, "float32"), PROMPT) for model in (write(floats), folder)]
    assert torch.equal(*logits)


def test_answers_end_where_harmony_does_not_after_each_message(write):
    named = {"<|start|>": 3, "<|end|>": 3, "<|return|>": 3, "<|call|>": 3, "<|endoftext|>": 3, "<|message|>": 4}
    tokens = [*named, *(f"t{index}" for index in range(301 - len(named)))]
    tokenizer = {
        "tokenizer.ggml.tokens": ("string[]", tokens),
        "tokenizer.ggml.token_type": ("i32[]", [*named.values(), *[1] * (301 - len(named))]),
        "tokenizer.ggml.eos_token_id": ("u32", tokens.index("<|return|>")),
    }
    ends = read_model_spec(write(**tokenizer)).eos_token_ids
    assert {tokens[token_id] for token_id in ends} == {"<|return|>", "<|call|>", "<|endoftext|>"}
