"""The record of `quire bench steps`: what was measured, and the fit that is made of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.contracts.scheduler_config import SchedulerConfig
from quire.planner.delivery import Delivery
from quire.planner.hardware import CPU_EFFICIENCY, GPU_EFFICIENCY, Hardware
from quire.planner.model_shape import KV_FORMATS, ModelShape
from quire.planner.step_time import FittedTime, MachineRates, MeasuredStep, StepWork, fit_steps

KIND = "quire bench steps"


@dataclass(frozen=True, slots=True)
class StepsRecord:
    """Measured steps of one engine.

    memory_bytes     memory that the engine could plan with
    request_s        median time from adding a request to the start of its first step, at an idle engine
    delivery         what a server adds to the steps; None: it was not measured
    scheduler        the limits of the scheduler: max_num_seqs, max_num_batched_tokens, block_size, num_kv_blocks,
                     max_model_len, num_window_blocks (0: there is no window group; older records have none)
    provenance       machine, commit, date
    """

    shape: ModelShape
    precision: str
    kv_format: str
    device: str
    rates: MachineRates
    memory_bytes: int
    request_s: float
    scheduler: dict[str, int]
    steps: tuple[MeasuredStep, ...]
    provenance: dict[str, Any] = field(default_factory=dict)
    delivery: Delivery | None = None

    def fit(self) -> FittedTime:
        """Return the fit of the steps, with what a server adds if that was measured. Raises ConfigError for too few steps."""
        fit = fit_steps(self.steps, self.shape, self.precision, self.kv_format, self.rates, self.request_s)
        return fit if self.delivery is None else fit.served(self.delivery)

    def to_json(self) -> str:
        """Return the record as JSON, with the fit for people who read it; from_json fits again."""
        fit = self.fit()
        steps = [
            {
                "num_tokens": step.work.num_tokens,
                "num_sequences": step.work.num_sequences,
                "num_sampled": step.work.num_sampled,
                "attended": [list(pair) for pair in step.work.attended],
                "duration_s": step.duration_s,
            }
            for step in self.steps
        ]
        figures = {
            "kind": KIND,
            "model": self.shape.to_dict(),
            "precision": self.precision,
            "kv_format": self.kv_format,
            "device": self.device,
            "rates": asdict(self.rates),
            "memory_bytes": self.memory_bytes,
            "request_s": self.request_s,
            "delivery": None if self.delivery is None else asdict(self.delivery),
            "scheduler": self.scheduler,
            "provenance": self.provenance,
            "fit": {"text": fit.describe(), "median_error": fit.median_error, "p90_error": fit.p90_error},
            "steps": steps,
        }
        return json.dumps(figures)

    @classmethod
    def read(cls, path: Path, option: str = "--measured") -> StepsRecord:
        """Return the record in a file. Raises ConfigError, with the option, for anything else."""
        try:
            figures = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{option} {path} cannot be read as a record of {KIND} ({error})") from error
        if not isinstance(figures, dict) or figures.get("kind") != KIND:
            raise ConfigError(f"{option} {path} is not a record of {KIND}: make one with `{KIND} --output-json FILE`")
        try:
            record = cls(
                ModelShape.from_dict(figures["model"]),
                figures["precision"],
                figures["kv_format"],
                figures["device"],
                MachineRates(**figures["rates"]),
                int(figures["memory_bytes"]),
                float(figures["request_s"]),
                {name: int(value) for name, value in figures["scheduler"].items()},
                tuple(_step(one) for one in figures["steps"]),
                figures["provenance"],
                None if figures.get("delivery") is None else Delivery.from_dict(figures["delivery"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{option} {path} is damaged ({type(error).__name__}: {error})") from error
        if record.kv_format not in KV_FORMATS:
            raise ConfigError(f"{option} {path}: kv_format must be one of {', '.join(KV_FORMATS)}, got {record.kv_format!r}")
        return record

    def scheduler_config(self, enable_prefix_caching: bool = False) -> SchedulerConfig:
        """Return the limits for a scheduler, window group included."""
        figures = {"num_window_blocks": 0, **self.scheduler}
        cache = self.shape.window_cache
        window = cache.window_tokens if cache is not None and figures["num_window_blocks"] else None
        return SchedulerConfig(**figures, window_tokens=window, enable_prefix_caching=enable_prefix_caching)

    @property
    def hardware(self) -> Hardware:
        """The machine as a device for the planner, with its measured rates; watts and links are not known."""
        name = str(self.provenance.get("machine", self.device))
        source = {"bytes_per_s": KIND, "flops_per_s": KIND, "memory_bytes": "memory that the engine could plan with"}
        is_gpu = self.device.startswith("cuda")
        return Hardware(
            key="measured",
            name=name,
            kind="gpu" if is_gpu else "cpu",
            bytes_per_s=self.rates.bytes_per_s,
            flops_per_s=self.rates.flops_per_s,
            fp8_flops_per_s=None,
            memory_bytes=self.memory_bytes,
            watts=None,
            link_bytes_per_s=None,
            source=source,
            efficiency=GPU_EFFICIENCY if is_gpu else CPU_EFFICIENCY,
            is_measured=True,
        )


def _step(figures: dict[str, Any]) -> MeasuredStep:
    attended = tuple((int(tokens), int(pairs)) for tokens, pairs in figures["attended"])
    work = StepWork(int(figures["num_tokens"]), int(figures["num_sequences"]), int(figures["num_sampled"]), attended)
    return MeasuredStep(work, float(figures["duration_s"]))
