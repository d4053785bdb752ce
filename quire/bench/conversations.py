"""Conversations: the time to the first token of later turns, with and without KV tiers.

Several users talk in turn. What all conversations need together is several times the KV pool, so that the pool has lost the
history of a conversation when its next turn comes. The same turns run in a fresh engine for each case.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quire.base.errors import ConfigError, WorkerError
from quire.bench.provenance import Provenance, find_provenance
from quire.contracts.config import EngineConfig
from quire.contracts.sampling_params import SamplingParams
from quire.contracts.tier_stats import TierStats
from quire.engine.llm import LLM

_LEAST_USERS = 2
_SHOWN_MS = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationOptions:
    """What is measured.

    num_turns        of each conversation
    first_tokens     of the first prompt; turn_tokens of each later one, after the history
    output_tokens    of each answer
    working_set      tokens of all whole conversations, as a multiple of the KV pool; the number of users follows from it
    is_restarted     also the last turn alone, where there is a disk tier: after an engine that had run the turns before has
                     ended, and after it was killed (SIGKILL)
    """

    num_turns: int = 8
    first_tokens: int = 400
    turn_tokens: int = 40
    output_tokens: int = 16
    working_set: float = 4.0
    is_restarted: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"num_turns": 2, "first_tokens": 1, "turn_tokens": 1, "output_tokens": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ConfigError(f"{name} must be at least {value}, got {getattr(self, name)}")
        if not self.working_set > 0:
            raise ConfigError(f"working_set must be above 0, got {self.working_set}")

    @property
    def conversation_tokens(self) -> int:
        """Tokens of a whole conversation."""
        return self.first_tokens + (self.num_turns - 1) * self.turn_tokens + self.num_turns * self.output_tokens

    def num_users(self, pool_tokens: int) -> int:
        """Return how many conversations make the working set."""
        return max(_LEAST_USERS, round(self.working_set * pool_tokens / self.conversation_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTimes:
    """One case: "off", "tiers", "restarted" or "killed".

    first_token_s   of the turns after the first; of "restarted" and "killed" only of those after the restart
    off_s           the median of the same turns without tiers
    cached_share    of the prompt tokens of these turns
    is_same         the tokens are those of the case "off"
    """

    case: str
    first_token_s: list[float]
    off_s: float
    cached_share: float
    is_same: bool
    tiers: list[TierStats]

    @property
    def median_s(self) -> float:
        """The median time to the first token."""
        return statistics.median(self.first_token_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """The results of all cases."""

    model: str
    options: ConversationOptions
    num_users: int
    pool_tokens: int
    cases: list[TurnTimes]
    provenance: Provenance

    def describe(self) -> str:
        """Return the results as readable lines."""
        options = self.options
        lines = [
            f"{self.num_users} conversations of {options.num_turns} turns and {options.conversation_tokens} tokens; "
            f"the KV pool has {self.pool_tokens} tokens"
        ]
        for case in self.cases:
            same = "" if case.is_same else "; OTHER TOKENS"
            lines.append(
                f"{case.case:<10} median time to first token {case.median_s * _SHOWN_MS:.1f} ms, "
                f"{case.median_s / case.off_s:.2f} of that of the same turns without tiers; "
                f"{case.cached_share:.1%} of the prompts cached{same}"
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the results as JSON."""
        return json.dumps({**asdict(self), "medians": {case.case: case.median_s for case in self.cases}}, indent=2)


@dataclass(slots=True)
class _Trace:
    """What one case has measured: of each turn (user by user) the output, the time, and the tokens."""

    outputs: list[list[int]]
    times: list[float]
    num_cached: list[int]
    num_prompt: list[int]


def measure_conversations(config: EngineConfig, options: ConversationOptions) -> Conversations:
    """Run the conversations without tiers, with those of the configuration, and after a restart. Raises ConfigError.

    A disk tier is put into a new folder inside of kv_disk_dir, which is deleted at the end.
    """
    if not config.host_tier_bytes:
        raise ConfigError("quire bench conversations compares KV tiers: give --kv-host-bytes, or --kv-disk-dir")
    if config.data_parallel_size > 1:
        raise ConfigError(f"quire bench conversations measures one engine, got data_parallel_size {config.data_parallel_size}")
    config = replace(config, skip_tokenizer_init=True)
    plain = replace(config, kv_host_bytes=None, kv_disk_dir=None, kv_disk_bytes=None)
    users: list[list[list[int]]] = []
    pool_tokens = 0

    def prepare(llm: LLM) -> list[list[list[int]]]:
        nonlocal pool_tokens
        if not users:
            memory = llm.llm_engine.report.memory
            pool_tokens = memory.num_kv_blocks * memory.kv.block_size
            limit = min(memory.max_model_len, pool_tokens)
            if options.conversation_tokens > limit:
                raise ConfigError(f"a conversation has {options.conversation_tokens} tokens, but only {limit} fit: shorten it")
            users.extend(_make_turns(options, options.num_users(pool_tokens), llm.llm_engine.report.spec.vocab_size))
        return users

    folder = None
    if config.kv_disk_dir is not None:
        Path(config.kv_disk_dir).mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = tempfile.mkdtemp(prefix="quire-bench-", dir=config.kv_disk_dir)
        config = replace(config, kv_disk_dir=folder)
    try:
        off = _run(plain, options, prepare)
        cases = [_case("off", options, off, off, [])]
        trace, tiers = _with_stats(config, options, prepare, range(options.num_turns), None)
        cases.append(_case("tiers", options, trace, off, tiers))
        if folder is not None and options.is_restarted:
            last = options.num_turns - 1
            for name in ("restarted", "killed"):
                shutil.rmtree(folder)
                Path(folder).mkdir(mode=0o700)
                _run_apart(config, options, users, is_killed=name == "killed")
                trace, tiers = _with_stats(config, options, prepare, range(last, options.num_turns), off)
                cases.append(_case(name, options, trace, off, tiers, first=last))
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return Conversations(
        model=config.model,
        options=options,
        num_users=len(users),
        pool_tokens=pool_tokens,
        cases=cases,
        provenance=find_provenance(),
    )


def _make_turns(options: ConversationOptions, num_users: int, vocab_size: int) -> list[list[list[int]]]:
    """Return the tokens that each user adds in each turn."""
    rng = random.Random(options.seed)
    lengths = [options.first_tokens, *[options.turn_tokens] * (options.num_turns - 1)]
    return [[[rng.randrange(vocab_size) for _ in range(length)] for length in lengths] for _ in range(num_users)]


def _run(config: EngineConfig, options: ConversationOptions, prepare: Callable[[LLM], list[list[list[int]]]]) -> _Trace:
    return _with_stats(config, options, prepare, range(options.num_turns), None)[0]


def _run_apart(config: EngineConfig, options: ConversationOptions, users: list[list[list[int]]], *, is_killed: bool) -> None:
    """Run all turns but the last in a process of their own, which ends, or kills itself and so saves nothing at its end."""
    process = multiprocessing.get_context("spawn").Process(target=_run_most_turns, args=(config, options, users, is_killed))
    process.start()
    process.join()
    if process.exitcode != (-signal.SIGKILL if is_killed else 0):
        raise WorkerError(f"the engine of the turns before the restart ended with status {process.exitcode}")


def _run_most_turns(config: EngineConfig, options: ConversationOptions, users: list[list[list[int]]], is_killed: bool) -> None:
    def prepare(_: LLM) -> list[list[list[int]]]:
        return users

    def end() -> None:
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)

    _with_stats(config, options, prepare, range(options.num_turns - 1), None, end)


def _with_stats(
    config: EngineConfig,
    options: ConversationOptions,
    prepare: Callable[[LLM], list[list[list[int]]]],
    turns: range,
    before: _Trace | None,
    on_end: Callable[[], None] = lambda: None,
) -> tuple[_Trace, list[TierStats]]:
    """Run turns of all conversations, one request at a time; the answers of earlier turns are those of `before`.

    on_end is called before the engine is closed.
    """
    llm = LLM(config)
    try:
        users = prepare(llm)
        params = SamplingParams(temperature=0.0, max_tokens=options.output_tokens, ignore_eos=True)
        histories: list[list[int]] = [[] for _ in users]
        for turn in range(turns.start):
            for user, prompt in enumerate(users):
                assert before is not None
                histories[user] += [*prompt[turn], *before.outputs[turn * len(users) + user]]
        trace = _Trace([], [], [], [])
        for turn in turns:
            for user, prompt in enumerate(users):
                histories[user] += prompt[turn]
                begin = time.perf_counter()
                output = llm.generate([{"prompt_token_ids": histories[user]}], params, use_tqdm=False)[0]
                metrics = output.metrics
                # All of the request's waiting counts, also that for the disk.
                elapsed_s = time.perf_counter() - begin
                decode_s = 0.0 if metrics is None or metrics.decode_time_s is None else metrics.decode_time_s
                trace.times.append(elapsed_s - decode_s)
                trace.num_cached.append(0 if metrics is None else metrics.num_cached_tokens)
                trace.num_prompt.append(len(histories[user]))
                trace.outputs.append(list(output.outputs[0].token_ids))
                histories[user] += trace.outputs[-1]
        on_end()
        return trace, llm.llm_engine.stats.tiers
    finally:
        llm.close()


def _case(
    name: str, options: ConversationOptions, trace: _Trace, off: _Trace, tiers: list[TierStats], first: int = 0
) -> TurnTimes:
    num_users = len(off.outputs) // options.num_turns
    skipped = num_users if first == 0 else 0  # first turns have no history
    return TurnTimes(
        case=name,
        first_token_s=trace.times[skipped:],
        off_s=statistics.median(off.times[(first or 1) * num_users :]),
        cached_share=sum(trace.num_cached[skipped:]) / sum(trace.num_prompt[skipped:]),
        is_same=trace.outputs == off.outputs[first * num_users :],
        tiers=tiers,
    )
