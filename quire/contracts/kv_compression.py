"""KvCompression: which blocks of its KV cache a request gives up or does not read. Off unless a request asks for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, cast, get_args

from quire.base.errors import RequestError

CompressionMethod = Literal["streaming", "key_norm", "snapkv", "adaptive", "bounds"]
METHODS: tuple[str, ...] = get_args(CompressionMethod)

_OBSERVING = ("snapkv", "adaptive")
"""Methods that read the attention of the last tokens before the first eviction."""

EXACT_GAP = 200.0
"""A weight that is e^-200 of the highest is 0 in all kernels: it has at most two factors, each of which is 0 below e^-104."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCompression:
    """How blocks are evicted from the KV cache of a request, or left unread. Raises RequestError for the field kv_compression.

    All layers and heads evict the same blocks, whole ones. The tokens up to the first eviction are computed with full
    attention. The first sink_tokens and the last recent_tokens are never evicted, rounded up to blocks.

    method             streaming: the oldest blocks (StreamingLLM). key_norm: the blocks with the largest mean norm of keys.
                       snapkv: the blocks that the last recent_tokens before the first eviction attend to least. adaptive: the
                       same, as many as leave the share attention_mass of the attention. bounds: none; runs of 16 tokens are not
                       read whose scores are, by bounds of them, more than gap below the highest score (Quest)
    budget_tokens      tokens that are kept; streaming and key_norm evict a block whenever there are more, snapkv once
    compression_ratio  in its place, of key_norm and snapkv: the share of the tokens that is evicted, once; 0 evicts nothing
    attention_mass     of adaptive, in (0, 1]
    sink_tokens        tokens at the start of the sequence that are kept
    recent_tokens      last tokens that are kept; with streaming all that the budget leaves are
    after_tokens       the first eviction follows this token of the prompt; None: its last one. bounds: later tokens skip runs
    gap                of bounds, in units of natural logarithms; None: EXACT_GAP, with which the output has the same bits
    """

    method: CompressionMethod
    budget_tokens: int | None = None
    compression_ratio: float | None = None
    attention_mass: float | None = None
    sink_tokens: int = 4
    recent_tokens: int = 32
    after_tokens: int | None = None
    gap: float | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise _error("method", f"must be one of {', '.join(METHODS)}", self.method)
        for name, least in (("budget_tokens", 1), ("after_tokens", 1), ("sink_tokens", 0), ("recent_tokens", 1)):
            value = getattr(self, name)
            is_missing = value is None and name in ("budget_tokens", "after_tokens")
            if not is_missing and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise _error(name, f"must be an integer >= {least}", value)
        ratio, mass = self.compression_ratio, self.attention_mass
        if ratio is not None and not (_is_number(ratio) and 0.0 <= ratio < 1.0):
            raise _error("compression_ratio", "must be a number >= 0 and < 1", ratio)
        if mass is not None and not (_is_number(mass) and 0.0 < mass <= 1.0):
            raise _error("attention_mass", "must be a number > 0 and <= 1", mass)
        self._check_size()
        self._check_gap()

    def _check_size(self) -> None:
        """Check that exactly one of the fields is given that say how much is kept, and that the method has it."""
        allowed = {
            "streaming": ("budget_tokens",),
            "adaptive": ("attention_mass",),
            "bounds": (),
        }.get(self.method, ("budget_tokens", "compression_ratio"))
        given = [name for name in ("budget_tokens", "compression_ratio", "attention_mass") if getattr(self, name) is not None]
        if not self.evicts and given:
            raise RequestError(
                f"kv_compression: method 'bounds' evicts nothing: leave out {' and '.join(given)}", "kv_compression"
            )
        if self.evicts and (len(given) != 1 or given[0] not in allowed):
            raise RequestError(
                f"kv_compression: method {self.method!r} needs {' or '.join(allowed)}, got {' and '.join(given) or 'neither'}",
                "kv_compression",
            )

    def _check_gap(self) -> None:
        if self.evicts:
            if self.gap is not None:
                raise _error("gap", "is of method 'bounds' only: leave it out", self.gap)
            return
        if self.gap is None:
            object.__setattr__(self, "gap", EXACT_GAP)
        if not (_is_number(self.gap) and 0.0 < cast("float", self.gap) < math.inf):
            raise _error("gap", "must be a number > 0", self.gap)
        if (self.sink_tokens, self.recent_tokens) != (4, 32):
            raise RequestError(
                "kv_compression: method 'bounds' has no sink_tokens and recent_tokens: leave them out", "kv_compression"
            )

    @property
    def evicts(self) -> bool:
        """Whether blocks are evicted."""
        return self.method != "bounds"

    def exact_len(self, num_prompt_tokens: int) -> int | None:
        """Return how many tokens have the keys and values of plain decoding if blocks are only left unread; None: all."""
        return self.first_len(num_prompt_tokens) if self.gap is not None and self.gap < EXACT_GAP else None

    @property
    def observes_attention(self) -> bool:
        """Whether the method reads the attention of the last recent_tokens before the first eviction."""
        return self.method in _OBSERVING

    @property
    def needs_scores(self) -> bool:
        """Whether blocks are chosen by what the worker says of them, and not by their places."""
        return self.method not in ("streaming", "bounds")

    @property
    def is_continuing(self) -> bool:
        """Whether blocks are evicted again as the sequence grows."""
        return self.method in ("streaming", "key_norm") and self.budget_tokens is not None

    def first_len(self, num_prompt_tokens: int) -> int:
        """Return after how many tokens the first eviction may follow."""
        return num_prompt_tokens if self.after_tokens is None else min(self.after_tokens, num_prompt_tokens)

    def least_budget(self, block_size: int) -> int:
        """Return the smallest budget of tokens that leaves something to choose: sinks, recent tokens and two blocks."""
        recent = 0 if self.method == "streaming" else self.recent_tokens
        return (-(-self.sink_tokens // block_size) + 2) * block_size + recent

    def budget(self, num_prompt_tokens: int, block_size: int) -> int | None:
        """Return how many tokens are kept; None: the attention decides."""
        if self.compression_ratio is not None:
            kept = math.ceil(self.first_len(num_prompt_tokens) * (1.0 - self.compression_ratio))
            return max(kept, self.least_budget(block_size))
        return self.budget_tokens

    def describe(self) -> str:
        """Return the method and how much it keeps, for people."""
        if self.budget_tokens is not None:
            return f"{self.method}, {self.budget_tokens} tokens"
        if self.compression_ratio is not None:
            return f"{self.method}, ratio {self.compression_ratio:g}"
        if self.gap is not None:
            return f"{self.method}, gap {self.gap:g}"
        return f"{self.method}, mass {self.attention_mass:g}"


def as_kv_compression(value: object) -> KvCompression:
    """Return a KvCompression that was given as such or as a mapping of its fields. Raises RequestError."""
    if isinstance(value, KvCompression):
        return value
    if not isinstance(value, Mapping):
        raise RequestError(
            "kv_compression must be a KvCompression or a dict of its fields, such as {'method': 'streaming', "
            f"'budget_tokens': 1024}}, got {type(value).__name__}",
            "kv_compression",
        )
    given = cast("Mapping[str, Any]", value)
    names = [field.name for field in fields(KvCompression)]
    unknown = [str(name) for name in given if name not in names]
    if unknown or "method" not in given:
        problem = f"does not have {', '.join(map(repr, unknown))}" if unknown else "needs 'method'"
        raise RequestError(f"kv_compression {problem}: its fields are {', '.join(names)}", "kv_compression")
    return KvCompression(**given)


def _error(name: str, allowed: str, got: object) -> RequestError:
    return RequestError(f"kv_compression: {name} {allowed}, got {got!r}", "kv_compression")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
