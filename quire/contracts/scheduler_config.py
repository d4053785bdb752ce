"""SchedulerConfig: what the scheduler may do in one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.base.errors import ConfigError
from quire.contracts.kv_spec import peak_window_blocks
from quire.contracts.option_checks import check_budget, is_int, require

POLICIES = ("fcfs", "priority")
KV_SAVES = ("reused", "all", "write_through", "none")
KvSave = Literal["reused", "all", "write_through", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler may do in one step. Raises ConfigError.

    max_num_seqs            sequences that run (hold blocks) at the same time
    max_num_batched_tokens  tokens computed in one step over all sequences
    long_prefill_token_threshold  prompt tokens that one sequence may compute in a step; 0: as many as the budget has left
    max_model_len           tokens of one sequence, prompt and output together
    policy                  "fcfs": in order of arrival; "priority": lower priority values first, then arrival
    rope_switch_len         tokens up to which a sequence takes the short variant of the rope, see ModelSpec.rope_switch_len
    num_pipeline_stages     steps that may be in flight at once, each of other sequences
    num_state_checkpoints   recurrent states that the worker keeps for prefixes; None: the model has no recurrent state
    max_num_drafts          drafts of one sequence in a step; None: no limit. 0 with a recurrent state and nothing that drafts
    computes_whole_prompts  a prompt is computed in one step: its tokens attend to those after them. Needs a prefix cache that
                            is off, as the KV of equal prefixes differs then
    num_host_pages          pages (full KV blocks) that the host tier holds; 0: there is none
    max_page_saves          pages that one step may save; more are dropped
    num_state_pages         pages of the host tier that a recurrent state takes; 0: there is no such state, or no host tier
    has_block_pages         blocks have bytes, and so pages; False: no layer has attention
    kv_save                 see EngineConfig
    loads_aside             pages are loaded next to the steps, so that a sequence is not computed before its own are there
    window_tokens           window of the window group, whose pool has num_window_blocks, see KvSpec; None: there is one group
    num_block_places        ranks that share the tokens of a sequence; each has an equal part of the blocks. block_chunk
                            consecutive blocks of a sequence are on one rank, the next ones on the next
    num_homes               homes (ranks, or groups of them) that each attend to sequences of their own, with an equal part of
                            the blocks
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    policy: Literal["fcfs", "priority"] = "fcfs"
    rope_switch_len: int | None = None
    num_pipeline_stages: int = 1
    num_state_checkpoints: int | None = None
    max_num_drafts: int | None = None
    computes_whole_prompts: bool = False
    num_host_pages: int = 0
    max_page_saves: int = 1024
    num_state_pages: int = 0
    has_block_pages: bool = True
    kv_save: KvSave = "reused"
    loads_aside: bool = False
    window_tokens: int | None = None
    num_window_blocks: int = 0
    num_block_places: int = 1
    block_chunk: int = 1
    num_homes: int = 1

    @property
    def num_sequence_blocks(self) -> int:
        """The most blocks that one sequence can have."""
        return self.num_kv_blocks // self.num_homes

    def __post_init__(self) -> None:
        for name in (
            "num_block_places",
            "block_chunk",
            "num_homes",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "block_size",
            "num_kv_blocks",
            "num_pipeline_stages",
            "max_page_saves",
        ):
            value = getattr(self, name)
            require(is_int(value, 1), name, value, "an integer >= 1")
        for name in ("num_state_checkpoints", "max_num_drafts"):
            value = getattr(self, name)
            require(value is None or is_int(value, 0), name, value, "None or an integer >= 0")
        require(is_int(self.num_host_pages, 0), "num_host_pages", self.num_host_pages, "an integer >= 0")
        least = int(self.num_host_pages > 0 and self.num_state_checkpoints is not None)
        require(is_int(self.num_state_pages, least), "num_state_pages", self.num_state_pages, f"an integer >= {least}")
        require(self.kv_save in KV_SAVES, "kv_save", self.kv_save, f"one of {KV_SAVES}")
        threshold = self.long_prefill_token_threshold
        require(is_int(threshold, 0), "long_prefill_token_threshold", threshold, "an integer >= 0")
        require(self.policy in POLICIES, "policy", self.policy, f"one of {POLICIES}")
        check_budget(self.max_num_batched_tokens, self.max_num_seqs)
        if self.computes_whole_prompts and self.enable_prefix_caching:
            raise ConfigError("enable_prefix_caching must be False where prompts are computed whole (computes_whole_prompts)")
        self._check_windows()
        if self.num_homes > 1:
            require(self.num_block_places == 1, "num_block_places", self.num_block_places, "1 with num_homes")
            require(not self.computes_whole_prompts, "computes_whole_prompts", True, "False with num_homes")
        if self.num_block_places > 1 or self.num_homes > 1:
            unit = self.num_homes if self.num_homes > 1 else self.num_block_places * self.block_chunk
            require(self.num_kv_blocks % unit == 0, "num_kv_blocks", self.num_kv_blocks, f"a multiple of {unit} here")
            for name, only in (("window_tokens", None), ("num_host_pages", 0), ("num_state_checkpoints", None)):
                require(getattr(self, name) == only, name, getattr(self, name), f"{only} with several block places")

    def _check_windows(self) -> None:
        if self.window_tokens is None:
            return
        require(is_int(self.window_tokens, 1), "window_tokens", self.window_tokens, "None or an integer >= 1")
        least = min(self.peak_window_blocks, self.num_kv_blocks)
        require(is_int(self.num_window_blocks, least), "num_window_blocks", self.num_window_blocks, f"an integer >= {least}")
        require(self.num_host_pages == 0, "num_host_pages", self.num_host_pages, "0 with window_tokens")
        require(
            self.num_state_checkpoints is None, "num_state_checkpoints", self.num_state_checkpoints, "None with window_tokens"
        )

    @property
    def peak_window_blocks(self) -> int:
        """The most blocks of the window group that one sequence holds in a step."""
        return peak_window_blocks(
            self.window_tokens or 0, min(self.max_num_batched_tokens, self.max_model_len), self.block_size
        )
