"""A decoder layer that is unrolled over its own outputs in training (Li et al., "EAGLE-3", arXiv 2503.01840)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.base.errors import UnsupportedError
from quire.contracts.model_spec import LayerSpec, MlpSpec, ModelSpec


class RmsNorm(nn.Module):
    """RMSNorm with a weight initialised to `initial`, or to one."""

    def __init__(self, size: int, eps: float, initial: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size) if initial is None else initial)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., size]; returns f32."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self._eps)


@dataclass(slots=True)
class Unrolled:
    """Keys and values of the steps so far, [B, heads, L, D] each."""

    keys: list[Tensor] = field(default_factory=list[Tensor])
    values: list[Tensor] = field(default_factory=list[Tensor])


class DraftLayer(nn.Module):
    """Attention and a gated feed-forward block of the shape of a model's layer, with Hugging Face parameter names.

    input_size  of the attention's input
    has_bias    whether q, k and v have a bias
    """

    def __init__(self, spec: ModelSpec, layer: LayerSpec, input_size: int, has_qk_norm: bool, has_bias: bool = False) -> None:
        super().__init__()
        attention, mlp = layer.attention, layer.mlp
        if not isinstance(mlp, MlpSpec) or not mlp.is_gated or mlp.activation != "silu" or attention.rope is None:
            raise UnsupportedError("draft heads are trained for models with rope and a SiLU-gated feed-forward block only")
        self.num_heads, self.num_kv_heads, self.head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        self.theta = attention.rope.theta
        self.self_attn = nn.Module()
        self.mlp = nn.Module()
        sizes = {
            "q_proj": (self.num_heads * self.head_dim, input_size),
            "k_proj": (self.num_kv_heads * self.head_dim, input_size),
            "v_proj": (self.num_kv_heads * self.head_dim, input_size),
            "o_proj": (spec.hidden_size, self.num_heads * self.head_dim),
        }
        inner = mlp.intermediate_size
        sizes |= {
            "gate_proj": (inner, spec.hidden_size),
            "up_proj": (inner, spec.hidden_size),
            "down_proj": (spec.hidden_size, inner),
        }
        for name, (outputs, inputs) in sizes.items():
            linear = nn.Linear(inputs, outputs, bias=has_bias and name in ("q_proj", "k_proj", "v_proj"))
            is_last = name in ("o_proj", "down_proj")
            nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * len(spec.layers)) if is_last else 0.02)
            (self.self_attn if name in ("q_proj", "k_proj", "v_proj", "o_proj") else self.mlp).add_module(name, linear)
        self.has_qk_norm = has_qk_norm
        eps = spec.final_norm.eps
        if has_qk_norm:
            self.self_attn.add_module("q_norm", RmsNorm(self.head_dim, eps))
            self.self_attn.add_module("k_norm", RmsNorm(self.head_dim, eps))
        self.post_attention_layernorm = RmsNorm(spec.hidden_size, eps)

    def forward(self, x: Tensor, attended: Tensor, past: Unrolled) -> Tensor:
        """Return the layer's output [B, L, H] in the next step of the unrolling.

        x         [B, L, H] the residual stream
        attended  [B, L, input_size] the attention's input, normed
        past      of the previous steps; this one's keys and values are added
        """
        x = x + self._attend(attended, past)
        y = self.post_attention_layernorm(x)
        return x + self.mlp.down_proj(F.silu(self.mlp.gate_proj(y)) * self.mlp.up_proj(y))

    def _attend(self, x: Tensor, past: Unrolled) -> Tensor:
        """Attend: a query of step j sees the keys of step 0 up to itself, and those of later steps at its own position."""
        num_sequences, length, _ = x.shape
        step = len(past.keys)
        cos, sin = self._angles(torch.arange(step, step + length))

        def heads(y: Tensor, norm: nn.Module | None) -> Tensor:
            y = y.view(num_sequences, length, -1, self.head_dim)
            y = (y if norm is None else norm(y)).transpose(1, 2).float()
            a, b = y.chunk(2, dim=-1)
            return y * cos + torch.cat((-b, a), dim=-1) * sin

        attention, has_norm = self.self_attn, self.has_qk_norm
        groups = self.num_heads // self.num_kv_heads
        q = heads(attention.q_proj(x), attention.q_norm if has_norm else None) * self.head_dim**-0.5
        k = heads(attention.k_proj(x), attention.k_norm if has_norm else None).repeat_interleave(groups, 1)
        v = attention.v_proj(x).view(num_sequences, length, -1, self.head_dim).transpose(1, 2).repeat_interleave(groups, 1)
        past.keys.append(k)
        past.values.append(v)
        future = torch.full((length, length), -torch.inf).triu(1)
        scores = [(q @ past.keys[0].transpose(-1, -2)).float() + future]
        scores += [(q * key).sum(-1, keepdim=True) for key in past.keys[1:]]
        weights = torch.cat(scores, dim=-1).softmax(-1)
        out = (weights[..., :length] @ past.values[0]).float()
        for index, value in enumerate(past.values[1:]):
            out = out + weights[..., length + index, None] * value
        return attention.o_proj(out.transpose(1, 2).flatten(2))

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = self.theta ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = positions[:, None] * frequencies
        return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def start_from(self, parameters: dict[str, Tensor | None]) -> None:
        """Initialise from a model's layer, where the shapes are equal.

        parameters  by their names in this module; of q, k and v they are copied to the last columns, which read the hidden
                    state
        """
        own = dict(self.named_parameters())
        with torch.no_grad():
            for name, given in parameters.items():
                if given is not None and name in own and given.shape[0] == own[name].shape[0]:
                    own[name][..., -given.shape[-1] :] = given


def shifted(x: Tensor, count: int) -> Tensor:
    """Return x [B, L, ...] shifted left by `count` positions; the end is filled by repeating the last position."""
    if count == 0:
        return x
    return torch.cat((x[:, count:], x[:, -1:].expand(-1, count, *x.shape[2:])), dim=1)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The labels of a head at each position.

    shares      [B, L, V] the model's probabilities of the tokens in the head's vocabulary
    best        [B, L] the most likely of them
    is_counted  [B, L] whether the head's vocabulary has the model's most likely token; other positions are ignored
    """

    shares: Tensor
    best: Tensor
    is_counted: Tensor

    @classmethod
    def of(cls, logits: Tensor, ids: Tensor | None) -> Wanted:
        """Return the labels from the model's logits [B, L, V], for a head with the vocabulary `ids`, None: all."""
        best = logits.argmax(-1)
        if ids is None:
            return cls(logits.softmax(-1), best, torch.ones_like(best, dtype=torch.bool))
        places = torch.full((logits.shape[-1],), -1)
        places[ids] = torch.arange(len(ids))
        return cls(logits[..., ids].softmax(-1), places[best], places[best] >= 0)

    def loss(self, logits: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
        """Return the mean cross-entropy of logits [B, L, V], where position i predicts the label at i + ahead, and the share of
        positions with the same most likely token."""
        length = logits.shape[1]
        is_counted = (torch.arange(length) < length - 1 - ahead) & shifted(self.is_counted, ahead)
        logits = logits.float()  # also for argmax, which takes five times as long in bfloat16
        losses = -(shifted(self.shares, ahead) * F.log_softmax(logits, -1)).sum(-1)
        count = is_counted.sum().clamp(min=1)
        is_same = (logits.detach().argmax(-1) == shifted(self.best, ahead)) & is_counted
        return (losses * is_counted).sum() / count, is_same.sum() / count
