"""The goals of the GPU path beside what a record of bench/gpu.py has: `python bench/gpu_goals.py FILE`. No torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpu_sections import read_record


class Goal(NamedTuple):
    """The least that the best row of a kind should have; of starts the most of all. size: its sequences, tokens or drafts."""

    section: str
    kind: str
    size: int
    number: str
    wanted: float


_RATES = {("engine decode", 1): 2000, ("engine decode", 8): 5460, ("engine decode", 64): 18714, ("mixed", 0): 22991}
_RATES |= {("prefill", 512): 71800, ("prefill", 2048): 121300, ("prefill", 8192): 296100}
"""1.3 times those of vLLM 0.26.0 on an H100 for 8 and 64 sequences, 1.2 times for the mixed workload and 8,192 tokens, and the
same for shorter prompts."""

_SHARES = {"small": (0.85, None, 0.8), "large": (0.85,) * 3, "large-fp8": (0.8,) * 3, "large-int4": (0.8,) * 3}
GOALS = (
    *(Goal("engine", *row, "tokens_per_s", wanted) for row, wanted in _RATES.items()),
    *(
        Goal(f"decode-{name}", "decode", batch, "share", wanted)
        for name, shares in _SHARES.items()
        for batch, wanted in zip((1, 8, 64), shares, strict=True)
        if wanted is not None
    ),
    Goal("decode-small", "prompt", 8192, "share", 0.6),
    Goal("decode-large", "prompt", 8192, "share", 0.8),
    Goal("start", "start", 0, "ready_s", 10),
    Goal("drafts", "drafts", 4, "at_share", 1.7),
)


def goals_table(record: Mapping[str, Any]) -> str:
    """Return each goal with what was found, and how many times as fast as with bf16 steps with quantised weights are."""
    lines = [f"{'goal':40} {'wanted':>8} {'found':>8}"]
    for goal in GOALS:
        rows = map(_with_ready, record.get(goal.section, []))
        numbers = [row[goal.number] for row in rows if _is_of(goal, row)]
        found = None if not numbers else max(numbers)
        is_met = found is not None and (found <= goal.wanted if goal.kind == "start" else found >= goal.wanted)
        what = f"{goal.section}, {goal.kind} {goal.size or ''} {goal.number}"
        shown = "not measured" if found is None else f"{found:8.5g}{'' if is_met else '  missed'}"
        lines.append(f"{what:40} {goal.wanted:8.5g} {shown}")
    plain = dict(_steps(record, "decode-large"))
    for kind in ("fp8", "int4"):
        for name, step_us in _steps(record, f"decode-large-{kind}"):
            if name in plain:
                lines.append(f"{kind}, {name}, times as fast as bf16".ljust(40) + f" {1:8.4g} {plain[name] / step_us:8.4g}")
    return "\n".join(lines)


def _with_ready(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row, of a start with what the first records do not have."""
    is_old = "total_s" in row and "ready_s" not in row
    return {**row, "ready_s": row["total_s"] - row["import_s"] - row["first_token_s"]} if is_old else row


def _is_of(goal: Goal, row: Mapping[str, Any]) -> bool:
    size = row.get("batch", row.get("tokens", row.get("drafts", 0)))
    return goal.number in row and (row["section"], size) == (goal.kind, goal.size) and row.get("context", 960) == 960


def _steps(record: Mapping[str, Any], section: str) -> Iterator[tuple[str, float]]:
    """Yield the shortest step of each kind: its kernels are those that an engine should choose."""
    rows = [row for row in record.get(section, []) if "step_us" in row]
    names = [f"prompt of {row['tokens']}" if "tokens" in row else f"{row['batch']} x {row['context']}" for row in rows]
    for chosen in dict.fromkeys(names):
        yield chosen, min(row["step_us"] for name, row in zip(names, rows, strict=True) if name == chosen)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give one record of bench/gpu.py: python bench/gpu_goals.py FILE")
    print(goals_table(read_record(Path(sys.argv[1]).read_text())))
