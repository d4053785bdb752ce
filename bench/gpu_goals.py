"""The goals of the GPU path beside what a record of bench/gpu.py has: `python bench/gpu_goals.py FILE`. No torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpu_sections import read_record


class Goal(NamedTuple):
    """The least that the best row of a kind should have. `size` is its sequences, tokens or drafts; of starts all are measured,
    and `wanted` is the most."""

    section: str
    kind: str
    size: int
    number: str
    wanted: float


GOALS = (
    *(Goal("engine", "engine decode", *rest) for rest in ((1, "tokens_per_s", 2000), (8, "tokens_per_s", 5460))),
    *(Goal("engine", "engine decode", 64, "tokens_per_s", 18714), Goal("engine", "mixed", 0, "tokens_per_s", 22991)),
    *(Goal("engine", "prefill", *rest) for rest in ((512, "tokens_per_s", 71800), (2048, "tokens_per_s", 121300))),
    Goal("engine", "prefill", 8192, "tokens_per_s", 296100),
    *(Goal("decode-small", *rest) for rest in (("decode", 1, "share", 0.85), ("decode", 64, "share", 0.8))),
    *(Goal(f"decode-{name}", "prompt", 8192, "share", wanted) for name, wanted in (("small", 0.6), ("large", 0.8))),
    *(Goal("decode-large", "decode", batch, "share", 0.85) for batch in (1, 8, 64)),
    *(Goal(f"decode-large-{kind}", "decode", batch, "share", 0.8) for kind in ("fp8", "int4") for batch in (1, 8, 64)),
    Goal("start", "start", 0, "ready_s", 10),
    Goal("drafts", "drafts", 4, "at_share", 1.7),
)
"""Rates of section engine are 1.3 times those of vLLM 0.26.0 on an H100 for decode steps of 8 and 64 sequences, 1.2 times for
the mixed workload and 8,192 tokens, and the same for shorter prompts."""


def goals_table(record: Mapping[str, Any]) -> str:
    """Return each goal with what was found, and how many times as fast as with bf16 steps with quantised weights are."""
    lines = [f"{'goal':40} {'wanted':>8} {'found':>8}"]
    for goal in GOALS:
        numbers = [row[goal.number] for row in record.get(goal.section, []) if _is_of(goal, row)]
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
    print(goals_table(read_record(Path(sys.argv[1]).read_text())))
