"""The rows of gpu_profile.py as text. No torch: the process that prints takes none of the device's memory."""

from __future__ import annotations

from collections.abc import Sequence

Row = dict[str, object]
_SHOWN_NAME = 60


def profile_table(rows: Sequence[Row]) -> str:
    """Return rows of kernel_rows as text: a table for each step."""
    lines: list[str] = []
    last = None
    for row in rows:
        if "kernel" not in row:
            continue
        if row["what"] != last:
            last = row["what"]
            total = sum(float(str(other["us"])) for other in rows if other.get("what") == last and "us" in other)
            lines += ["", f"{last}: {total:.1f} us a step", f"{'us':>10} {'share':>7} {'launches':>9}  kernel"]
        name = str(row["kernel"])[:_SHOWN_NAME]
        lines.append(f"{row['us']:10.1f} {row['share']:7.1%} {row['launches']:9.1f}  {name}")
    return "\n".join(lines).lstrip("\n")
