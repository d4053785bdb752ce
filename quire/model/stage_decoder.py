"""StageDecoder: runs the layers of one pipeline stage on rows of the residual stream in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.model_spec import ModelSpec
from quire.kv.pool import KvPool
from quire.model.native_decoder import NativeDecoder
from quire.model.native_model import NativeModelBuilder
from quire.model.pipeline_stages import PipelineStage
from quire.model.tensor_shards import RankGroup
from quire.model.token_runs import TokenRuns
from quire.quant.parameters import DenseOrQuantized, Parameter, StoredParameter


def row_floats(native: ModuleType, hidden_size: int) -> int:
    """Return the floats from one row of the residual stream to the next."""
    return native.Plan.row_stride(hidden_size)


class StageOutputs(NamedTuple):
    """The outputs of a step that the last stage computes.

    wanted       rows with results, first those with logits
    num_logits   how many of them get logits
    keeps_all    logits of other rows may be requested later
    wants_best   find the best token of each row of logits
    needs_logits False, with wants_best: logits are computed only for rows without a best token
    address      of the logits [num_logits, vocab_size] f32
    """

    wanted: list[int]
    num_logits: int
    keeps_all: bool
    wants_best: bool
    needs_logits: bool
    address: int


_NO_OUTPUTS = StageOutputs([], 0, True, False, False, 0)


class StageDecoder(NativeDecoder):
    """The decoder of a stage: results have the bits of a decoder of the whole model.

    spec, parameters  of the whole model, see NativeDecoder; parameters of other stages are not opened
    group             of the stage's ranks, with the shard of its layers; None: one rank has the stage. Only the first rank
                      changes rows and writes results; the others compute in copies of the rows
    """

    def __init__(
        self,
        native: ModuleType,
        stage: PipelineStage,
        spec: ModelSpec,
        parameters: dict[str, Parameter | StoredParameter],
        max_model_len: int,
        quantize: Callable[[str, Tensor], DenseOrQuantized] | None = None,
        group: RankGroup | None = None,
    ) -> None:
        self.stage = stage
        own = stage.select(parameters, spec.is_tied or _is_tied(parameters))
        parameters.clear()

        def quantize_own(name: str, weight: Tensor) -> DenseOrQuantized:
            assert quantize is not None
            return quantize(stage.whole_name(name), weight)

        super().__init__(
            native,
            stage.spec(spec),
            own,
            max_model_len,
            None if quantize is None else quantize_own,
            group,
            rope_switch_len=spec.rope_switch_len(max_model_len) or 0,
        )

    def _builder(self, *args: Any) -> NativeModelBuilder:
        self._plan.set_stage(self.stage.is_first, self.stage.is_last, self.stage.start)
        shard = None if self._group is None else self._group.shard
        return NativeModelBuilder(*args, shard=shard, stage=self.stage)

    def run_stage(self, runs: TokenRuns, kv: KvPool, rows: int, outputs: StageOutputs | None) -> list[int]:
        """Compute the stage's layers of a step on the rows at an address; return the requested best tokens.

        outputs  of the last stage. If a row has no best token (-1), which all its ranks know, its logits are written
        """
        self.prepare(kv, max(runs.ends))
        trees, out = runs.trees, outputs or _NO_OUTPUTS
        places = () if trees is None else tuple(x.ctypes.data for x in (trees.positions, trees.num_drafts, trees.ancestors))
        short = None if runs.short_ropes is None else runs.short_rope_tokens()
        if short is not None:
            positions = runs.positions() + short * self.num_angles
            places = (positions.ctypes.data, *places[1:])
        numbers = self.row_adapters(runs)
        is_best_only = out.wants_best and not out.needs_logits and self._plan.has_plain_logits
        is_best_only = is_best_only and not self.adapters.adapts_head(runs.adapters)
        best = self._plan.run(
            runs.token_ids,
            runs.starts,
            runs.ends,
            runs.addresses,
            len(runs.tables[0]),
            out.wanted,
            out.num_logits,
            out.keeps_all,
            out.wants_best,
            0 if is_best_only else out.address,
            *places,
            rows=rows,
            row_adapters=0 if numbers is None else numbers.ctypes.data,
            **self._state_rows(runs.states, len(runs.ends)),
            **self._bounds(runs),
        )
        if is_best_only and min(best, default=0) < 0:
            first = out.wanted[: out.num_logits] if out.keeps_all else list(range(out.num_logits))
            self.write_logits(rows, first, out.address)
        return best

    def row_adapters(self, runs: TokenRuns) -> NDArray[np.int32] | None:
        """Return the number of each token's LoRA adapter [T]; None: no token has one."""
        return None if runs.adapters is None else self.adapters.numbers.of_runs(runs.adapters, runs.starts)

    def write_logits(self, rows: int, places: list[int], address: int, row_adapters: NDArray[np.int32] | None = None) -> None:
        """Write the logits [R, vocab_size] of some of the rows that a step has left; called by all ranks of the last stage.

        row_adapters  of all tokens of that step, which adapters of the LM head need
        """
        adapters = () if row_adapters is None else (row_adapters.ctypes.data, len(row_adapters))
        self._plan.use_rows(rows, *adapters)
        self.logits_into(places, address)

    def write_layer_inputs(self, count: int, address: int) -> None:
        """Write the kept inputs [count, layers, hidden_size] f32 of the first tokens of the last step; see keep_inputs."""
        self._plan.layer_inputs(list(range(count)), address)

    def write_hidden_states(self, rows: int, places: list[int], address: int) -> None:
        """Write the hidden states [R, hidden_size] after the final norm, as write_logits."""
        self._plan.use_rows(rows)
        self._plan.hidden_states(places, address)


def _is_tied(parameters: dict[str, Parameter | StoredParameter]) -> bool:
    """Return whether the LM head is the embedding."""
    head = parameters.get("lm_head.weight")
    return head is None or head is parameters["embed.weight"]
