"""FusedLayer: a layer of a decode step of few sequences as five fused kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quire.contracts.model_spec import NO_ATTENTION, NO_MLP, LayerSpec, MlpSpec, MoeSpec, SharedBlockSpec
from quire.kernels.reference.activation import ACTIVATIONS
from quire.kernels.triton.attention import KvCache
from quire.kernels.triton.fused_attention import ProjectedAttention
from quire.kernels.triton.fused_linear import FEW_TOKENS, Epilogue, fused_linear_launch
from quire.kernels.triton.fused_quantized import MOST_TOKENS, fused_quantized_launch, reason_not_to_fuse_weight
from quire.kernels.triton.norm import Norm, add_and_normalize, normalize, normalize_unweighted
from quire.kernels.triton.quantized_weights import DeviceQuantizedWeight
from quire.kernels.triton.step import DeviceAttentionMetadata
from quire.model.device_linear import DeviceLinear, DeviceWeight
from quire.model.device_ranks import LayerRanks


def reason_not_to_fuse(
    spec: LayerSpec,
    linears: Mapping[str, DeviceLinear],
    ranks: LayerRanks | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> str | None:
    """Return the feature of a layer that fused kernels do not support; None if it can be fused. dtype: of its inputs."""
    if any(linear.is_in_order for linear in linears.values()):
        return "sums in one order at any number of rows"
    if spec.mixer is not None or spec.attention == NO_ATTENTION or spec.mlp == NO_MLP:
        return "a recurrent state, or one block only"
    if spec.attention.latent is not None:
        return "multi-head latent attention"
    if spec.per_layer_gate is not None or spec.has_scale:
        return "per-layer inputs or a factor on the output"
    if spec.attention.kv_source is not None or spec.attention.is_v_from_k or spec.attention.v_norm is not None:
        return "values that are normalised, or keys and values of another layer"
    if spec.attention.has_output_gate:
        return "a gate on the output of attention"
    if not isinstance(spec.mlp, MlpSpec):
        return "a mixture of experts"
    if spec.mlp.gate_scale != 1.0 or spec.mlp.down_scale != 1.0 or spec.mlp.clamp is not None:
        return "a feed-forward block with factors or a clamped gate"
    if spec.is_parallel:
        return "blocks in parallel"
    if spec.mlp.activation == "xielu":
        return "xielu"
    if spec.attention.query_scaling is not None:
        return "queries that are scaled by position"
    if spec.attention.clip_qkv is not None:
        return "clipped q, k and v"
    if spec.attention.qk_norm is not None and (spec.attention.is_qk_norm_last or spec.attention.qk_norm_over == "each"):
        return "a norm of heads after the rotation, or of each head"
    if spec.attention.has_sinks or spec.attention.alibi_slopes:
        return "attention sinks or ALiBi"
    if spec.attention.block_indexer is not None:
        return "an indexer of blocks of keys"
    if not spec.attention.has_plain_values:
        return "values that are smaller than keys, or scaled"
    if spec.attn_out is not None or spec.mlp_out is not None:
        return "a norm after attention or the feed-forward block"
    if any(norm is not None and norm.kind != "rms" for norm in (spec.attn_in, spec.mlp_in, spec.attention.qk_norm)):
        return "a norm that is no RMSNorm"
    if spec.attention.qk_norm is not None and spec.attention.qk_norm_over == "all":
        return "a norm over all heads"
    for name, linear in linears.items():
        quantised = [part for part in linear.parts if isinstance(part, DeviceQuantizedWeight)]
        if len(linear.parts) > 1 and (name != "qkv" or len(quantised) < len(linear.parts)):
            return "quantised weights beside others of the same input"
        reason = next((found for part in quantised if (found := reason_not_to_fuse_weight(part, dtype)) is not None), None)
        if reason is not None:
            return reason
    if ranks is not None and ranks.context is not None:
        return "keys on several ranks"
    if ranks is not None and not ranks.row_parallel >= {"o", "down"}:
        return "weights cut by their outputs"
    return None


def describe_fusion(num_layers: int, reasons: Counter[str], most_sequences: int, num_launches: int) -> str:
    """Return which layers of a model are fused, for the log; reasons: of those that are not."""
    fused = f"{num_layers - reasons.total()} of {num_layers} layers are {num_launches} launches each in decode steps"
    others = "".join(f"; {count} are not, as they have {reason}" for reason, count in reasons.items())
    return f"{fused} of up to {most_sequences} sequences{others}"


class LayerTail:
    """What some layers do after their blocks: add per-layer inputs, and multiply by a learned number (Gemma 4).

    own          the layer's dense parameters
    is_in_order  batch-invariant: a row has the same bits for any number of rows
    """

    def __init__(self, spec: LayerSpec, own: Mapping[str, Tensor], is_in_order: bool) -> None:
        self._gate_spec, self._scale = spec.per_layer_gate, own["layer_scale.weight"] if spec.has_scale else None
        if spec.per_layer_gate is not None:
            self._gate = DeviceLinear((own["per_layer.gate.weight"],), None, is_in_order)
            self._up = DeviceLinear((own["per_layer.up.weight"],), None, is_in_order)
            self._norm = Norm(spec.per_layer_gate.norm, own["per_layer.norm.weight"])

    def finish(self, x: Tensor, inputs: Tensor | None) -> None:
        """Change the residual stream x [T, hidden_size] in place; inputs: the layer's per-layer inputs [T, size]."""
        if self._gate_spec is not None and inputs is not None:
            gated = ACTIVATIONS[self._gate_spec.activation](self._gate(x)) * inputs
            add_and_normalize(x, self._up(gated), None, self._norm)
        if self._scale is not None:
            x.mul_(self._scale)


class ExpertBranches:
    """What a mixture reads and gives next to a shared expert of its own branch; see MoeSpec.branch_norm (Gemma 4)."""

    def __init__(self, spec: MoeSpec, own: Mapping[str, Tensor]) -> None:
        assert spec.branch_norm is not None
        names = ("experts_in", "experts_out", "shared_out")
        self._experts_in, self._experts_out, self._shared_out = (Norm(spec.branch_norm, own[f"{n}.weight"]) for n in names)
        self._norm, self._factors = spec.branch_norm, own["router_in.weight"]

    def inputs(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the router and the experts read, [T, hidden_size] each."""
        routed = normalize_unweighted(residual, self._norm).to(residual.dtype) * self._factors * residual.shape[-1] ** -0.5
        return routed, normalize(residual, self._experts_in)

    def join(self, shared: Tensor, experts: Tensor) -> Tensor:
        """Return the sum of both branches, each normalised."""
        return normalize(shared, self._shared_out) + normalize(experts, self._experts_out)


Adapted = Callable[[Tensor, Tensor, str], Tensor]
"""(the output of a linear layer, its input, its name) -> the output with what LoRA adapters add."""


class SharedBlock:
    """What a layer has of its own beside a block whose weights other layers share; see SharedBlockSpec (Zamba 2).

    own  the layer's dense parameters: low-rank adapters of linear layers, block_out and the norm of the mixer's input
    """

    def __init__(self, spec: SharedBlockSpec, own: Mapping[str, Tensor], is_in_order: bool) -> None:
        def linear(name: str) -> DeviceLinear:
            return DeviceLinear((own[f"{name}.weight"],), None, is_in_order)

        self._mixer_in, self._out = Norm(spec.mixer_in, own["mixer_in.weight"]), linear("block_out")
        self._adapters = {
            joined: [
                tuple((part, linear(part)) for part in (f"adapters.{name}_in", f"adapters.{name}_out"))
                for name in names
                if f"adapters.{name}_in.weight" in own
            ]
            for joined, names in (("qkv", ("q", "k", "v")), ("gate_up", ("gate", "up")))
        }

    def adapt(self, out: Tensor, x: Tensor, name: str, adapted: Adapted) -> None:
        """Add to the output of a linear layer, of one or several parts of its rows, what their adapters make of its input."""
        parts: list[Tensor] = []
        for low_rank in self._adapters.get(name, ()):
            y = x
            for part, linear in low_rank:
                y = adapted(linear(y), y, part)
            parts.append(y)
        if parts:
            out.add_(torch.cat(parts, 1))

    def mixer_input(self, x: Tensor, block: Tensor, adapted: Adapted) -> Tensor:
        """Return what the mixer reads, given the residual and the output of the block."""
        return normalize(x + adapted(self._out(block), block, "block_out"), self._mixer_in)


_NARROW_COLUMNS = 2048
"""Hidden size up to which more than MOST_TOKENS tokens are fused. With 16 tokens a step of Qwen3-8B's shapes (4,096) took an
H200 6.6 ms fused and 5.9 ms by separate kernels, one of Qwen3-0.6B's (1,024) 1.74 and 1.93 ms; between them none was timed."""


class FusedLayer:
    """Norm and q, k, v; attention; its output and the residual; norm, gate, up and activation; down and the residual.

    Quantised weights of q, k and v that are of different kinds are one launch each.

    linears    qkv, o, gate_up and down; `reason_not_to_fuse` has none against them
    norms      before attention, and before the feed-forward block
    attention  with its rope and the norms of q and k
    ranks      of tensor parallelism: o and down give partial sums, each of which one more launch adds to the residual stream
    """

    def __init__(
        self,
        spec: LayerSpec,
        linears: Mapping[str, DeviceLinear],
        norms: tuple[Norm | None, Norm | None],
        attention: ProjectedAttention,
        ranks: LayerRanks | None = None,
    ) -> None:
        assert isinstance(spec.mlp, MlpSpec)
        self._attn_in, self._mlp_in = norms
        self._attention, self._ranks, self._residual_scale = attention, ranks, spec.residual_scale
        self._weights = {name: linear.parts for name, linear in linears.items()}
        self._qkv_width = sum(part.shape[0] for part in linears["qkv"].parts)
        is_quantised = any(isinstance(part, DeviceQuantizedWeight) for linear in linears.values() for part in linear.parts)
        is_wide = linears["qkv"].parts[0].shape[1] > _NARROW_COLUMNS
        self.most_tokens = MOST_TOKENS if is_quantised or is_wide else FEW_TOKENS
        self._attention_width = spec.attention.num_heads * spec.attention.head_dim
        self._inner_width = spec.mlp.intermediate_size
        scale = spec.residual_scale if ranks is None else None
        self._epilogues = {
            "qkv": Epilogue(linears["qkv"].bias),
            "o": Epilogue(linears["o"].bias, residual_scale=scale),
            "gate_up": Epilogue(linears["gate_up"].bias, spec.mlp.activation, spec.mlp.is_gated),
            "down": Epilogue(linears["down"].bias, residual_scale=scale),
        }

    def forward(self, x: Tensor, positions: Tensor, step: DeviceAttentionMetadata, cache: KvCache) -> None:
        """Change the residual stream x [S, hidden_size], in one piece, in place.

        positions  [S] i64; step is a decode step of at most `most_tokens` sequences
        """
        qkv = self._new(x, self._qkv_width)
        self._multiply("qkv", qkv, x, self._attn_in)
        attended = self._new(x, self._attention_width)
        self._attention.launch(attended, qkv, cache, step, positions).run()
        self._add("o", x, attended)
        inner = self._new(x, self._inner_width)
        self._multiply("gate_up", inner, x, self._mlp_in)
        self._add("down", x, inner)

    def _add(self, name: str, x: Tensor, rows: Tensor) -> None:
        """Add a product to the residual stream."""
        if self._ranks is None:
            self._multiply(name, x, rows)
            return
        part = torch.empty_like(x)
        self._multiply(name, part, rows)
        self._ranks.add_sum(x, part, self._residual_scale)

    def _multiply(self, name: str, out: Tensor, x: Tensor, norm: Norm | None = None) -> None:
        parts, epilogue = self._weights[name], self._epilogues[name]
        if len(parts) == 1:
            self._launch(parts[0], out, x, norm, epilogue)
            return
        sizes = [part.shape[0] for part in parts]  # of q, k and v, whose only epilogue is a bias
        biases = [None] * len(sizes) if epilogue.bias is None else epilogue.bias.split(sizes)
        for part, columns, bias in zip(parts, out.split(sizes, 1), biases, strict=True):
            self._launch(part, columns, x, norm, Epilogue(bias))

    def _launch(self, weight: DeviceWeight, out: Tensor, x: Tensor, norm: Norm | None, epilogue: Epilogue) -> None:
        if isinstance(weight, DeviceQuantizedWeight):
            fused_quantized_launch(out, x, weight, norm, epilogue).run()
        else:
            fused_linear_launch(out, x, weight, norm, epilogue).run()

    def _new(self, x: Tensor, width: int) -> Tensor:
        return torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
