"""The memory that a model takes while it is loaded, measured by the system in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from quire.kernels.native import load_native
from quire.model.quantized_writer import write_quantized
from tests.gguf_writer import Q8_0, write_gguf
from tests.tiny_checkpoint import write_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(load_native() is None, reason="the native kernels are not built"),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what was in memory"),
]

OWN_BYTES = 72 << 20
"""What loading takes whatever the model: one weight on its way into the kernels' layout, and pages of the file that were read
and wait to be given back, of which there are more on a busy machine: 37 to 54 MiB on a quiet one, 57 on a busy one."""
SHAPE = {
    **{"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 3072},
    **{"num_hidden_layers": 6, "vocab_size": 20000, "tie_word_embeddings": True},
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "num_hidden_layers": 3}

CODE = """
import sys
from quire.contracts.config import EngineConfig
from quire.worker.build import build_runner

def status(field):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(field))

before = status("VmRSS")
runner, report = build_runner(EngineConfig(model=sys.argv[1], quantization=sys.argv[2] or None, num_kv_blocks=8))
print(status("VmHWM") - before, runner.executor.target.model.weight_bytes, report.memory.kv_bytes)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints of about 200 MB in bf16, written when they are first asked for; "wide": stored in f32."""
    made = {}

    def write(kind):
        folder = tmp_path_factory.mktemp(kind) / "model"
        if kind == "experts":
            return write_checkpoint(folder, "qwen3_moe", **SHAPE | EXPERTS, torch_dtype="bfloat16")
        if kind == "int4":
            return write_quantized(get("dense"), folder, "int4").folder
        if kind == "gguf":
            return write_blocks(folder.with_suffix(".gguf"), get("dense"))
        write_checkpoint(folder, "qwen3", **SHAPE, torch_dtype="float32" if kind == "wide" else "bfloat16")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
        return folder

    def get(kind):
        if kind not in made:
            made[kind] = write(kind)
        return made[kind]

    return get


def write_blocks(path, folder):
    """Write the layers of a checkpoint as a GGUF file of random bytes in blocks of Q8_0."""
    rng = np.random.default_rng(0)
    names = {"self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}
    names |= {f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"}
    names |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    tops = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer, _, module = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
        stored = tops.get(name) or f"blk.{layer}.{names[module]}.weight"
        if tensor.ndim == 1:
            tensors[stored] = tensor.float().numpy()
            continue
        blocks = rng.integers(0, 256, (tensor.numel() // 32, 34), dtype=np.uint8)
        blocks[:, :2] = np.frombuffer(np.float16(0.001).tobytes(), np.uint8)
        tensors[stored] = (Q8_0, tuple(tensor.shape), blocks.tobytes())
    keys = {"embedding_length": 1024, "block_count": 6, "feed_forward_length": 3072, "context_length": 256}
    keys |= {f"attention.{key}": 128 for key in ("key_length", "value_length")}
    keys |= {"attention.head_count": 8, "attention.head_count_kv": 4}
    metadata = {f"qwen3.{key}": ("u32", number) for key, number in keys.items()}
    metadata |= {"general.architecture": ("string", "qwen3"), "qwen3.attention.layer_norm_rms_epsilon": ("f32", 1e-5)}
    return write_gguf(path, metadata, tensors)


@pytest.mark.covering
@pytest.mark.parametrize("quantization", ["", "int8", "int4"])
@pytest.mark.parametrize("kind", ["dense", "wide", "experts"])
def test_peak_of_loading_is_near_the_packed_weights(folders, kind, quantization):
    check_peak(folders(kind), quantization)


@pytest.mark.parametrize("kind", [pytest.param("int4"), "gguf"])
def test_peak_of_loading_is_near_the_packed_weights_when_they_are_stored_quantised(folders, kind):
    check_peak(folders(kind), "")


def check_peak(path, quantization):
    command = [sys.executable, "-c", CODE, str(path), quantization]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, packed, kv = map(int, out.stdout.split())
    assert packed > 30 << 20
    assert peak <= 1.3 * packed + kv + OWN_BYTES, (peak >> 20, packed >> 20, kv >> 20)
