"""Tensors of GGUF files in the layout of a checkpoint, and files that do not fit their metadata."""

import mmap
import os

import numpy as np
import pytest
import torch

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.base.gguf_file import read_gguf
from quire.model.checkpoint import load_parameters, open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.gguf_tensors import open_gguf_tensors
from quire.quant.weight import QuantizedWeight, StoredWeight
from tests.gguf_writer import BF16, I8, Q4_0, Q4_K, Q8_0, write_gguf

HIDDEN_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, INNER, VOCAB_SIZE = 32, 4, 2, 8, 64, 5
METADATA = {
    "general.architecture": ("string", "llama"),
    "llama.block_count": ("u32", 1),
    "llama.embedding_length": ("u32", HIDDEN_SIZE),
    "llama.feed_forward_length": ("u32", INNER),
    "llama.context_length": ("u32", 64),
    "llama.attention.head_count": ("u32", NUM_HEADS),
    "llama.attention.head_count_kv": ("u32", NUM_KV_HEADS),
    "llama.attention.layer_norm_rms_epsilon": ("f32", 1e-5),
}
SHAPES = {
    "token_embd.weight": (VOCAB_SIZE, HIDDEN_SIZE),
    "blk.0.attn_norm.weight": (HIDDEN_SIZE,),
    "blk.0.attn_q.weight": (HIDDEN_SIZE, HIDDEN_SIZE),
    "blk.0.attn_k.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
    "blk.0.attn_v.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
    "blk.0.attn_output.weight": (HIDDEN_SIZE, HIDDEN_SIZE),
    "blk.0.ffn_norm.weight": (HIDDEN_SIZE,),
    "blk.0.ffn_gate.weight": (INNER, HIDDEN_SIZE),
    "blk.0.ffn_up.weight": (INNER, HIDDEN_SIZE),
    "blk.0.ffn_down.weight": (HIDDEN_SIZE, INNER),
    "output_norm.weight": (HIDDEN_SIZE,),
}


def make_tensors(changes=None):
    generator = np.random.default_rng(0)
    made = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    return {name: tensor for name, tensor in {**made, **(changes or {})}.items() if tensor is not None}


def write(tmp_path, changes=None, **metadata):
    return write_gguf(tmp_path / "model.gguf", {**METADATA, **metadata}, make_tensors(changes))


def load(path):
    return load_parameters(path, read_model_spec(path, "float32"))


def test_rows_of_q_and_k_rotate_halves(tmp_path):
    tensors = open_gguf_tensors(write(tmp_path))
    stored = make_tensors()
    for name, heads in (("q", NUM_HEADS), ("k", NUM_KV_HEADS)):
        weight = tensors[f"layers.0.self_attn.{name}_proj.weight"].load().numpy()
        pairs = stored[f"blk.0.attn_{name}.weight"].reshape(heads, HEAD_DIM // 2, 2, HIDDEN_SIZE)
        # Neighbours 2i and 2i + 1 of a head become i and i + half.
        halves = weight.reshape(heads, 2, HEAD_DIM // 2, HIDDEN_SIZE)
        assert np.array_equal(halves[:, 0], pairs[:, :, 0])
        assert np.array_equal(halves[:, 1], pairs[:, :, 1])
    assert np.array_equal(tensors["layers.0.self_attn.v_proj.weight"].numpy(), stored["blk.0.attn_v.weight"])


def test_rows_stay_where_they_are_in_qwen(tmp_path):
    metadata = {key.replace("llama", "qwen2"): item for key, item in METADATA.items()}
    path = write_gguf(tmp_path / "a.gguf", metadata | {"general.architecture": ("string", "qwen2")}, make_tensors())
    assert np.array_equal(open_gguf_tensors(path)["layers.0.self_attn.q_proj.weight"], make_tensors()["blk.0.attn_q.weight"])


def test_float_tensors_are_views_of_the_file(tmp_path):
    path = write(tmp_path)
    tensors = open_gguf_tensors(path)
    parameters = load(path)
    starts = {tensor.untyped_storage().data_ptr() for tensor in tensors.values() if isinstance(tensor, torch.Tensor)}
    assert len(starts) == 1
    assert starts.pop() % mmap.PAGESIZE == 0
    down = parameters["layers.0.down.weight"]
    assert down.untyped_storage().nbytes() == path.stat().st_size
    assert np.array_equal(down.numpy(), make_tensors()["blk.0.ffn_down.weight"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_read_bit_by_bit(tmp_path, dtype):
    values = torch.randn(INNER, HIDDEN_SIZE).to(getattr(torch, dtype))
    content = values.view(torch.int16).numpy().tobytes()
    path = write(tmp_path, {"blk.0.ffn_up.weight": (BF16 if dtype == "bfloat16" else 1, (INNER, HIDDEN_SIZE), content)})
    assert torch.equal(open_gguf_tensors(path)["layers.0.mlp.up_proj.weight"], values)


def q8_0(shape, seed=0):
    num_blocks = int(np.prod(shape)) // 32
    generator = np.random.default_rng(seed)
    scale = generator.standard_normal((num_blocks, 1)).astype(np.float16).view(np.uint8)
    return (Q8_0, shape, np.concatenate([scale, generator.integers(0, 256, (num_blocks, 32), np.uint8)], 1).tobytes())


def test_quantised_weights_are_unpacked_when_they_are_asked_for(tmp_path):
    path = write(tmp_path, {"blk.0.attn_q.weight": q8_0((32, 32)), "token_embd.weight": q8_0((5, 32))})
    stored = open_gguf_tensors(path)["layers.0.self_attn.q_proj.weight"]
    assert isinstance(stored, StoredWeight)
    assert stored.shape == (32, 32)
    assert isinstance(stored.load(), QuantizedWeight)
    parameters = load(path)
    assert isinstance(parameters["layers.0.q.weight"], QuantizedWeight)
    assert isinstance(parameters["embed.weight"], QuantizedWeight)


def test_formats_that_take_as_many_bytes_have_other_layouts(tmp_path):
    """The kernels that a layout needs are compiled ahead, and these two differ: one has offsets."""
    layouts = []
    for type_id in (Q4_0, Q4_K):
        wide = {f"blk.0.ffn_{name}.weight": np.zeros((256, HIDDEN_SIZE), np.float32) for name in ("gate", "up")}
        down = (type_id, (HIDDEN_SIZE, 256), bytes(HIDDEN_SIZE * 144))
        path = write(tmp_path, {**wide, "blk.0.ffn_down.weight": down}, **{"llama.feed_forward_length": ("u32", 256)})
        layouts.append(open_parameters(path, read_model_spec(path, "float32"))["layers.0.down.weight"].layout)
    assert layouts[0] != layouts[1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"blk.0.ffn_up.weight": None}, r"1 missing \(layers\.0\.mlp\.up_proj\.weight\)"),
        ({"output_norm.weight": None}, r"1 missing \(norm\.weight\)"),
        ({"blk.0.strange.weight": np.ones(3, np.float32)}, r"1 unexpected \(blk\.0\.strange\.weight\)"),
        ({"blk.1.attn_q.weight": np.ones((32, 32), np.float32)}, "1 unexpected"),
        ({"blk.0.ffn_up.weight": np.ones((INNER, 64), np.float32)}, r"up_proj\.weight has \[64, 64\], expected \[64, 32\]"),
        ({"blk.0.ffn_up.weight": q8_0((INNER, 64))}, r"up_proj\.weight has \[64, 64\], expected \[64, 32\]"),
        ({"blk.0.attn_norm.weight": np.ones(31, np.float32)}, r"input_layernorm\.weight has \[31\]"),
        ({"blk.0.attn_norm.weight": np.ones((32, 1), np.float32)}, r"input_layernorm\.weight has \[32, 1\]"),
        ({"blk.0.attn_norm.weight": (Q8_0, (32,), bytes(34))}, "fits nothing"),
        ({"blk.0.ffn_up.weight": np.ones((1, INNER, 32), np.float32)}, "fits nothing"),
        ({"blk.0.ffn_up.weight": np.ones((1, 1, INNER, 32), np.float32)}, "fits nothing"),
        ({"blk.0.attn_q.weight": np.ones((30, 32), np.float32)}, "30 rows, which are not 4 heads"),
        ({"blk.00.ffn_up.weight": np.ones((INNER, 32), np.float32)}, "twice"),
        ({"blk.0.ffn_gate_exps.weight": np.ones((2, INNER, 32), np.float32)}, "fits nothing"),
    ],
)
def test_tensors_that_do_not_fit_the_metadata_are_named(tmp_path, changes, reason):
    with pytest.raises(ModelFormatError, match=reason):
        load(write(tmp_path, changes))


def test_types_that_are_no_weights_are_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedError, match=r"blk\.0\.ffn_up\.weight.* I8"):
        load(write(tmp_path, {"blk.0.ffn_up.weight": (I8, (INNER, HIDDEN_SIZE), bytes(INNER * HIDDEN_SIZE))}))


def test_scales_that_are_not_finite_are_refused(tmp_path):
    content = b"\x00\x7c" + bytes(16)  # infinity
    with pytest.raises(ModelFormatError, match=r"blk\.0\.ffn_up\.weight.*not finite"):
        load(write(tmp_path, {"blk.0.ffn_up.weight": (Q4_0, (INNER, HIDDEN_SIZE), content * INNER)}))


def test_file_that_becomes_shorter_is_an_error_not_a_crash(tmp_path):
    path = write(tmp_path, {"blk.0.attn_q.weight": q8_0((32, 32))})
    stored = open_gguf_tensors(path)["layers.0.self_attn.q_proj.weight"]
    os.truncate(path, 4096)
    with pytest.raises(ModelFormatError, match="was changed while it was read"):
        stored.load()


def test_random_damage_of_the_header_is_refused_or_harmless(tmp_path):
    path = write(tmp_path, {"blk.0.attn_q.weight": q8_0((32, 32))})
    content = path.read_bytes()
    length = min(tensor.start for tensor in read_gguf(path).tensors.values())
    generator = np.random.default_rng(11)
    outcomes = set()
    for _ in range(150):
        damaged = bytearray(content)
        damaged[generator.integers(4, length)] ^= 1 << generator.integers(0, 8)
        path.write_bytes(damaged)
        try:
            load(path)
            outcomes.add("loaded")
        except (ModelFormatError, UnsupportedError):
            outcomes.add("refused")
    assert outcomes == {"loaded", "refused"}


def test_split_file_is_loaded_as_one(tmp_path):
    tensors = list(make_tensors().items())
    split = {"split.count": ("u16", 2), "split.tensors.count": ("i32", len(tensors))}
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    write_gguf(first, {**METADATA, **split, "split.no": ("u16", 0)}, dict(tensors[:4]))
    write_gguf(second, {**split, "split.no": ("u16", 1)}, dict(tensors[4:]))
    whole = load(write(tmp_path))
    parts = load(first)
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def experts_metadata():
    return {**METADATA, "llama.expert_count": ("u32", 3), "llama.expert_used_count": ("u32", 2)}


def test_stacked_and_single_experts_are_the_same_model(tmp_path):
    stacks = {which: np.random.default_rng(index).standard_normal((3, INNER, 32)) for index, which in enumerate(("gate", "up"))}
    stacks["down"] = np.random.default_rng(2).standard_normal((3, 32, INNER))
    stacks = {which: stack.astype(np.float32) for which, stack in stacks.items()}
    dense = dict.fromkeys(f"blk.0.ffn_{which}.weight" for which in stacks)
    router = {"blk.0.ffn_gate_inp.weight": np.random.default_rng(3).standard_normal((3, 32)).astype(np.float32)}
    stacked = {f"blk.0.ffn_{which}_exps.weight": stack for which, stack in stacks.items()}
    single = {f"blk.0.ffn_{which}.{i}.weight": stack[i] for which, stack in stacks.items() for i in range(3)}
    loaded = [
        load(write_gguf(tmp_path / f"{index}.gguf", experts_metadata(), make_tensors({**dense, **router, **experts})))
        for index, experts in enumerate((stacked, single))
    ]
    assert loaded[0].keys() == loaded[1].keys()
    assert all(torch.equal(loaded[0][name], loaded[1][name]) for name in loaded[0])
    gate_up = loaded[0]["layers.0.experts.gate_up.weight"].numpy()
    assert np.array_equal(gate_up, np.concatenate([stacks["gate"], stacks["up"]], 1))
    wrong = {**dense, **router, **stacked, "blk.0.ffn_up_exps.weight": stacks["up"][:2]}
    path = write_gguf(tmp_path / "wrong.gguf", experts_metadata(), make_tensors(wrong))
    with pytest.raises(ModelFormatError, match="fits nothing"):
        load(path)
