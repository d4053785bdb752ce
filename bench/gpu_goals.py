"""The goals of the GPU path and what a record of bench/gpu.py has for each: `python bench/gpu_goals.py FILE`. No torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Goal(NamedTuple):
    """A number of a row of a record, and what it should be; the row is that with these values.

    is_most  the number should be at most that; else at least
    """

    what: str
    section: str
    values: Mapping[str, object]
    number: str
    wanted: float
    is_most: bool = False


def _decode(section: str, batch: int) -> tuple[str, dict[str, object], str]:
    return section, {"section": "decode", "batch": batch, "context": 960, "is_recorded": True, "is_fused": True}, "share"


GOALS = (
    Goal("0.6B, 1 sequence, tokens/s", "engine", {"section": "engine decode", "batch": 1}, "tokens_per_s", 2000),
    Goal("0.6B, 8 sequences, 1.3 x vLLM on an H100", "engine", {"section": "engine decode", "batch": 8}, "tokens_per_s", 5460),
    Goal("0.6B, 64 sequences, 1.3 x vLLM", "engine", {"section": "engine decode", "batch": 64}, "tokens_per_s", 18714),
    Goal("mixed, output tokens/s, 1.2 x vLLM", "engine", {"section": "mixed", "is_first": False}, "tokens_per_s", 22991),
    *(
        Goal(f"0.6B, prompt of {count}, tokens/s, {factor} x vLLM", "engine", {"section": "prefill", "tokens": count},
             "tokens_per_s", wanted)
        for count, factor, wanted in ((512, 1, 71800), (2048, 1, 121300), (8192, 1.2, 296100))
    ),
    Goal("0.6B, prompt of 8192, share", "decode-small", {"section": "prompt", "tokens": 8192}, "share", 0.6),
    Goal("8B, prompt of 8192, share", "decode-large", {"section": "prompt", "tokens": 8192}, "share", 0.8),
    *(Goal(f"0.6B, {batch} sequences, share", *_decode("decode-small", batch), at) for batch, at in ((1, 0.85), (64, 0.8))),
    *(Goal(f"8B bf16, {batch} sequences, share", *_decode("decode-large", batch), 0.85) for batch in (1, 8, 64)),
    *(
        Goal(f"8B {kind}, {batch} sequences, share", *_decode(f"decode-large-{kind}", batch), 0.8)
        for kind in ("fp8", "int4") for batch in (1, 8, 64)
    ),
    Goal("ready, cache of kernels empty, s", "start", {"is_cold": True}, "ready_s", 10, is_most=True),
    Goal("drafts of eagle3, 0.8 accepted, x plain", "drafts", {"drafts": 4}, "at_share", 1.7),
)  # fmt: skip


def goals_table(record: Mapping[str, Any]) -> str:
    """Return each goal with what was found, and quantised weights beside bfloat16 ones."""
    lines = [f"{'goal':46} {'wanted':>9} {'found':>9}"]
    for goal in GOALS:
        rows = [row for row in record.get(goal.section, []) if goal.values.items() <= row.items() and goal.number in row]
        found = rows[0][goal.number] if rows else None
        is_met = found is not None and (found <= goal.wanted if goal.is_most else found >= goal.wanted)
        shown = "not measured" if found is None else f"{found:9.4g}{'' if is_met else '  missed'}"
        lines.append(f"{goal.what:46} {goal.wanted:9.4g} {shown}")
    plain = _steps(record, "decode-large")
    for kind in ("fp8", "int4"):
        for name, step_us in _steps(record, f"decode-large-{kind}").items():
            if name in plain:
                lines.append(f"8B {kind}, {name}, x bf16".ljust(46) + f" {1:9.4g} {plain[name] / step_us:9.4g}")
    return "\n".join(lines)


def _steps(record: Mapping[str, Any], section: str) -> dict[str, float]:
    """Return the shortest step of each kind: of kernels that the engine could choose."""
    found: dict[str, float] = {}
    for row in record.get(section, []):
        if "step_us" in row:
            name = f"prompt of {row['tokens']}" if "tokens" in row else f"{row['batch']} x {row['context']}"
            found[name] = min(row["step_us"], found.get(name, row["step_us"]))
    return found


if __name__ == "__main__":
    print(goals_table(json.loads(Path(sys.argv[1]).read_text())))
