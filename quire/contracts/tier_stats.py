"""TierStats: what a KV tier holds and has done."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """One KV tier of an engine; counts are since its start. A page is one full KV block.

    tier          "host", "disk" or "peer": pages that are lent to decode engines (saved), or pulled from prefill engines
    num_pages     pages of this engine's model in it; of the disk tier as of its last look-up of them
    num_bytes     bytes in use; of the disk tier those of all models, as far as they are accounted for
    max_bytes     the most that may be in use
    num_hits      pages that admitted prompts took from it
    num_saved     pages copied or written to it
    num_loaded    pages copied or read from it
    save_s        seconds of saving
    load_s        seconds of loading
    num_dropped   pages worth saving that were not, because the tier was busy or could not be written
    num_damaged   pages that were found with other bytes than their checksum says
    num_declined  requests whose pages were there, but slower to load than to compute
    num_late      requests that went on before all their pages were read
    num_errors    unexpected errors: what they ended was done without the tier
    outcomes      of the tier "peer": how many KV transfers ended so; of a decode engine also how many prompts were computed
                  without one, by the reason
    peer_transfers  of a decode engine: transfers that gave pages, by the address of the prefill engine
    peer_waits_s  of a decode engine: the expected seconds of the work that waits at a prefill engine, by its address; without
                  those that have just failed
    problems      of the tier "peer" of a decode engine: why the last transfer from a prefill engine failed, by its address; of
                  the tier "disk": why it is not read or written now, and the last unexpected error
    """

    tier: str
    num_pages: int
    num_bytes: int
    max_bytes: int
    num_hits: int = 0
    num_saved: int = 0
    num_loaded: int = 0
    saved_bytes: int = 0
    loaded_bytes: int = 0
    save_s: float = 0.0
    load_s: float = 0.0
    num_dropped: int = 0
    num_damaged: int = 0
    num_declined: int = 0
    num_late: int = 0
    num_errors: int = 0
    outcomes: dict[str, int] = field(default_factory=dict[str, int])
    problems: dict[str, str] = field(default_factory=dict[str, str])
    peer_transfers: dict[str, int] = field(default_factory=dict[str, int])
    peer_waits_s: dict[str, float] = field(default_factory=dict[str, float])
