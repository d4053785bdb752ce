"""kv_cells: the owners of the KV blocks, as runs of equal cells."""

from __future__ import annotations

from collections.abc import Callable

from quire.serving.engine_client.messages import KvReport
from quire.serving.page.wire import CACHED, KvCells

MAX_CELLS = 8192


def kv_cells(report: KvReport, number_of: Callable[[str], int]) -> KvCells:
    """Return the cells of a report. A cell of several blocks shows its most frequent owner; number_of numbers the requests."""
    per_cell = -(-report.num_blocks // MAX_CELLS)
    holders: dict[int, tuple[int, int]] = {}  # block -> first holder, number of sequences
    for request_id, block_ids in report.blocks.items():
        number = number_of(request_id)
        for block_id in block_ids:
            first, count = holders.get(block_id, (number, 0))
            holders[block_id] = (first, count + 1)
    num_used = len(holders)
    by_request = [
        (number_of(request_id), len(block_ids), sum([holders[block_id][1] > 1 for block_id in block_ids]))
        for request_id, block_ids in ((request_id, set(block_ids)) for request_id, block_ids in report.blocks.items())
    ]
    num_shared = sum([count > 1 for _, count in holders.values()])
    for block_id in report.cached:
        holders.setdefault(block_id, (CACHED, 0))
    cells: dict[int, tuple[int, int]] = {}
    for block_id in sorted(holders):
        cell, held = block_id // per_cell, holders[block_id]
        if cell not in cells or held[1] > cells[cell][1]:
            cells[cell] = held
    return KvCells(report.num_blocks, per_cell, num_used, num_shared, len(report.cached), _runs(cells), by_request)


def _runs(cells: dict[int, tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    runs: list[tuple[int, int, int, int]] = []
    for cell, (number, count) in cells.items():
        if runs:
            first, length, *held = runs[-1]
            if first + length == cell and held == [number, count]:
                runs[-1] = (first, length + 1, number, count)
                continue
        runs.append((cell, 1, number, count))
    return runs
