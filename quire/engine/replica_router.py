"""ReplicaRouter: which of several equal engines a request waits least in. Loads no torch.

A replica's predicted wait is counted in prompt tokens: those that its requests have still to compute, those of the new request
that its prefix cache is not known to hold, and the output tokens that its sequences still have to decode next to the new one,
as each of these sequences adds a token to every step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.contracts.block_keys import block_keys
from quire.contracts.request import Request

MAX_KNOWN_BLOCKS = 1 << 16
"""Blocks of one replica's prefix cache that are remembered at most: about 8 MB."""

_FIRST_OUTPUT_TOKENS = 128.0
"""Expected of a sequence until some have ended."""

_LEARNING_RATE = 0.05
_FED_AHEAD_SHARE = 8
_FED_AHEAD_LEAST = 4


class SentPrefixes:
    """The keys of whole prompt blocks that a replica was sent, the least recently used forgotten first."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def num_known(self, keys: Iterable[int]) -> int:
        """Return how many of a prompt's keys, from the first on, were sent."""
        num_known = 0
        for key in keys:
            if key not in self._keys:
                break
            num_known += 1
        return num_known

    def note(self, keys: Sequence[int]) -> None:
        """Note that a prompt was sent. Its last blocks count as the oldest, as in the engine, which reuses those first."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._max_blocks:
            self._keys.popitem(last=False)


@dataclass(slots=True)
class _Work:
    """What is left of one request.

    num_prompt_tokens  to be computed
    num_expected       output tokens of each sequence, as far as one can tell
    num_output_tokens  of all sequences, so far
    """

    num_prompt_tokens: int
    num_sequences: int
    num_expected: float
    is_background: bool
    is_pooling: bool
    num_output_tokens: int = 0

    def decode_tokens(self, num_at_most: float) -> float:
        """Return the output tokens that its sequences write during so many steps."""
        left = max(self.num_expected - self.num_output_tokens / self.num_sequences, 1.0)
        return 0.0 if self.is_pooling else self.num_sequences * min(left, num_at_most)


class _Replica:
    """What is known of one replica. speed: of its threads, in comparison with the others."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self.max_num_seqs = 0
        self.prefixes = SentPrefixes(0)
        self.requests: dict[str, _Work] = {}

    @property
    def num_sequences(self) -> int:
        return sum(work.num_sequences for work in self.requests.values())

    def has_room(self, num_sequences: int, is_background: bool) -> bool:
        """Return whether it runs so many more, or has them as the next; what gives way to others takes no room from them."""
        held = [work for work in self.requests.values() if is_background or not work.is_background]
        most = self.max_num_seqs + max(_FED_AHEAD_LEAST, self.max_num_seqs // _FED_AHEAD_SHARE)
        return not held or sum(work.num_sequences for work in held) + num_sequences <= most

    def wait(self, num_new_tokens: int, num_decode_steps: float, is_background: bool) -> float:
        """Return the predicted wait of a request with so many prompt tokens that are not cached."""
        ahead = [work for work in self.requests.values() if is_background or not work.is_background]
        queued = sum(work.num_prompt_tokens for work in ahead)
        decoding = sum(work.decode_tokens(num_decode_steps) for work in ahead)
        return (queued + num_new_tokens + decoding) / self.speed


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes. num_cached_tokens: of its prompt, as far as is known."""

    replica: int
    num_cached_tokens: int
    keys: list[int]


class ReplicaRouter:
    """Keeps the books of all replicas, which their owner tells it; belongs to one thread."""

    def __init__(self, speeds: Sequence[float]) -> None:
        self._replicas = [_Replica(speed) for speed in speeds]
        self._owners: dict[str, int] = {}
        self._block_size = 0
        self._mean_output_tokens = _FIRST_OUTPUT_TOKENS

    def open(self, replica: int, *, max_num_seqs: int, block_size: int, num_kv_blocks: int) -> None:
        """Note that a replica takes requests; num_kv_blocks: 0 where it keeps no prefixes."""
        found = self._replicas[replica]
        found.max_num_seqs = max_num_seqs
        found.prefixes = SentPrefixes(min(num_kv_blocks, MAX_KNOWN_BLOCKS))
        self._block_size = block_size if num_kv_blocks else 0

    def close(self, replica: int) -> None:
        """Forget what a replica had, which has ended."""
        found = self._replicas[replica]
        for request_id in found.requests:
            self._owners.pop(request_id, None)
        found.requests.clear()
        found.prefixes = SentPrefixes(0)

    def num_requests(self, replica: int) -> int:
        """Return how many requests a replica has."""
        return len(self._replicas[replica].requests)

    def owner_of(self, request_id: str) -> int | None:
        """Return the replica that has a request; None for one that has ended."""
        return self._owners.get(request_id)

    def has_room(self, replica: int, request: Request) -> bool:
        """Return whether a replica runs a request at once, or has it as one of the next few."""
        return self._replicas[replica].has_room(request.params.num_sequences, request.is_background)

    def choose(self, request: Request, candidates: Sequence[int]) -> Route:
        """Return where a request waits least, among at least one candidate; those without room only where none has any.

        Where several are equal, the one with fewer sequences, then with fewer known prefixes, so that caches fill evenly.
        """
        num_tokens, is_background = len(request.prompt_token_ids), request.is_background
        keys = self._keys_of(request)
        roomy = [index for index in candidates if self.has_room(index, request)]
        num_steps = 0.0 if request.pooling is not None else self._expected(request)

        def rank(index: int) -> tuple[float, int, int, int]:
            replica = self._replicas[index]
            wait = replica.wait(num_tokens - self._num_cached(index, request, keys), num_steps, is_background)
            return wait, replica.num_sequences, len(replica.prefixes), index

        best = min(roomy or candidates, key=rank)
        return Route(best, self._num_cached(best, request, keys), keys)

    def add(self, request: Request, route: Route) -> None:
        """Note that a request was sent where `choose` said."""
        replica = self._replicas[route.replica]
        replica.prefixes.note(route.keys)
        replica.requests[request.request_id] = _Work(
            num_prompt_tokens=len(request.prompt_token_ids) - route.num_cached_tokens,
            num_sequences=request.params.num_sequences,
            num_expected=self._expected(request),
            is_background=request.is_background,
            is_pooling=request.pooling is not None,
        )
        self._owners[request.request_id] = route.replica

    def note_prefill(self, request_id: str, num_tokens: int) -> None:
        """Note that so many of a request's prompt tokens were computed."""
        work = self._work_of(request_id)
        if work is not None:
            work.num_prompt_tokens = max(work.num_prompt_tokens - num_tokens, 0)

    def note_output(self, request_id: str, num_tokens: int) -> None:
        """Note output tokens of a request: its prompt is then computed."""
        work = self._work_of(request_id)
        if work is not None and num_tokens:
            work.num_prompt_tokens = 0
            work.num_output_tokens += num_tokens

    def end(self, request_id: str, *, is_complete: bool = True) -> None:
        """Forget a request; is_complete: its output ended by itself, so that its length says what to expect."""
        owner = self._owners.pop(request_id, None)
        work = None if owner is None else self._replicas[owner].requests.pop(request_id, None)
        if work is not None and is_complete and work.num_output_tokens:
            length = work.num_output_tokens / work.num_sequences
            self._mean_output_tokens += _LEARNING_RATE * (length - self._mean_output_tokens)

    def _work_of(self, request_id: str) -> _Work | None:
        owner = self._owners.get(request_id)
        return None if owner is None else self._replicas[owner].requests.get(request_id)

    def _expected(self, request: Request) -> float:
        most = request.params.max_tokens
        return self._mean_output_tokens if most is None else min(self._mean_output_tokens, float(most))

    def _keys_of(self, request: Request) -> list[int]:
        return block_keys(request.cache_salt, request.prompt_token_ids, self._block_size) if self._block_size else []

    def _num_cached(self, index: int, request: Request, keys: list[int]) -> int:
        """Return the prompt tokens that a replica need not compute: never the last one, and none where all are asked about."""
        needs_all = request.pooling is not None and request.pooling.needs_every_token
        if needs_all or request.params.prompt_logprobs is not None or not self._block_size:
            return 0
        most = (len(request.prompt_token_ids) - 1) // self._block_size
        return self._replicas[index].prefixes.num_known(keys[:most]) * self._block_size
