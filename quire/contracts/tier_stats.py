"""TierStats: what a KV tier holds and has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """One KV tier of an engine; counts are since its start. A page is one full KV block.

    tier          "host" or "disk"
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
