"""Overhead of HTTP: the CPU time of a run through a server, compared with the same run in one process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.bench.serving.setup import Cost

_SAME = ("model", "dataset", "arrival", "ignore_eos", "completed", "total_input_tokens", "total_output_tokens", "machine")


@dataclass(frozen=True, slots=True)
class InProcessRecord:
    """The results of a run with --in-process. Its CPU time is that of the engine and of the client."""

    path: Path
    figures: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> InProcessRecord:
        """Read a record. Raises ConfigError if it is invalid, or of a run that was not successful."""
        try:
            figures = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--beside {path}: {error}") from None
        if not isinstance(figures, dict) or figures.get("backend") != "in-process" or "client" not in figures:
            raise ConfigError(f"--beside {path} must be a record of quire bench serve with --in-process")
        if figures.get("interrupted") or figures.get("completed") != figures.get("num_prompts"):
            raise ConfigError(f"--beside {path}: not all of its requests were answered")
        return cls(path, figures)

    def differences(self, figures: Mapping[str, Any]) -> str:
        """Return the differences between two runs that make their costs incomparable; "" if there are none."""
        other = [name for name in _SAME if figures.get(name) != self.figures.get(name)]
        return ", ".join(f"{name} {self.figures.get(name)!r} there and {figures.get(name)!r} here" for name in other)

    def added(self, figures: Mapping[str, Any], cost: Cost) -> dict[str, Any]:
        """Return the additional CPU time of the same run through a server, which cost `cost`, per request and per token.

        The additional time of the engine's process is due to its connection and to different steps: requests that come one by
        one over HTTP lead to more and smaller steps. So the numbers of steps of both runs are included.
        """
        front_end_s = cost.cpu.front_end_s
        added_s = (cost.cpu.server_s or 0.0) - self.figures["client"]["cpu_s"]
        engine_s = None if front_end_s is None else added_s - front_end_s
        return {
            "in_process_cpu_s": self.figures["client"]["cpu_s"],
            "in_process_commit": self.figures.get("commit"),
            "in_process_engine_steps": self.figures["client"].get("engine_steps"),
            "added_engine_cpu_ms_per_request": None if engine_s is None else engine_s * 1e3 / figures["completed"],
            "added_cpu_ms_per_request": added_s * 1e3 / figures["completed"],
            "added_cpu_us_per_token": added_s * 1e6 / max(figures["total_output_tokens"], 1),
        }
