"""The JSON messages of the live view. Rows are arrays, because there are many; the page reads them by position.

Times are milliseconds of the feed's clock, which starts with the server.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.serving.request_queue.engine_gateway import QueueSnapshot

CACHED = -1
RequestState = Literal["queue", "prefill", "decode", "ended"]


class StepRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One step of the engine.

    preemptions, prefix_queries, prefix_hits  in this step; the last two in tokens
    parts         [number of the request, tokens, 1 for prefill else 0], at most MAX_PARTS of them
    """

    step_id: int
    started_ms: float
    duration_ms: float
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    free_blocks: int
    cached_blocks: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    parts: list[tuple[int, int, int]]


class RequestRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The present state of one request.

    number  its number in steps and blocks
    label   its id for viewers who are admins, otherwise random
    scheduled_ms  start of its first step; before its first token only as far as observed
    reason  why it ended: a finish reason of its first choice, or why it was aborted
    owner   the name of its API key, for viewers who are admins
    """

    number: int
    label: str
    priority: str
    state: RequestState
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    arrived_ms: float
    scheduled_ms: float | None
    first_token_ms: float | None
    ended_ms: float | None
    reason: str | None
    owner: str | None


class KvCells(msgspec.Struct, frozen=True):
    """The KV blocks as cells of blocks_per_cell blocks each.

    shared   blocks held by several sequences, of one request or of several
    runs     [first cell, cells, number of the first holder or CACHED, sequences that hold them]; cells between runs are free
    holders  [number of the request, blocks that it holds, those that are shared]
    """

    num_blocks: int
    blocks_per_cell: int
    used: int
    shared: int
    cached: int
    runs: list[tuple[int, int, int, int]]
    holders: list[tuple[int, int, int]]


class EngineShape(msgspec.Struct, frozen=True):
    """The engine's limits and role."""

    model: str
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_kv_blocks: int
    role: str


class RankRow(msgspec.Struct, frozen=True, array_like=True):
    """One rank of the model. wait_ms: time in barriers since the start; part: see RankStats."""

    rank: int
    pid: int
    state: str
    memory_bytes: int
    share: float
    wait_ms: float
    part: str


MAX_BUSIEST = 8


class ExpertRow(msgspec.Struct, frozen=True, array_like=True):
    """The experts of one layer; counts are since the start. imbalance and what follows: see ExpertStats.

    tokens       of all experts together
    rank_tokens  of each rank, rounded; empty where no experts are placed on ranks
    busiest      [expert, tokens] of those with the most tokens, at most MAX_BUSIEST of num_experts
    """

    layer: int
    num_experts: int
    tokens: int
    busiest: list[tuple[int, int]]
    rank_tokens: list[int]
    imbalance: float
    imbalance_before: float
    imbalance_after: float
    num_moved: int
    num_failed_moves: int


class TierRow(msgspec.Struct, frozen=True, array_like=True):
    """One KV tier: pages in it, bytes in use and allowed, and since the start pages that prompts took from it, pages saved,
    loaded and dropped, and the milliseconds of saving and loading.

    outcomes  of the tier "peer": how many KV transfers ended so, and prompts without one by the reason
    problems  of the tier "peer" of a decode engine: why the last transfer from a prefill engine failed, by its address
    """

    tier: str
    num_pages: int
    num_bytes: int
    max_bytes: int
    num_hits: int
    num_saved: int
    num_loaded: int
    num_dropped: int
    save_ms: float
    load_ms: float
    outcomes: dict[str, int]
    problems: dict[str, str]


class Frame(msgspec.Struct, frozen=True, omit_defaults=True):
    """The changes; in a snapshot, the whole state. Unchanged requests and queues are absent.

    replicas  the state of each engine, if there are several; in a snapshot, and when one changed
    """

    now_ms: float
    engine: str
    phase: str
    shape: EngineShape | None = None
    queue: QueueSnapshot | None = None
    kv: KvCells | None = None
    requests: list[RequestRow] = []
    steps: list[StepRow] = []
    replicas: list[str] = []
    ranks: list[RankRow] | None = None
    tiers: list[TierRow] | None = None
    experts: list[ExpertRow] | None = None
