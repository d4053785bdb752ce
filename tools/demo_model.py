"""The demo models as PyTorch modules for training: Qwen3 and Qwen3-MoE decoders with Hugging Face parameter names."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB_SIZE = 4096
MAX_POSITIONS = 1024


@dataclass(frozen=True)
class Shape:
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    head_dim: int = 64
    num_experts: int = 0
    num_experts_per_tok: int = 2


SHAPES = {
    "demo": Shape(256, 8, 4, 2, 768),
    "demo-draft": Shape(128, 3, 2, 1, 384),
    "demo-moe": Shape(128, 3, 4, 2, 64, head_dim=32, num_experts=16),
}


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, 1e-6)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.groups = shape.num_attention_heads // shape.num_key_value_heads
        self.q_proj = linear(shape.hidden_size, shape.num_attention_heads * shape.head_dim)
        self.k_proj = linear(shape.hidden_size, shape.num_key_value_heads * shape.head_dim)
        self.v_proj = linear(shape.hidden_size, shape.num_key_value_heads * shape.head_dim)
        self.o_proj = linear(shape.num_attention_heads * shape.head_dim, shape.hidden_size)
        self.q_norm = RMSNorm(shape.head_dim)
        self.k_norm = RMSNorm(shape.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.head_dim).transpose(1, 2)

        def rotate(y: Tensor) -> Tensor:
            a, b = y.chunk(2, dim=-1)
            return y * cos + torch.cat((-b, a), dim=-1) * sin

        v = heads(self.v_proj(x))
        q = rotate(self.q_norm(heads(self.q_proj(x)))).to(v.dtype)
        k = rotate(self.k_norm(heads(self.k_proj(x)))).to(v.dtype)
        k, v = k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)
        # Whole score matrices: on a CPU their backward pass takes half the time of the fused attention's.
        future = torch.full((length, length), -torch.inf, dtype=q.dtype).triu(1)
        q, k, v = (q * self.head_dim**-0.5).flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        scores = torch.baddbmm(future, q, k.transpose(1, 2))
        with torch.autocast("cpu", enabled=False):
            y = (scores.softmax(-1) @ v).view(batch, -1, length, self.head_dim)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Moe(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.top_k = shape.num_experts_per_tok
        self.gate = linear(shape.hidden_size, shape.num_experts)
        self.experts = nn.ModuleList(Mlp(shape) for _ in range(shape.num_experts))
        self.balance_loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        probs = self.gate(flat).float().softmax(-1)
        weights, chosen = probs.topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat, dtype=torch.float32)
        for index, expert in enumerate(self.experts):
            rows, slots = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, rows, (expert(flat[rows]) * weights[rows, slots, None]).float())
        # Load balancing of Switch Transformers (arXiv 2101.03961), equation 4.
        share = F.one_hot(chosen, len(self.experts)).float().mean((0, 1))
        self.balance_loss = len(self.experts) * (share * probs.mean(0)).sum()
        return out.view_as(x)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size)
        self.mlp = Moe(shape) if shape.num_experts else Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class DemoModel(nn.Module):
    """A Qwen3 or Qwen3-MoE decoder with the parameter names of the Hugging Face checkpoint, less the `model.` prefix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.num_hidden_layers) if is_output else 0.02)
        angles = torch.arange(MAX_POSITIONS)[:, None] * 1e4 ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of `targets` [B, T] after `ids` [B, T], in nats."""
        return F.cross_entropy(self.logits(ids).flatten(0, 1), targets.flatten())

    def logits(self, ids: Tensor) -> Tensor:
        """Return the logits [B, T, vocab_size] f32 behind each of `ids` [B, T]."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])
        return F.linear(self.norm(x), self.embed_tokens.weight).float()

    def balance_loss(self) -> Tensor:
        losses = [layer.mlp.balance_loss for layer in self.layers if isinstance(layer.mlp, Moe)]
        return torch.stack(losses).mean() if losses else torch.zeros(())
