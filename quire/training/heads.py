"""The heads as modules: EAGLE-3, Medusa and multi-token prediction, their losses, and their file formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.model.families.sources import PRE_NORM_LAYER
from quire.model.heads.eagle import default_aux_hidden_state_layers
from quire.training.config import DraftTraining
from quire.training.mtp_layout import to_stored
from quire.training.target import Target, TargetRows
from quire.training.unrolled import DraftLayer, RmsNorm, Unrolled, Wanted, shifted


class Head(Protocol):
    """A head in training."""

    aux_hidden_state_layers: tuple[int, ...]

    def losses(self, token_ids: Tensor, rows: TargetRows) -> tuple[Tensor, list[Tensor]]:
        """Return the loss, and for each token ahead the share in which head and model agree on the most likely token."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to write, by name."""
        ...

    def config(self) -> dict[str, object]:
        """Return the contents of config.json."""
        ...


def _last_layer(target: Target) -> dict[str, Tensor | None]:
    """Return the parameters of the model's last layer, except its input norm: heads have it elsewhere, or twice."""
    prefix = f"layers.{len(target.spec.layers) - 1}."
    names = {key: name for key, name in PRE_NORM_LAYER.items() if key != "attn_in"}
    return {
        f"{name}.{part}": target.parameter(f"{prefix}{key}.{part}")
        for key, name in names.items()
        for part in ("weight", "bias")
    }


def _shape_config(target: Target) -> dict[str, object]:
    spec, layer = target.spec, target.spec.layers[-1]
    attention = layer.attention
    return {
        "hidden_size": spec.hidden_size,
        "intermediate_size": layer.mlp.intermediate_size,  # type: ignore[union-attr]
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.final_norm.eps,
        "rope_theta": attention.rope.theta,  # type: ignore[union-attr]
        "max_position_embeddings": spec.max_positions,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


class Eagle3Head(nn.Module):
    """EAGLE-3 (arXiv 2503.01840): a layer over three of the model's features and the next token."""

    def __init__(self, target: Target, options: DraftTraining, draft_ids: Tensor) -> None:
        super().__init__()
        spec = target.spec
        hidden, eps, num_layers = spec.hidden_size, spec.final_norm.eps, len(spec.layers)
        self.aux_hidden_state_layers = aux_hidden_state_layers(options, num_layers)
        self._options, self._shape, self._draft_ids = options, _shape_config(target), draft_ids
        self._num_steps = options.num_steps_ahead
        num_features = len(self.aux_hidden_state_layers)
        self.fc = nn.Linear(num_features * hidden, hidden, bias=False)
        self.midlayer = DraftLayer(spec, spec.layers[-1], 2 * hidden, has_qk_norm=False)
        self.midlayer.add_module(
            "hidden_norm", RmsNorm(hidden, eps, target.parameter(f"layers.{num_layers - 1}.attn_in.weight"))
        )
        self.midlayer.add_module("input_layernorm", RmsNorm(hidden, eps))
        self.norm = RmsNorm(hidden, eps, target.parameter("final_norm.weight"))
        self.lm_head = nn.Linear(hidden, len(draft_ids), bias=False)
        self.register_buffer("embedding", target.parameter("embed.weight"), persistent=False)
        start = _last_layer(target)
        start = {name: value for name, value in start.items() if "q_proj" not in name and "k_proj" not in name}
        self.midlayer.start_from(start)
        with torch.no_grad():
            self.lm_head.weight.copy_(target.head()[draft_ids])
            nn.init.normal_(self.fc.weight, std=0.2 * (num_features * hidden) ** -0.5)
            self.fc.weight[:, (num_features - 1) * hidden :] += torch.eye(hidden)

    def losses(self, token_ids: Tensor, rows: TargetRows) -> tuple[Tensor, list[Tensor]]:
        """See Head."""
        return _sum_losses(self.unroll(token_ids, rows.inputs), Wanted.of(rows.logits, self._draft_ids), 0.8)

    def unroll(self, token_ids: Tensor, inputs: Tensor) -> Iterator[Tensor]:
        """Yield the logits at each position [B, L, V'] with the model's features, then with the head's own."""
        past, g = Unrolled(), self.fc(inputs)
        for step in range(self._num_steps):
            e = self.midlayer.input_layernorm(F.embedding(shifted(token_ids, 1 + step), self.embedding))
            g = self.midlayer(g.float(), torch.cat((e, self.midlayer.hidden_norm(g)), -1), past)
            yield self.lm_head(self.norm(g))

    def tensors(self) -> dict[str, Tensor]:
        """See Head."""
        offsets = self._draft_ids - torch.arange(len(self._draft_ids))
        is_drafted = torch.zeros(int(self._shape["vocab_size"]), dtype=torch.bool)  # type: ignore[call-overload]
        is_drafted[self._draft_ids] = True
        return {**_half(self), "d2t": offsets, "t2d": is_drafted}

    def config(self) -> dict[str, object]:
        """See Head."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **self._shape,
            "target_hidden_size": self._shape["hidden_size"],
            "draft_vocab_size": len(self._draft_ids),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(self.aux_hidden_state_layers),
                "use_aux_hidden_state": True,
            },
            "num_speculative_tokens": self._num_steps,
        }


class MtpHead(nn.Module):
    """Multi-token prediction: a layer like the model's own over hidden state and next token; see mtp_layout.py.

    It is unrolled over its own normed outputs, as in drafting more than one token (FastMTP, arXiv 2509.18362).
    """

    def __init__(self, target: Target, options: DraftTraining) -> None:
        super().__init__()
        spec = target.spec
        hidden, eps, last = spec.hidden_size, spec.final_norm.eps, len(spec.layers) - 1
        self.aux_hidden_state_layers: tuple[int, ...] = ()
        self._shape, self._num_steps = _shape_config(target), options.num_steps_ahead
        self._has_qk_norm = spec.layers[-1].attention.qk_norm is not None
        self.pre_fc_norm_embedding = RmsNorm(hidden, eps)
        self.pre_fc_norm_hidden = RmsNorm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        attention = spec.layers[-1].attention
        layer = DraftLayer(spec, spec.layers[-1], hidden, self._has_qk_norm, attention.has_qkv_bias)
        layer.add_module("input_layernorm", RmsNorm(hidden, eps, target.parameter(f"layers.{last}.attn_in.weight")))
        layer.start_from(_last_layer(target))
        self.layers = nn.ModuleList([layer])
        self.norm = RmsNorm(hidden, eps, target.parameter("final_norm.weight"))
        self.register_buffer("embedding", target.parameter("embed.weight"), persistent=False)
        self.register_buffer("head", target.head(), persistent=False)
        with torch.no_grad():
            nn.init.normal_(self.fc.weight, std=0.5 * (2 * hidden) ** -0.5)
            self.fc.weight[:, hidden:] += torch.eye(hidden)

    def losses(self, token_ids: Tensor, rows: TargetRows) -> tuple[Tensor, list[Tensor]]:
        """See Head."""
        return _sum_losses(self.unroll(token_ids, rows.hidden), Wanted.of(rows.logits, None), 0.7)

    def unroll(self, token_ids: Tensor, hidden: Tensor) -> Iterator[Tensor]:
        """Yield the logits at each position [B, L, V] with the model's hidden states, then with the head's own."""
        past, layer = Unrolled(), self.layers[0]
        for step in range(self._num_steps):
            e = self.pre_fc_norm_embedding(F.embedding(shifted(token_ids, 1 + step), self.embedding))
            x = self.fc(torch.cat((e, self.pre_fc_norm_hidden(hidden)), -1)).float()
            hidden = self.norm(layer(x, layer.input_layernorm(x), past))
            yield F.linear(hidden, self.head)

    def tensors(self) -> dict[str, Tensor]:
        """See Head."""
        return to_stored(_half(self))

    def config(self) -> dict[str, object]:
        """See Head."""
        kind = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 1, **self._shape}
        kind |= {"qk_norm": self._has_qk_norm, "num_nextn_predict_layers": 1}
        return {**kind, "num_speculative_tokens": self._num_steps}


class MedusaHead(nn.Module):
    """Medusa-1 (arXiv 2401.10774): residual blocks over the last hidden state, each with its own output head."""

    def __init__(self, target: Target, options: DraftTraining, draft_ids: Tensor) -> None:
        super().__init__()
        hidden, count = target.spec.hidden_size, options.num_steps_ahead
        self.aux_hidden_state_layers: tuple[int, ...] = ()
        self._vocab_size, self._hidden_size, self._draft_ids = target.spec.vocab_size, hidden, draft_ids
        self.blocks = nn.ModuleList(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(hidden, hidden)])}) for _ in range(count))
        self.lm_heads = nn.ModuleList(nn.Linear(hidden, len(draft_ids), bias=False) for _ in range(count))
        with torch.no_grad():
            for block, head in zip(self.blocks, self.lm_heads, strict=True):
                block["layers"][0].weight.zero_()
                block["layers"][0].bias.zero_()
                head.weight.copy_(target.head()[draft_ids])

    def losses(self, token_ids: Tensor, rows: TargetRows) -> tuple[Tensor, list[Tensor]]:
        """See Head. Block i predicts the token 2 + i positions after the last token that was read."""
        return _sum_losses(self.head_logits(rows.hidden.float()), Wanted.of(rows.logits, self._draft_ids), 0.8)

    def head_logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """Yield the logits of each block at each position [B, L, V']."""
        for block, head in zip(self.blocks, self.lm_heads, strict=True):
            yield head(hidden + F.silu(block["layers"][0](hidden)))

    def tensors(self) -> dict[str, Tensor]:
        """See Head."""
        return {**_half(self), "token_map": self._draft_ids}

    def config(self) -> dict[str, object]:
        """See Head."""
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self._hidden_size,
            "vocab_size": self._vocab_size,
            "truncated_vocab_size": len(self._draft_ids),
            "num_heads": len(self.blocks),
            "num_hidden_layers": 1,
            "medusa_fc_bias": True,
            "torch_dtype": "bfloat16",
        }


def _sum_losses(head_logits: Iterator[Tensor], wanted: Wanted, decay: float) -> tuple[Tensor, list[Tensor]]:
    total, shares = torch.zeros(()), []
    for step, logits in enumerate(head_logits):
        loss, share = wanted.loss(logits, 1 + step)
        total = total + decay**step * loss
        shares.append(share)
    return total, shares


def _half(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().to(torch.bfloat16).contiguous() for name, parameter in module.named_parameters()}


def aux_hidden_state_layers(options: DraftTraining, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs a head with these options reads."""
    if options.kind != "eagle3":
        return ()
    return options.aux_hidden_state_layers or default_aux_hidden_state_layers(num_layers)


def build_head(target: Target, options: DraftTraining, draft_ids: Sequence[int]) -> Eagle3Head | MtpHead | MedusaHead:
    """Return the head to train, with initial weights."""
    ids = torch.tensor(draft_ids, dtype=torch.int64)
    if options.kind == "mtp":
        return MtpHead(target, options)
    return Eagle3Head(target, options, ids) if options.kind == "eagle3" else MedusaHead(target, options, ids)
