"""NativeDecoder: executes a ModelSpec with the native CPU kernels, all layers of a step in one call."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.base.errors import ConfigError, InvariantError
from quire.contracts.expert_options import MAX_EXPERT_BIAS, LossyRouting
from quire.contracts.kv_spec import KvDtype
from quire.contracts.model_spec import ModelSpec, RopeSpec
from quire.kernels.reference.attention import AttentionMetadata
from quire.kernels.reference.recurrent import StateRows
from quire.kernels.reference.rope import cos_sin, inverse_frequencies
from quire.kv.pool import KvPool
from quire.model.lora.native_adapters import NativeAdapters
from quire.model.native_experts import PackedExpert
from quire.model.native_model import NativeModelBuilder
from quire.model.native_weights import NativeWeight
from quire.model.tensor_shards import ContextPlace, ExpertShard, RankGroup
from quire.model.token_runs import TokenRuns
from quire.parallel.expert_placement import ExpertPlacement
from quire.quant.parameters import DenseOrQuantized, Parameter, StoredParameter


class PlanMirror(Protocol):
    """Sends calls other than steps of `run` from rank 0 of a tensor-parallel group to the other ranks."""

    def call_logits(self, rows: Sequence[int], run: Callable[[], None]) -> None:
        """Call `run`, which computes logits of rows that the last step kept, while all other ranks do the same."""
        ...

    def call_one_token(self, call: Any, run: Callable[[], None]) -> None:
        """Call `run`, which does what OneTokenSteps.run_call does with `call`, while all other ranks do the same."""
        ...


_KV_FORMATS: dict[KvDtype, int] = {"bfloat16": 0, "float32": 1, "int8": 2, "turboquant_4bit": 3, "k8v4": 4, "fp8": 5}
"""KvFormat in csrc/attention.h."""
_RUN = 16
"""Tokens that the layout of the cache keeps together, RUN in csrc/attention.h."""
_FIRST_POSITIONS = 4096
"""Positions whose angles are computed at start; the tables double for longer sequences."""
_UNUSED = 1
"""A nonzero address for logits that are computed, but not stored on this rank."""
_OWN_REFERENCES = 2
"""References to an unshared array: the attribute, and the argument of the counting function."""


class NativeDecoder:
    """A decoder-only model with packed weights. Batch-invariant: a row's results do not depend on the rest of the step.

    parameters     as `open_parameters` or `load_parameters` return them; emptied during packing, so that packed weights are
                   freed
    max_model_len  the longest sequence; some rope scalings depend on it
    quantize       applied to every weight by its name just before it is packed, to each expert separately
    group          the tensor-parallel group of this rank; None: it has the whole model. Every rank must make the same
                   calls of `run`, `step` and `logits_at`; only rank 0 gets results
    rope_switch_len  where spec has a part of the layers only, that of the whole model (see ModelSpec.rope_switch_len), 0: none.
                   None: that of spec
    """

    def __init__(
        self,
        native: ModuleType,
        spec: ModelSpec,
        parameters: dict[str, Parameter | StoredParameter],
        max_model_len: int,
        quantize: Callable[[str, Tensor], DenseOrQuantized] | None = None,
        group: RankGroup | None = None,
        rope_switch_len: int | None = None,
    ) -> None:
        self.spec = spec
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self._max_model_len = max_model_len
        ropes = {layer.attention.rope: None for layer in spec.layers if layer.attention.rope is not None}
        switch_len = spec.rope_switch_len(max_model_len) or 0 if rope_switch_len is None else rope_switch_len
        self._angles = [NativeAngles(rope, max_model_len, self.dtype, switch_len) for rope in ropes]
        self._plan = native.Plan(spec.hidden_size, spec.vocab_size, self.dtype == torch.bfloat16, torch.get_num_threads())
        rope_index = {rope: index for index, rope in enumerate(ropes)}
        self._group = group
        self.mirror: PlanMirror | None = None
        # The other ranks of a group write their logits into rank 0's memory, and get none.
        self._gives_results = group is None or group.gives_results
        if group is not None:
            shard, rows = group.shard, group.division
            if shard is not None:
                first_output = shard.vocabulary.start
                self._plan.set_rank_group(group.barrier_address, shard.rank, shard.size, first_output, group.rows_file)
            if rows is not None:
                self._plan.divide_rows(rows.barrier_address, rows.rank, rows.size, rows.rows_file)
            if group.context is not None and group.home_size:
                self._plan.set_homes(group.home_size, group.context.num_local_blocks)
            elif group.context is not None:
                self._plan.set_context(group.context.place, group.context.size, group.context.num_local_blocks)
            if group.exchange is not None:
                self._plan.set_exchange(group.exchange)
        self._parts = self._builder(native, self._plan, spec, parameters, rope_index, quantize).build()
        own_shard = None if group is None else group.shard
        self.adapters = NativeAdapters(native, self._plan, spec, own_shard)
        self._extend_angles(_FIRST_POSITIONS)
        self._kv: KvPool | None = None
        self._hidden_rows: list[int] = []
        self._num_kept = 0
        self._rows_out = ReusedRows()
        self._logits = np.empty(0, np.float32)
        self._no_logits = torch.empty(0, spec.vocab_size)
        self._process = os.getpid()

    def _builder(self, *args: Any) -> NativeModelBuilder:
        """Return what makes the plan; args: see NativeModelBuilder."""
        if self._group is None:
            return NativeModelBuilder(*args)
        return NativeModelBuilder(*args, shard=self._group.shard, has_whole_vocabulary=self._group.has_whole_vocabulary)

    @property
    def context(self) -> ContextPlace | None:
        """The place of this rank among those that share the tokens of sequences, or are homes; None: it has all tokens."""
        return None if self._group is None else self._group.context

    @property
    def is_sharded(self) -> bool:
        """Whether this rank has a shard of the model."""
        return self._group is not None and self._group.shard is not None

    @property
    def embedding(self) -> NativeWeight:
        """The rows of the vocabulary."""
        if self._parts.embedding is None:
            raise InvariantError("this pipeline stage has no embedding")
        return self._parts.embedding

    @property
    def head(self) -> NativeWeight:
        """The LM head; the embedding if they are tied."""
        if self._parts.head is None:
            raise InvariantError("this pipeline stage has no LM head")
        return self._parts.head

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights."""
        return self._parts.weight_bytes

    @property
    def spared_bytes(self) -> int:
        """Bytes of the LM head, which greedy steps do not read: they read its int8 copy."""
        return self.head.num_bytes - self._parts.int8_head_bytes if self._parts.int8_head_bytes else 0

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the memory of the largest steps so far; `native_scratch.scratch_bytes` says how many there can be."""
        return self._plan.scratch_bytes

    def _extend_angles(self, count: int) -> None:
        for index, angles in enumerate(self._angles):
            angles.extend(count)
            self._plan.set_angles(index, angles.cos.data_ptr(), angles.sin.data_ptr(), *angles.cos.shape)

    @property
    def num_angles(self) -> int:
        """Rows of the tables of angles before those of the short variant of a rope, see NativeAngles; `prepare` changes it."""
        return self._angles[0].count if self._angles else 0

    def _bind(self, kv: KvPool) -> None:
        if self._kv is kv:
            return
        for index, layer in enumerate(self._parts.layers):
            source = self.spec.layers[index].attention.kv_source
            source = index if source is None else source
            scales = kv.scales[source] if kv.scales else (None, None)
            addresses = (0 if scale is None or scale.numel() == 0 else scale.data_ptr() for scale in scales)
            layer.set_cache(
                _KV_FORMATS[kv.spec.dtype_of(source)],
                kv.spec.block_size,
                kv.k[source].data_ptr(),
                kv.v[source].data_ptr(),
                *addresses,
                bool(kv.spec.is_windowed) and kv.spec.is_windowed[source],
            )
            if kv.states and layer.mixer is not None:
                inputs, *states = kv.states[index]
                is_bf16 = inputs.dtype == torch.bfloat16
                layer.mixer.set_states(inputs.data_ptr(), is_bf16, states[0].data_ptr() if states else 0)
        self._kv = kv

    @property
    def dense_stacks(self) -> frozenset[str]:
        """See NativeParts."""
        return self._parts.dense_stacks

    def place_experts(self, layer: int, added: Mapping[int, PackedExpert], placement: ExpertPlacement, rank: int) -> None:
        """Give this rank other experts of a layer, between two steps; added: those that it gets."""
        own = ExpertShard.of(placement, rank)
        experts = [(expert, *weights) for expert, weights in added.items()]
        self._plan.place_experts(layer, experts, list(own.num_copies), list(own.own_copies))

    def use_lossy_routing(self, lossy: LossyRouting) -> None:
        """Change how experts are chosen. Raises ConfigError where the model's routing does not allow it."""
        try:
            self._plan.set_lossy_routing(lossy.capacity_factor, lossy.bias_rate, MAX_EXPERT_BIAS, lossy.min_share)
        except ValueError as error:
            raise ConfigError(
                f"expert_capacity_factor, expert_bias_rate and expert_min_share: {error}; leave them out"
            ) from error

    @property
    def plan(self) -> Any:
        """The native plan; call `prepare` before a step of it."""
        return self._plan

    def prepare(self, kv: KvPool, longest: int) -> None:
        """Prepare for steps with these keys and values, and sequences of at most this many tokens."""
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
        step: AttentionMetadata,
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
        layers                the layers to run, in order; None: all. The KV of the others is unchanged
        """
        self.prepare(kv, max(step.context_lens))
        if step.short_ropes is not None:
            positions = positions + step.short_ropes * self.num_angles
        trees, kept = step.trees, None if layers is None else _int32(layers)
        numbers = None if step.adapters is None else self.adapters.numbers.of_rows(step.adapters, len(token_ids))
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
            0 if numbers is None else numbers.ctypes.data,
            **self._state_rows(step.states, len(step.context_lens)),
        )
        return logits

    def _state_rows(self, rows: StateRows | None, num_sequences: int) -> dict[str, Any]:
        """Return the arguments of a step that say which recurrent states it reads and writes; without rows all sequences
        start."""
        if not self.spec.has_recurrent_state:
            return {}
        rows = StateRows.none(num_sequences) if rows is None else rows
        return {"state_sources": rows.sources, "state_saves": rows.saves}

    def run(
        self,
        runs: TokenRuns,
        kv: KvPool,
        logit_rows: list[int],
        hidden_rows: list[int] | None = None,
        *,
        keeps_all: bool = False,
        wants_best: bool = False,
        needs_logits: bool = True,
    ) -> tuple[Tensor, list[int] | None]:
        """As `step`, for runs of tokens; with wants_best also return the argmax of every row of logits, -1 if there is none.

        needs_logits  False, with wants_best: the logits may be empty if every row has a best token
        """
        self.prepare(kv, max(runs.position_ends))
        wanted = logit_rows
        if hidden_rows:
            wanted = logit_rows + hidden_rows
            self._note_hidden_rows(hidden_rows, len(logit_rows), keeps_all)
        numbers = None if runs.adapters is None else self.adapters.numbers.of_runs(runs.adapters, runs.starts)
        is_best_alone = wants_best and not needs_logits and self._plan.has_plain_logits
        is_best_alone = is_best_alone and (numbers is None or not self.adapters.adapts_head(runs.adapters))
        is_empty = is_best_alone or not self._gives_results
        logits, trees = self._no_logits if is_empty else self._new_logits(len(logit_rows)), runs.trees
        places = () if trees is None else tuple(x.ctypes.data for x in (trees.positions, trees.num_drafts, trees.ancestors))
        short = None if runs.short_ropes is None else runs.short_rope_tokens()
        if short is not None or (runs.num_dropped is not None and trees is None):
            rows = runs.positions() if short is None else runs.positions() + short * self.num_angles
            places = (rows.ctypes.data, *places[1:])
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
            0 if is_best_alone else logits.data_ptr() if self._gives_results else _UNUSED,
            *places,
            row_adapters=0 if numbers is None else numbers.ctypes.data,
            **self._state_rows(runs.states, len(runs.ends)),
            **self._bounds(runs),
        )
        if is_best_alone and min(best, default=0) < 0:
            return self.logits_of(logit_rows if keeps_all else range(len(logit_rows))), best
        return logits, best if wants_best else None

    def _bounds(self, runs: TokenRuns) -> dict[str, Any]:
        """Return the arguments of a step that say which sequences skip runs, and let the bounds of ended ones go."""
        if runs.bounds is None:
            return {}
        keys, firsts, gaps, ended = runs.bounds
        self._plan.forget_bounds(ended)
        return {"bound_keys": keys, "bound_firsts": firsts, "bound_gaps": gaps} if any(keys) else {}

    @property
    def run_counts(self) -> tuple[int, int]:
        """See StepDecoder; of the heads of this rank."""
        looked, skipped = self._plan.run_counts()
        return looked, skipped

    def _note_hidden_rows(self, rows: list[int] | None, num_logit_rows: int, keeps_all: bool) -> None:
        """Record where hidden_states finds these rows: in place, or after those with logits."""
        count = len(rows or ())
        self._hidden_rows = rows or [] if keeps_all else list(range(num_logit_rows, num_logit_rows + count))

    def _new_logits(self, count: int) -> Tensor:
        """Return an uninitialised [count, vocab_size] f32, in the previous step's memory unless it is still referenced:
        taking new pages from the system takes longer than the LM head takes to fill them."""
        size = count * self.spec.vocab_size
        if self._logits.size < size or sys.getrefcount(self._logits) > _OWN_REFERENCES:
            self._logits = np.empty(size, np.float32)
        return torch.from_numpy(self._logits[:size]).view(count, self.spec.vocab_size)

    def keep_inputs(self, layers: tuple[int, ...]) -> None:
        """Keep the inputs of these layers, low to high, in every step from now on."""
        self._num_kept = len(layers)
        self._plan.keep_inputs(list(layers))

    def layer_inputs(self, rows: Sequence[int]) -> Tensor:
        """Return the kept inputs [R or more, layers * hidden_size] f32 of R rows of the last step's tokens. Arrays that are
        still referenced are not overwritten, see ReusedRows."""
        found = self._rows_out.take(len(rows), self._num_kept * self.spec.hidden_size)
        self._plan.layer_inputs(list(rows), found.data_ptr())
        return found

    def move_tokens(self, kv: KvPool, sources: Tensor, targets: Tensor) -> None:
        """Copy the KV of the slots `sources` [N] i64 to `targets` in every layer, one after the other."""
        self._bind(kv)
        for is_windowed, own_sources, own_targets in kv.split_slots(sources, targets):
            self._plan.move_tokens(own_sources.data_ptr(), own_targets.data_ptr(), len(own_sources), is_windowed)

    def copy_queries(self, rows: Sequence[int]) -> list[Tensor]:
        """Return memory [R, H, D] f32 of each layer, to which the next step writes the rotated queries of R rows."""
        attentions = [layer.attention for layer in self.spec.layers]
        sizes = [len(rows) * one.num_heads * one.head_dim for one in attentions]
        found = torch.empty(sum(sizes))
        self._plan.copy_queries(list(rows), found.data_ptr())
        parts = zip(attentions, found.split(sizes), strict=True)
        return [part.view(len(rows), one.num_heads, one.head_dim) for one, part in parts]

    def cached_keys(self, kv: KvPool, layer: int, block_ids: Tensor) -> Tensor:
        """Return the keys [K, N * block_size, D] f32, as queries meet them, of N blocks of a layer with a cache of its own.

        See csrc/attention.h for the layout. Not of formats that keep rotated keys.
        """
        stored = kv.k[layer][block_ids]
        if kv.spec.dtype_of(layer) == "fp8":
            stored = stored.view(torch.float8_e4m3fn)
        num_blocks, num_heads, size, dim = stored.shape
        if stored.dtype == torch.bfloat16:
            keys = stored.view(num_blocks, num_heads, -1, dim // 2, _RUN, 2).transpose(3, 4)
        else:
            keys = stored.view(num_blocks, num_heads, -1, dim, _RUN).transpose(3, 4)
        keys = keys.reshape(num_blocks, num_heads, size, dim).float()
        if kv.scales and kv.scales[layer][0].numel() > 0:
            keys = keys * kv.scales[layer][0][block_ids][..., None]
        return keys.transpose(0, 1).flatten(1, 2)

    def logits_at(self, first: int, last: int) -> Tensor:
        """Return the logits [last - first, vocab_size] f32 of a run of rows of the last step, which kept all."""
        return self.logits_of(range(first, last))

    def logits_of(self, rows: Sequence[int]) -> Tensor:
        """Return the logits [R, vocab_size] of rows that the last step kept."""
        logits = torch.empty(len(rows), self.spec.vocab_size) if self._gives_results else self._no_logits

        def run() -> None:
            self.logits_into(rows, logits.data_ptr())

        if self.mirror is None:
            run()
        else:
            self.mirror.call_logits(rows, run)
        return logits

    def logits_into(self, rows: Sequence[int], address: int) -> None:
        """As logits_of, written at an address."""
        if self._group is not None and not self._group.computes_results:
            return
        places = _int32(rows)
        self._plan.logits(places.data_ptr(), len(places), address)

    def hidden_states(self, first: int, last: int) -> Tensor:
        """Return the hidden states [last - first, hidden_size] f32, after the final norm, of a run of the last hidden_rows."""
        hidden = torch.empty(last - first, self.spec.hidden_size)
        self._plan.hidden_states(self._hidden_rows[first:last], hidden.data_ptr())
        return hidden

    def final_states(self, places: Sequence[int]) -> Tensor:
        """Return the hidden states [R or more, hidden_size] f32, after the final norm, of R rows of the last step: the indices
        of tokens if it kept all, otherwise indices into its logit_rows. Referenced arrays are not overwritten, see
        ReusedRows."""
        hidden = self._rows_out.take(len(places), self.spec.hidden_size)
        self._plan.hidden_states(list(places), hidden.data_ptr())
        return hidden


def _int32(values: Sequence[int]) -> Tensor:
    """Return a list as an i32 tensor; through numpy, which takes a quarter of torch.tensor's time."""
    return torch.from_numpy(np.array(values, dtype=np.int32))


class NativeAngles:
    """Cosine and sine [positions, dim / 2] f32 of one rope; rounded to the model's dtype where the model does that.

    num_short  positions of the short variant of the rope (ModelSpec.rope_switch_len), whose rows follow those of the long one;
               0: there is one variant
    """

    def __init__(self, rope: RopeSpec, max_model_len: int, dtype: torch.dtype, num_short: int = 0) -> None:
        self._rope, self._dtype, self._num_short = rope, dtype, num_short
        self._frequencies = inverse_frequencies(rope, max_model_len)
        self._short_frequencies = inverse_frequencies(rope, rope.original_max) if rope.depends_on_length else self._frequencies
        self.cos = self.sin = torch.empty(0, rope.dim // 2)
        self.count = 0

    def extend(self, count: int) -> None:
        """Make the tables anew, for positions below `count`; row count + p is position p of the short variant."""
        self.count = count
        parts = [cos_sin(self._rope, self._frequencies, torch.arange(count), self._dtype)]
        if self._num_short > 0:
            parts.append(cos_sin(self._rope, self._short_frequencies, torch.arange(self._num_short), self._dtype))
        self.cos, self.sin = (torch.cat(tables)[:, 0].float().contiguous() for tables in zip(*parts, strict=True))


_KEPT_ROWS, _MOST_KEPT = 16, 2
"""Rows of what is kept, for one sequence and its drafts, and how many of these: what a step left is read behind the next."""
_LISTED_REFERENCES = 2
"""To a tensor that nobody else holds: the list, and the argument of the function that counts."""


class ReusedRows:
    """Rows [R, width] f32 in the memory of earlier ones that nobody holds any more.

    To make a tensor behind a pass of the weights takes longer than to fill it: what makes one must come from memory first.
    Who holds a part of what was handed out must hold the tensor, too.
    """

    def __init__(self) -> None:
        self._made: list[Tensor] = []
        self._width = 0

    def take(self, count: int, width: int) -> Tensor:
        """Return uninitialised rows, `count` or more of them."""
        if count > _KEPT_ROWS:
            return torch.empty(count, width)
        for place in range(len(self._made)):
            if sys.getrefcount(self._made[place]) <= _LISTED_REFERENCES and self._width == width:
                return self._made[place]
        if self._width != width:
            self._made, self._width = [], width
        made = torch.empty(_KEPT_ROWS, width)
        if len(self._made) < _MOST_KEPT:
            self._made.append(made)
        return made
