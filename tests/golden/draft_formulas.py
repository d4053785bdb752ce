"""What heads that draft compute, written from their papers over a model of transformers: no cache, and nothing of quire.

A head stands at place i, reads features of the model there and the token i + 1, and says the token i + 2. Behind that it reads,
instead of features, what it made itself. Every pass is over the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

EPSILON, THETA = 1e-5, 10000.0
Weights = Mapping[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * weight


def rotated(x: Tensor) -> Tensor:
    """Return [T, N, D] with each pair (j, j + D / 2) turned by place * THETA ** (-2j / D), as complex numbers."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * THETA ** (-torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def attended(w: Weights, prefix: str, x: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """Return causal attention over all places, [T, H]."""

    def heads(name: str, count: int) -> Tensor:
        y = x @ w[f"{prefix}{name}_proj.weight"].T + w.get(f"{prefix}{name}_proj.bias", torch.zeros(()))
        y = y.unflatten(-1, (count, -1))
        norm = w.get(f"{prefix}{name}_norm.weight")
        return y if norm is None else rms_norm(y, norm)

    q, k, v = rotated(heads("q", num_heads)), rotated(heads("k", num_kv_heads)), heads("v", num_kv_heads)
    k, v = (y.repeat_interleave(num_heads // num_kv_heads, 1) for y in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    later = torch.arange(len(x))[:, None] < torch.arange(len(x))
    mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v)
    return mixed.flatten(1) @ w[f"{prefix}o_proj.weight"].T


def feed_forward(w: Weights, prefix: str, x: Tensor) -> Tensor:
    gate, up, down = (w[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


@dataclass(frozen=True)
class Model:
    """The model that is drafted for."""

    model: PreTrainedModel

    def states(self, tokens: list[int]) -> tuple[Tensor, ...]:
        """Return [T, H] of the inputs of every layer, and last what the final norm gives."""
        with torch.inference_mode():
            found = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return tuple(one[0].clone() for one in found)

    @property
    def embedding(self) -> Tensor:
        return self.model.get_input_embeddings().weight.detach()

    @property
    def output(self) -> Tensor:
        return self.model.get_output_embeddings().weight.detach()

    @property
    def num_heads(self) -> tuple[int, int]:
        return self.model.config.num_attention_heads, self.model.config.num_key_value_heads


Step = Callable[[Model, Weights, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(model, weights, embeddings' token ids [T], features [T, F]) -> logits [T, V], and the features that it makes itself."""


def eagle1(model: Model, w: Weights, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """arXiv 2401.15077: one layer without its first norm over the fused embedding and feature; the model's own output."""
    x = torch.cat((w["embed_tokens.weight"][ids], features), -1) @ w["fc.weight"].T + w["fc.bias"]
    x = x + attended(w, "layers.0.self_attn.", x, *model.num_heads)
    x = x + feed_forward(w, "layers.0.mlp.", rms_norm(x, w["layers.0.post_attention_layernorm.weight"]))
    return x @ model.output.T, x


def eagle3_of(layer: str, adds_normed: bool = False) -> Step:
    """arXiv 2503.01840: features of three layers made narrow; attention reads them beside the embedding, both normed."""

    def step(model: Model, w: Weights, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        width = model.embedding.shape[1]
        g = features @ w["fc.weight"].T if features.shape[1] > width else features
        e = w.get("embed_tokens.weight", model.embedding)[ids]
        normed = rms_norm(g, w[f"{layer}hidden_norm.weight"])
        both = torch.cat((rms_norm(e, w[f"{layer}input_layernorm.weight"]), normed), -1)
        x = (normed if adds_normed else g) + attended(w, f"{layer}self_attn.", both, *model.num_heads)
        x = x + feed_forward(w, f"{layer}mlp.", rms_norm(x, w[f"{layer}post_attention_layernorm.weight"]))
        said = rms_norm(x, w["norm.weight"]) @ w["lm_head.weight"].T
        logits = torch.full((len(ids), len(model.embedding)), float("-inf"))
        logits[:, torch.arange(len(w["d2t"])) + w["d2t"]] = said
        return logits, x

    return step


def multi_token(
    fuse: str, norms: tuple[str, str, str], layer: str, embedding: str = "", output: str = "", has_state_first: bool = False
) -> Step:
    """arXiv 2412.19437, 2.2: normed embedding and normed state, fused, one layer of the model's kind, the model's output."""

    def step(model: Model, w: Weights, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        of_embedding, of_state, last = norms
        e = w.get(embedding, model.embedding)[ids]
        both = rms_norm(e, w[of_embedding]), rms_norm(features, w[of_state])
        x = torch.cat(both[::-1] if has_state_first else both, -1) @ w[fuse].T
        x = x + attended(w, f"{layer}self_attn.", rms_norm(x, w[f"{layer}input_layernorm.weight"]), *model.num_heads)
        x = x + feed_forward(w, f"{layer}mlp.", rms_norm(x, w[f"{layer}post_attention_layernorm.weight"]))
        x = rms_norm(x, w[last])
        return x @ w.get(output, model.output).T, x

    return step


def draft_with_layer(model: Model, w: Weights, step: Step, taps: tuple[int, ...], tokens: list[int], count: int) -> list[int]:
    """Return the likeliest tokens, one by one, behind known ones; taps: layers whose inputs are read; none: the end."""
    states = model.states(tokens[:-1])
    features = torch.cat([states[layer] for layer in taps], -1) if taps else states[-1]
    drafted: list[int] = []
    for _ in range(count):
        logits, made = step(model, w, torch.tensor([*tokens[1:], *drafted]), features)
        if features.shape[1] > made.shape[1]:
            features = features @ w["fc.weight"].T
        features = torch.cat((features, made[-1:]))
        drafted.append(int(logits[-1].argmax()))
    return drafted


def draft_with_medusa(model: Model, w: Weights, stem: str, tokens: list[int], count: int) -> list[int]:
    """arXiv 2401.10774: head k, a residual block and an output, says the token k + 2 places behind the last state.

    The last token has no state yet.
    """
    state = model.states(tokens[:-1])[-1][-1]
    found: list[int] = []
    for index in range(count):
        block = F.silu(w[f"{stem}{index}.0.linear.weight"] @ state + w[f"{stem}{index}.0.linear.bias"])
        found.append(int((w[f"{stem}{index}.1.weight"] @ (state + block)).argmax()))
    return found


def draft_with_medusa_of_vllm(model: Model, w: Weights, tokens: list[int], count: int) -> list[int]:
    """The same as vLLM stores it: blocks of several layers, and outputs for the tokens of `token_map`, or for all, of which
    these are taken."""
    state = model.states(tokens[:-1])[-1][-1]
    said = w["token_map"]
    found: list[int] = []
    for index in range(count):
        x = state
        for layer in range(sum(name.startswith(f"blocks.{index}.layers.") and name.endswith(".weight") for name in w)):
            x = x + F.silu(w[f"blocks.{index}.layers.{layer}.weight"] @ x + w[f"blocks.{index}.layers.{layer}.bias"])
        output = w[f"lm_heads.{index}.weight"]
        output = output[said] if len(output) > len(said) else output
        found.append(int(said[(output @ x).argmax()]))
    return found
