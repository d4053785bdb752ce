"""Which requests can be served at all, and how long their sequences may become.

The KV of the last output token is never computed: a sequence that ends with T tokens needs room for T - 1. An embedding
has no output token: its prompt may be as long as max_model_len, and needs room for all of it. A request is
accepted if each of its sequences, alone in the pool, can reach its end; so there is always one that can continue.

An explicit max_tokens is a promise: if the pool cannot hold it, the request is refused. Without max_tokens the output may
become as long as max_model_len and the pool allow, and then ends with "length". Where max_tokens exceeds
max_model_len, max_model_len decides ("length" again), as users of other engines expect.

The order of sequences under a policy decides who is admitted first, who runs first, and who is preempted:

fcfs      earliest arrival first (the request's arrival time, then the order of `add`, then the choice)
priority  lowest priority value first, then as fcfs

Both queues are kept in this order, and the last running sequence is preempted: the youngest under fcfs; the one with the
highest value, and of those the youngest, under priority. A preempted sequence keeps its key and thus returns to the front of
the queue. Under both policies, requests in the background come after all others.

Admission preempts only requests in the background, under either policy. A request of low value waits for a seat and for blocks
like any other, only before the rest. Preemption costs the victim its whole prefix, and happens only where a running sequence
could not take its next token otherwise, or to a request in the background.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from quire.base.errors import RequestError
from quire.base.ids import SequenceId
from quire.contracts.request import Request, check_output_tokens, check_prompt_length
from quire.contracts.scheduler_config import SchedulerConfig
from quire.engine.scheduling.eviction import EvictionRule
from quire.engine.scheduling.sequence import OrderKey, Sequence, SequenceStatus
from quire.engine.scheduling.window_blocks import WindowLimits


def check_servable(request: Request, config: SchedulerConfig) -> None:
    """Raise RequestError if a sequence of the request could never end in this pool."""
    num_prompt = len(request.prompt_token_ids)
    num_slots = config.num_sequence_blocks * config.block_size
    where = "the KV pool holds" if config.num_homes == 1 else f"the KV pool of each of {config.num_homes} homes holds"
    pool = f"{where} {num_slots} tokens ({config.num_sequence_blocks} blocks of {config.block_size})"
    if num_prompt == 0:
        raise RequestError("the prompt has 0 tokens: at least 1 is needed", "prompt")
    check_prompt_length(num_prompt, config.max_model_len, request.pooling is not None)
    rule = _check_compression(request, config)
    if _peak_tokens(rule, num_prompt) > num_slots:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, but {pool}: shorten the prompt or raise num_kv_blocks", "prompt"
        )
    if config.computes_whole_prompts and num_prompt > config.max_num_batched_tokens:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, but a step has {config.max_num_batched_tokens} (max_num_batched_tokens), and "
            "this model computes a prompt in one step, as its tokens attend in both directions: shorten the prompt, set "
            "truncate_prompt_tokens, or raise max_num_batched_tokens",
            "prompt",
        )
    check_output_tokens(request)
    num_known = num_prompt + len(request.output_token_ids)
    if request.output_token_ids and num_known >= _longest(rule, config):
        raise RequestError(
            f"output_token_ids: the prompt and the output have {num_known} tokens, but max_model_len is "
            f"{config.max_model_len} and {pool}: nothing is left",
            "output_token_ids",
        )
    max_tokens = request.params.max_tokens
    if request.pooling is not None or max_tokens is None:
        return
    num_needed = min(num_prompt + max_tokens, config.max_model_len) - 1
    num_held = _peak_tokens(rule, num_needed)
    if num_held > num_slots:
        raise RequestError(
            f"{num_prompt} prompt tokens and max_tokens {max_tokens} need room for {num_held} tokens, but {pool}: "
            f"lower max_tokens to {num_slots + 1 - num_prompt}, leave it None, or raise num_kv_blocks",
            "max_tokens",
        )


def max_total_tokens(request: Request, config: SchedulerConfig) -> int:
    """Return the number of tokens, prompt and output together, at which a sequence of a servable request ends.

    A pooling request ends with its prompt, before it reaches that number.
    """
    if request.pooling is not None:
        return len(request.prompt_token_ids) + 1
    longest = _longest(eviction_rule(request, config), config)
    max_tokens = request.params.max_tokens
    return longest if max_tokens is None else min(longest, len(request.prompt_token_ids) + max_tokens)


def eviction_rule(request: Request, config: SchedulerConfig) -> EvictionRule | None:
    """Return when a sequence of a request loses blocks; None: it keeps all."""
    return EvictionRule.of(request.params.kv_compression, len(request.prompt_token_ids), config.block_size)


def _check_compression(request: Request, config: SchedulerConfig) -> EvictionRule | None:
    """Return the rule of a request. Raises RequestError for a compression that this scheduler cannot do."""
    compression = request.params.kv_compression
    if compression is None or not compression.evicts or request.pooling is not None:
        return None
    refusals = {
        "a model with sliding windows, whose KV has a pool of its own": config.window_tokens is not None,
        "a model with a recurrent state": config.num_state_checkpoints is not None,
        "a model whose tokens attend in both directions": config.computes_whole_prompts,
        "pipeline stages": config.num_pipeline_stages > 1,
    }
    for reason, is_refused in refusals.items():
        if is_refused:
            raise RequestError(f"kv_compression is not supported with {reason}: leave it out", "kv_compression")
    least = compression.least_budget(config.block_size)
    if compression.budget_tokens is not None and compression.budget_tokens < least:
        raise RequestError(
            f"kv_compression: budget_tokens must be at least {least} with blocks of {config.block_size} tokens, sink_tokens "
            f"{compression.sink_tokens} and recent_tokens {compression.recent_tokens}, got {compression.budget_tokens}",
            "kv_compression",
        )
    return eviction_rule(request, config)


def _longest(rule: EvictionRule | None, config: SchedulerConfig) -> int:
    """Return the number of tokens, the last of which is not computed, that a sequence can reach."""
    num_slots = config.num_sequence_blocks * config.block_size
    num_computed = num_slots if rule is None else rule.longest(num_slots)
    return config.max_model_len if num_computed is None else min(config.max_model_len, num_computed + 1)


def _peak_tokens(rule: EvictionRule | None, num_tokens: int) -> int:
    return num_tokens if rule is None else rule.peak_tokens(num_tokens)


def window_limits(config: SchedulerConfig) -> WindowLimits | None:
    """Return the size of the window group; None: there is none."""
    if config.window_tokens is None:
        return None
    return WindowLimits(config.num_window_blocks, config.window_tokens, config.peak_window_blocks)


def new_sequence(
    request: Request, config: SchedulerConfig, sequence_id: SequenceId, arrival: int, choice: int, now: float
) -> Sequence:
    """Return a choice of a servable request, which is WAITING, or HELD until choice 0 has computed the prompt."""
    has_prompt_logprobs = choice == 0 and request.params.prompt_logprobs is not None
    switch_len, compression = config.rope_switch_len, request.params.kv_compression
    token_ids = [*request.prompt_token_ids, *request.output_token_ids]
    return Sequence(
        sequence_id=sequence_id,
        request=request,
        choice=choice,
        order_key=order_key(config.policy, request, arrival, choice),
        max_total_tokens=max_total_tokens(request, config),
        ending_token_ids=request.ending_token_ids,
        next_prompt_logprob=1 if has_prompt_logprobs else len(request.prompt_token_ids),
        token_ids=token_ids,
        added_s=now,
        status=SequenceStatus.WAITING if choice == 0 else SequenceStatus.HELD,
        short_rope_len=None if switch_len is None or len(token_ids) > switch_len else switch_len,
        eviction=eviction_rule(request, config),
        exact_len=None if compression is None else compression.exact_len(len(request.prompt_token_ids)),
    )


_BACKGROUND = 2**32
"""Above all priorities."""


def _fcfs_key(request: Request, arrival: int, choice: int) -> OrderKey:
    return (_BACKGROUND * request.is_background, request.arrival_time_s, arrival, choice)


def _priority_key(request: Request, arrival: int, choice: int) -> OrderKey:
    return (request.priority + _BACKGROUND * request.is_background, request.arrival_time_s, arrival, choice)


_ORDERS: dict[str, Callable[[Request, int, int], OrderKey]] = {"fcfs": _fcfs_key, "priority": _priority_key}


def order_key(policy: Literal["fcfs", "priority"], request: Request, arrival: int, choice: int) -> OrderKey:
    """Return the key by which a sequence is sorted, smallest first; unique, as `arrival` numbers the requests."""
    return _ORDERS[policy](request, arrival, choice)
