"""NativeDecoder: executes a ModelSpec with the native CPU kernels, all layers of a step in one call."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from quire.base.cpu_caches import largest_cache_bytes
from quire.base.errors import InvariantError
from quire.base.logging import get_logger
from quire.contracts.model_spec import LayerSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec
from quire.kernels.reference.attention import AttentionInput
from quire.kv.pool import KvPool
from quire.model.native_angles import NativeAngles
from quire.model.native_weights import InputForm, NativeWeight, WeightPacker, input_form
from quire.model.parameters import parameter_shapes
from quire.model.token_runs import TokenRuns
from quire.quant.parameters import Parameter, QuantizedStack, StoredParameter, load_parameter
from quire.quant.weight import QuantizedWeight

logger = get_logger(__name__)

_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
_KV_FORMATS = {torch.bfloat16: 0, torch.float32: 1, torch.int8: 2}
_FIRST_POSITIONS = 4096
"""Positions whose angles are computed at once at the start; the tables double when a longer sequence comes."""
_PROGRESS_DELAY_S = 3.0
_SHORT_FROM = 1 << 26
"""Weights of a model from which on no cache holds them, so that it is worth while to make bfloat16 shorter."""
_MAX_WINDOW = 2**31 - 1
"""A window of so many tokens is none: positions have 32 bits."""
_OWN_REFERENCES = 2
"""To an array that nobody else holds: the attribute, and the argument of the function that counts."""


def native_refusal(spec: ModelSpec, block_size: int) -> str | None:
    """Return why the native kernels cannot run a model, or None where they can."""
    if block_size % 16 != 0:
        return f"a block_size of {block_size} (choose a multiple of 16)"
    odd = {layer.attention.head_dim for layer in spec.layers if layer.attention.head_dim % 2}
    if odd:
        return f"heads of {min(odd)} values (an odd number)"
    return None


class NativeDecoder:
    """A decoder-only model in packed weights; the same results for a row whatever else is in the step.

    parameters     as `open_parameters` or `load_parameters` return them; emptied on the way, so that what is packed can go
    max_model_len  the longest sequence it will see; some rope scalings depend on it
    quantize       applied to every weight by its name just before it is packed, to an expert's on its own
    """

    def __init__(
        self,
        native: ModuleType,
        spec: ModelSpec,
        parameters: dict[str, Parameter | StoredParameter],
        max_model_len: int,
        quantize: Callable[[str, Tensor], Parameter] | None = None,
    ) -> None:
        self.spec = spec
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self._native = native
        self._parameters = parameters
        self._quantize = quantize
        self._max_model_len = max_model_len
        num_weights = sum(map(math.prod, parameter_shapes(spec).values()))
        self._packer = WeightPacker(native, self.dtype, is_short=num_weights >= _SHORT_FROM)
        ropes = {layer.attention.rope: None for layer in spec.layers if layer.attention.rope is not None}
        self._angles = [NativeAngles(rope, max_model_len, self.dtype) for rope in ropes]
        self._rope_index = {rope: index for index, rope in enumerate(ropes)}
        self._plan = native.Plan(spec.hidden_size, spec.vocab_size, self.dtype == torch.bfloat16, torch.get_num_threads())
        self._layers = self._build()
        self._kv: KvPool | None = None
        self._hidden_rows: list[int] = []
        self._num_kept = 0
        self._logits = np.empty(0, np.float32)
        self._process = os.getpid()
        if self._parameters:
            raise InvariantError(f"the native kernels left parameters unread: {sorted(self._parameters)[:8]}")

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights."""
        return self._packer.num_bytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the memory of the largest steps so far; `native_scratch.scratch_bytes` says how many there can be."""
        return self._plan.scratch_bytes

    def _build(self) -> list[Any]:
        spec, plan = self.spec, self._plan
        embedding = self._parameters["embed.weight"]
        embed = self._pack("embed")
        self.embedding = embed
        is_head_own = "lm_head.weight" in self._parameters and self._parameters["lm_head.weight"] is not embedding
        head = self._pack("lm_head") if is_head_own else embed
        self.head = head
        if not is_head_own:
            self._parameters.pop("lm_head.weight", None)
        del embedding
        scale = spec.embed_scale
        if spec.is_embed_scale_cast:
            scale = float(torch.tensor(scale, dtype=self.dtype))
        plan.set_embedding(embed, self._pack("pos") if spec.num_learned_positions else None, scale)
        plan.set_head(head, spec.logit_scale, spec.final_softcap or 0.0)
        self._set_norm(plan.final_norm, spec.final_norm, "final_norm", spec.hidden_size)
        layers = []
        numbered = enumerate(tqdm(spec.layers, "loading layers", delay=_PROGRESS_DELAY_S, disable=None, leave=False))
        for index, layer_spec in numbered:
            layers.append(self._build_layer(layer_spec, f"layers.{index}."))
            plan.add_layer(layers[-1])
        plan.finish()
        # Half of it: others use it, too.
        plan.is_near = 2 * self.weight_bytes <= largest_cache_bytes()
        self._extend_angles(_FIRST_POSITIONS)
        return layers

    def _pack(self, name: str, dtype: torch.dtype | None = None) -> NativeWeight:
        parameter = self._parameters.pop(f"{name}.weight")
        weight = parameter.open() if isinstance(parameter, StoredParameter) else parameter
        packed = self._packer.pack(self._quantized(f"{name}.weight", weight), self._vector(f"{name}.bias"), dtype)
        if isinstance(parameter, StoredParameter):
            parameter.give_back()
        return packed

    def _quantized(self, name: str, weight: Parameter) -> Tensor | QuantizedWeight:
        found = self._quantize(name, weight) if self._quantize is not None and isinstance(weight, Tensor) else weight
        if isinstance(found, QuantizedStack):
            raise TypeError(f"{name} is a stack of weights")
        return found

    def _vector(self, name: str) -> Tensor | None:
        """Return a bias or the weight of a norm, where there is one."""
        parameter = self._parameters.pop(name, None)
        found = None if parameter is None else load_parameter(parameter)
        if not isinstance(found, Tensor | None):
            raise TypeError(f"{name} is quantised")
        return found

    def _set_norm(self, norm: Any, spec: NormSpec | None, name: str, size: int) -> None:
        if spec is None:
            return
        weight, bias = (self._vector(f"{name}.{kind}") for kind in ("weight", "bias"))
        if weight is None:
            raise InvariantError(f"{name} has no weight")
        weight = weight.float().contiguous() + spec.offset
        bias = None if bias is None else bias.float().contiguous()
        norm.set(spec.kind == "layer", size, spec.eps, weight.data_ptr(), 0 if bias is None else bias.data_ptr())

    def _build_layer(self, spec: LayerSpec, prefix: str) -> Any:
        layer, attention, hidden = self._native.PlanLayer(), spec.attention, self.spec.hidden_size
        for name in ("attn_in", "attn_out", "mlp_in", "mlp_out"):
            self._set_norm(getattr(layer, name), getattr(spec, name), prefix + name, hidden)
        is_whole = attention.qk_norm_over == "all"
        for name, heads in (("q_norm", attention.num_heads), ("k_norm", attention.num_kv_heads)):
            size = attention.head_dim * (heads if is_whole else 1)
            self._set_norm(getattr(layer, name), attention.qk_norm, prefix + name, size)
        for name in ("q", "k", "v", "o"):
            setattr(layer, name, self._pack(prefix + name))
        layer.num_heads, layer.num_kv_heads, layer.head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        layer.scale, layer.window, layer.softcap = (
            attention.scale,
            min(attention.window or 0, _MAX_WINDOW),
            attention.softcap or 0.0,
        )
        layer.rope = -1 if attention.rope is None else self._rope_index[attention.rope]
        layer.is_qk_norm_whole, layer.residual_scale = is_whole, spec.residual_scale
        if isinstance(spec.mlp, MoeSpec):
            self._build_experts(layer, spec.mlp, prefix)
        else:
            self._build_mlp(layer, spec.mlp, prefix)
        return layer

    def _build_mlp(self, layer: Any, spec: MlpSpec, prefix: str) -> None:
        layer.set_activation(_ACTIVATIONS[spec.activation])
        for name in ("gate", "up", "down") if spec.is_gated else ("up", "down"):
            setattr(layer, name, self._pack(prefix + name))

    def _build_experts(self, layer: Any, spec: MoeSpec, prefix: str) -> None:
        layer.set_activation(_ACTIVATIONS[spec.expert.activation])
        layer.top_k, layer.is_renormalized = spec.top_k, spec.is_renormalized
        # Routing decides which weights a token meets: it is computed in f32.
        layer.router = self._pack(f"{prefix}router", torch.float32)
        inner = spec.expert.intermediate_size
        both = self._pack_experts(f"{prefix}experts.gate_up.weight", spec.num_experts, (0, inner, 2 * inner))
        down = self._pack_experts(f"{prefix}experts.down.weight", spec.num_experts, (0, self.spec.hidden_size))
        for parts in zip(both, down, strict=True):
            layer.add_expert(*parts[0], *parts[1])

    def _pack_experts(self, name: str, num_experts: int, cuts: tuple[int, ...]) -> list[list[NativeWeight]]:
        """Return the weights of every expert of a stack, its rows cut into several. All read their inputs in one form:
        where stored ones differ, they become dense."""
        stack, bytes_before = self._parameters.pop(name), self._packer.num_bytes
        packed: list[list[NativeWeight]] = []
        form: InputForm | None = None
        for index in range(num_experts):
            weight = self._quantized(name, _expert(stack, index))
            if index > 0 and input_form(weight) != form:
                break
            form = input_form(weight)
            packed.append(self._pack_rows(stack, index, weight, cuts))
        if len(packed) == num_experts:
            return packed
        logger.warning("the experts of a layer are quantised in different forms: they are kept in %s", self.spec.dtype)
        self._packer.num_bytes = bytes_before
        packed.clear()
        for index in range(num_experts):
            weight = _expert(stack, index)
            dense = weight if isinstance(weight, Tensor) else weight.dequantize(self.dtype)
            packed.append(self._pack_rows(stack, index, dense, cuts))
        return packed

    def _pack_rows(
        self, stack: Parameter | StoredParameter, index: int, weight: Tensor | QuantizedWeight, cuts: tuple[int, ...]
    ) -> list[NativeWeight]:
        # Gate and up of an expert are one job, which takes them to be alike.
        packed = [self._packer.pack(_rows(weight, start, stop), may_be_short=False) for start, stop in pairwise(cuts)]
        if isinstance(stack, StoredParameter):
            stack.give_back(index)
        return packed

    def _extend_angles(self, count: int) -> None:
        for index, angles in enumerate(self._angles):
            angles.extend(count)
            self._plan.set_angles(index, angles.cos.data_ptr(), angles.sin.data_ptr(), *angles.cos.shape)

    def _bind(self, kv: KvPool) -> None:
        if self._kv is kv:
            return
        for index, layer in enumerate(self._layers):
            scales = kv.scales[index] if kv.scales else (None, None)
            addresses = (0 if scale is None else scale.data_ptr() for scale in scales)
            layer.set_cache(
                _KV_FORMATS[kv.k[index].dtype], kv.spec.block_size, kv.k[index].data_ptr(), kv.v[index].data_ptr(), *addresses
            )
        self._kv = kv

    @property
    def plan(self) -> Any:
        """The native plan; `prepare` comes before a step of it."""
        return self._plan

    def prepare(self, kv: KvPool, longest: int) -> None:
        """Get ready for steps with these keys and values, and sequences of at most so many tokens."""
        if os.getpid() != self._process:
            raise InvariantError(
                "a model does not survive a fork, whose threads are gone: build it in the process that runs it"
            )
        self._bind(kv)
        for angles in self._angles:
            if longest > angles.count:
                self._extend_angles(max(longest, min(2 * angles.count, self._max_model_len)))
                break
        self._plan.num_threads = torch.get_num_threads()

    def step(
        self,
        token_ids: Tensor,
        positions: Tensor,
        step: AttentionInput,
        kv: KvPool,
        logit_rows: list[int],
        keeps_all: bool = False,
        hidden_rows: list[int] | None = None,
        layers: Sequence[int] | None = None,
    ) -> Tensor:
        """Compute the tokens of one step, store their KV, and return the logits [R, vocab_size] f32 of some rows.

        token_ids, positions  [T] i64, the sequences of the step one after the other
        logit_rows            R indices of tokens
        keeps_all             logits_at may ask for other rows before the next step
        hidden_rows           indices of other tokens, of which hidden_states may ask for some
        layers                the layers to run, in order; None: all. The KV of the others is left as it is
        """
        self.prepare(kv, max(step.context_lens))
        trees, kept = step.trees, None if layers is None else _int32(layers)
        starts, lengths = _int32(step.query_starts), _int32(step.context_lens)
        tables = torch.from_numpy(np.ascontiguousarray(step.block_tables.numpy(), dtype=np.int32))
        rows = _int32([*logit_rows, *(hidden_rows or ())])
        self._note_hidden_rows(hidden_rows, len(logit_rows), keeps_all)
        logits = self._new_logits(len(logit_rows))
        self._plan.step(
            token_ids.data_ptr(),
            positions.data_ptr(),
            step.slots.data_ptr(),
            token_ids.shape[0],
            len(step.context_lens),
            starts.data_ptr(),
            lengths.data_ptr(),
            tables.data_ptr(),
            tables.shape[1],
            rows.data_ptr(),
            rows.shape[0],
            len(logit_rows),
            keeps_all,
            logits.data_ptr(),
            *((0, 0) if trees is None else (trees.num_drafts.data_ptr(), trees.ancestors.data_ptr())),
            *((0, 0) if kept is None else (kept.data_ptr(), kept.shape[0])),
        )
        return logits

    def run(
        self,
        runs: TokenRuns,
        kv: KvPool,
        logit_rows: list[int],
        hidden_rows: list[int] | None = None,
        *,
        keeps_all: bool = False,
        wants_best: bool = False,
    ) -> tuple[Tensor, list[int] | None]:
        """As `step`, of runs of tokens; with wants_best also the best token of every row of logits, -1 where there is none."""
        self.prepare(kv, max(runs.ends))
        wanted = logit_rows if not hidden_rows else logit_rows + hidden_rows
        self._note_hidden_rows(hidden_rows, len(logit_rows), keeps_all)
        logits, trees = self._new_logits(len(logit_rows)), runs.trees
        places = () if trees is None else tuple(x.ctypes.data for x in (trees.positions, trees.num_drafts, trees.ancestors))
        best = self._plan.run(
            runs.token_ids,
            runs.starts,
            runs.ends,
            runs.addresses,
            len(runs.tables[0]),
            wanted,
            len(logit_rows),
            keeps_all,
            wants_best,
            logits.data_ptr(),
            *places,
        )
        return logits, best if wants_best else None

    def _note_hidden_rows(self, rows: list[int] | None, num_logit_rows: int, keeps_all: bool) -> None:
        """Note where hidden_states finds these rows: where they are, or behind those with logits."""
        count = len(rows or ())
        self._hidden_rows = rows or [] if keeps_all else list(range(num_logit_rows, num_logit_rows + count))

    def _new_logits(self, count: int) -> Tensor:
        """Return an uninitialised [count, vocab_size] f32, in the memory of the step before unless somebody still holds that:
        the system takes longer to find new pages than the head to fill them."""
        size = count * self.spec.vocab_size
        if self._logits.size < size or sys.getrefcount(self._logits) > _OWN_REFERENCES:
            self._logits = np.empty(size, np.float32)
        return torch.from_numpy(self._logits[:size]).view(count, self.spec.vocab_size)

    def keep_inputs(self, layers: tuple[int, ...]) -> None:
        """Keep the inputs of these layers, low to high, in every step from now on."""
        self._num_kept = len(layers)
        self._plan.keep_inputs(list(layers))

    def layer_inputs(self, rows: Sequence[int]) -> Tensor:
        """Return the kept inputs [R, layers * hidden_size] f32 of rows of the last step's tokens."""
        found = torch.empty(len(rows), self._num_kept * self.spec.hidden_size)
        self._plan.layer_inputs(list(rows), found.data_ptr())
        return found

    def move_tokens(self, kv: KvPool, sources: Tensor, targets: Tensor) -> None:
        """Copy the KV of the slots `sources` [N] i64 to `targets` in every layer, one after the other."""
        self._bind(kv)
        self._plan.move_tokens(sources.data_ptr(), targets.data_ptr(), len(sources))

    def logits_at(self, first: int, last: int) -> Tensor:
        """Return the logits [last - first, vocab_size] f32 of a run of rows of the last step, which kept all."""
        rows = torch.arange(first, last, dtype=torch.int32)
        logits = torch.empty(last - first, self.spec.vocab_size)
        self._plan.logits(rows.data_ptr(), len(rows), logits.data_ptr())
        return logits

    def hidden_states(self, first: int, last: int) -> Tensor:
        """Return the hidden states [last - first, hidden_size] f32, after the final norm, of a run of the last hidden_rows."""
        return self.final_states(self._hidden_rows[first:last])

    def final_states(self, places: Sequence[int]) -> Tensor:
        """Return the hidden states [R, hidden_size] f32, after the final norm, of rows of the last step: the indices of
        tokens where it kept all, else places in its logit_rows."""
        hidden = torch.empty(len(places), self.spec.hidden_size)
        self._plan.hidden_states(list(places), hidden.data_ptr())
        return hidden


def _int32(values: Sequence[int]) -> Tensor:
    """Return a list as an i32 tensor; by way of numpy, which takes a quarter of the time of torch.tensor."""
    return torch.from_numpy(np.array(values, dtype=np.int32))


def _expert(stack: Parameter | StoredParameter, index: int) -> Tensor | QuantizedWeight:
    if isinstance(stack, StoredParameter):
        return stack.open_expert(index)
    if isinstance(stack, QuantizedStack):
        return stack.weights[index]
    return stack[index] if isinstance(stack, Tensor) else stack


def _rows(weight: Tensor | QuantizedWeight, start: int, stop: int) -> Tensor | QuantizedWeight:
    return weight.rows(start, stop) if isinstance(weight, QuantizedWeight) else weight[start:stop]
