"""A model that is little but a mixture of experts, natively and in f64; `check` runs in a process of each instruction set."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.kernels.native import load_native
from quire.model.build import build_model, whole_prompt_logits
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.native_decoder import NativeDecoder
from quire.quant.policy import QuantizationPolicy
from quire.quant.quantize import FINE_INT4, INT8
from tests.tiny_checkpoint import write_checkpoint

_LAYER = "model.layers.0."
_EPS = 1e-5
POLICIES = {"int8": QuantizationPolicy(INT8, None, None), "int4": QuantizationPolicy(FINE_INT4, None, None)}
# Of the range of the logits. f32: the order of sums. bf16: inputs are rounded to 8 bits in four places. Integers: weights of a
# row or group are rounded to 255 or 16 steps, and their inputs to 255.
BUDGETS = {("float32", None): 4e-6, ("bfloat16", None): 0.01, ("bfloat16", "int8"): 0.04, ("bfloat16", "int4"): 0.15}
# Experts, those of a token, their size, and the hidden size: around vectors of 16, and none of them even.
SHAPES = [(4, 2, 24, 32), (3, 3, 17, 40), (9, 1, 50, 32), (16, 5, 8, 72), (5, 2, 130, 48)]
COUNTS = (1, 2, 5, 16, 37)


def check() -> None:
    """Compare logits of every shape, dtype and number of tokens. Raises AssertionError."""
    for shape in SHAPES:
        for (dtype, quantization), budget in BUDGETS.items():
            with tempfile.TemporaryDirectory() as folder:
                _check_shape(Path(folder) / "model", shape, dtype, quantization, budget)


def _check_shape(folder: Path, shape: tuple[int, int, int, int], dtype: str, quantization: str | None, budget: float) -> None:
    tensors = _write(folder, *shape, dtype)
    spec = read_model_spec(folder)
    model = build_model(spec, open_parameters(folder, spec), 64, 16, quantization and POLICIES[quantization])
    assert isinstance(model, NativeDecoder)
    for count in COUNTS:
        ids = torch.randint(0, spec.vocab_size, (count,), generator=torch.Generator().manual_seed(count))
        want = _logits(tensors, ids, shape[0], shape[1])
        error = (whole_prompt_logits(model, ids.tolist()).double() - want).abs().max() / (want.max() - want.min())
        assert error <= budget, f"{load_native().isa()} {shape} {dtype} {quantization} {count} tokens: {error:.2e}"


def _write(folder: Path, num_experts: int, top_k: int, inner: int, hidden: int, dtype: str) -> dict[str, Tensor]:
    """Write a checkpoint of one layer whose attention gives nothing, and return its tensors."""
    sizes = {"num_experts": num_experts, "num_experts_per_tok": top_k, "moe_intermediate_size": inner, "hidden_size": hidden}
    write_checkpoint(folder, "qwen3_moe", seed=num_experts, num_hidden_layers=1, torch_dtype=dtype, **sizes)
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    tensors[f"{_LAYER}self_attn.o_proj.weight"].zero_()
    # Far apart, so that no rounding changes which experts a token meets.
    tensors[f"{_LAYER}mlp.gate.weight"] *= 4
    save_file(tensors, file, metadata={"format": "pt"})
    return {name: tensor.double() for name, tensor in tensors.items()}


def _logits(t: dict[str, Tensor], ids: Tensor, num_experts: int, top_k: int) -> Tensor:
    x = t["model.embed_tokens.weight"][ids]
    y = _norm(x, t[f"{_LAYER}post_attention_layernorm.weight"])
    shares, chosen = (y @ t[f"{_LAYER}mlp.gate.weight"].T).softmax(-1).topk(top_k)
    shares = shares / shares.sum(-1, keepdim=True)
    for row in range(len(ids)):
        for share, expert in zip(shares[row], chosen[row].tolist(), strict=True):
            gate, up, down = (t[f"{_LAYER}mlp.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            x[row] += share * (down @ (torch.nn.functional.silu(gate @ y[row]) * (up @ y[row])))
    return _norm(x, t["model.norm.weight"]) @ t["lm_head.weight"].T


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPS) * weight
