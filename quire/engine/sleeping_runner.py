"""SleepingRunner: the runner of an engine, which can release its memory and take it again."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from quire.base.errors import ConfigError, UnsupportedError
from quire.base.host_memory import release_free_memory
from quire.base.logging import get_logger
from quire.contracts.config import EngineConfig
from quire.contracts.expert_stats import ExpertStats
from quire.contracts.memory import ModelReport
from quire.contracts.rank_stats import RankStats
from quire.contracts.sleep import SleepLevel
from quire.contracts.step import StageTimes
from quire.kv.tiers.host_slab import HostSlab
from quire.worker.build import build_runner
from quire.worker.device.faults import release_pinned, release_unused
from quire.worker.parallel_launch import launched_group
from quire.worker.step_driver import EngineRunner

logger = get_logger(__name__)


class SleepingRunner:
    """Holds the runner of an engine; None while it sleeps at level 2. Used by the engine's thread only.

    level  of its sleep; None: it is awake
    """

    def __init__(self, config: EngineConfig, runner: EngineRunner, report: ModelReport) -> None:
        self._config, self._report = config, report
        self._runner: EngineRunner | None = runner
        self._slab = runner.host_slab
        self.level: SleepLevel | None = None

    @property
    def loaded(self) -> EngineRunner:
        """The runner. Raises ConfigError while it is asleep."""
        if self._runner is None or self.level is not None:
            raise ConfigError(f"the engine is asleep (level {self.level}): call wake_up first")
        return self._runner

    @property
    def host_slab(self) -> HostSlab | None:
        """The memory of the host tier in this process, which stays while the runner sleeps; None: there is no host tier."""
        return self._slab

    def rank_stats(self) -> list[RankStats]:
        """See EngineRunner; empty while the processes of the ranks do not exist."""
        return [] if self._runner is None else self._runner.rank_stats()

    def expert_stats(self) -> list[ExpertStats]:
        """See EngineRunner."""
        return [] if self._runner is None else self._runner.expert_stats()

    def check_health(self) -> None:
        """See EngineRunner."""
        if self._runner is not None:
            self._runner.check_health()

    @property
    def stage_times(self) -> StageTimes | None:
        """See EngineRunner."""
        return None if self._runner is None else self._runner.stage_times

    def check(self, level: SleepLevel) -> None:
        """Raise UnsupportedError if this engine cannot sleep at a level."""
        reason = self.refusal(level)
        if reason is not None:
            raise UnsupportedError(f"sleep level {level} is not supported with {reason}")

    def refusal(self, level: SleepLevel) -> str | None:
        """Return why the engine cannot sleep; None: it can."""
        config, report = self._config, self._report
        if config.has_kv_transfer:
            return f"{config.transfer_field}: other engines use this engine's KV cache"
        if level == 1:
            has_medusa = config.speculative_config is not None and "medusa" in config.speculative_config.methods
            if report.device != "cpu" and report.spec.implementation == "transformers":
                return f"model_impl 'transformers' on {report.device}: use level 2"
            if report.device != "cpu" and has_medusa:
                return f"method 'medusa' on {report.device}: use level 2"
            return None
        if config.distributed_executor_backend == "ray" or launched_group(config) is not None:
            return "ranks that a launcher has started, because they cannot be started again: use level 1"
        if config.save_expert_load is not None:
            return "save_expert_load, because the counts would start again: use level 1"
        if config.enable_eplb:
            return "enable_eplb, because the placements that were found while serving would be lost: use level 1"
        return None

    def sleep(self, level: SleepLevel) -> None:
        """Release the memory. No step may be in flight; pages that the tiers are to keep have been saved."""
        if self._runner is not None and self.level is None and level == 1:
            self._runner.sleep()
        elif self._runner is not None and level == 2:
            if self._slab is not None:
                self._slab.attach(None)
            self._runner.close()
            self._runner = None
            gc.unfreeze()  # cycles among the objects of the model would stay otherwise
            gc.collect()
            if self._report.device.startswith("cuda"):
                device = torch.device(self._report.device)
                release_unused(device)
                release_pinned(device)
        self.level = level
        release_free_memory()
        logger.info("the engine is asleep, level %d", level)

    def wake_up(self) -> bool:
        """Take the memory again; return whether the runner is a new one. Without an effect while it is awake.

        Raises ModelFormatError or ConfigError if the model cannot be loaded again; it then stays asleep.
        """
        if self.level is None:
            return False
        is_new = self._runner is None
        if self._runner is None:
            self._runner = self._load()
            gc.freeze()
        else:
            self._runner.wake_up()
        self.level = None
        logger.info("the engine is awake")
        return is_new

    def _load(self) -> EngineRunner:
        """Load the model again, with a KV cache of the same size."""
        memory = self._report.memory
        fixed = replace(
            self._config,
            num_kv_blocks=memory.num_kv_blocks,
            kv_cache_memory_bytes=None,
            max_model_len=memory.max_model_len,
        )
        runner, report = build_runner(fixed, self._slab)
        found = report.memory
        is_same = (found.num_kv_blocks, found.num_states, found.num_state_checkpoints) == (
            memory.num_kv_blocks,
            memory.num_states,
            memory.num_state_checkpoints,
        )
        if not is_same or found.num_window_blocks < memory.num_window_blocks or found.max_model_len != memory.max_model_len:
            runner.close()
            raise ConfigError(
                f"the model was loaded again with {found.num_kv_blocks} KV blocks and max_model_len {found.max_model_len}, but "
                f"had {memory.num_kv_blocks} and {memory.max_model_len}: its files have changed, restart the engine"
            )
        return runner

    def close(self) -> None:
        """Release everything."""
        if self._runner is not None:
            self._runner.close()
