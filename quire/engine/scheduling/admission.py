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
from quire.contracts.config import SchedulerConfig
from quire.contracts.request import Request, check_prompt_length
from quire.engine.scheduling.sequence import OrderKey, Sequence, SequenceStatus


def check_servable(request: Request, config: SchedulerConfig) -> None:
    """Raise RequestError if a sequence of the request could never end in this pool."""
    num_prompt = len(request.prompt_token_ids)
    num_slots = config.num_kv_blocks * config.block_size
    pool = f"the KV pool holds {num_slots} tokens ({config.num_kv_blocks} blocks of {config.block_size})"
    if num_prompt == 0:
        raise RequestError("the prompt has 0 tokens: at least 1 is needed", "prompt")
    check_prompt_length(num_prompt, config.max_model_len, request.pooling is not None)
    if num_prompt > num_slots:
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
    max_tokens = request.params.max_tokens
    if request.pooling is not None or max_tokens is None:
        return
    num_needed = min(num_prompt + max_tokens, config.max_model_len) - 1
    if num_needed > num_slots:
        raise RequestError(
            f"{num_prompt} prompt tokens and max_tokens {max_tokens} need room for {num_needed} tokens, but {pool}: "
            f"lower max_tokens to {num_slots + 1 - num_prompt}, leave it None, or raise num_kv_blocks",
            "max_tokens",
        )


def max_total_tokens(request: Request, config: SchedulerConfig) -> int:
    """Return the number of tokens, prompt and output together, at which a sequence of a servable request ends.

    A pooling request ends with its prompt, before it reaches that number.
    """
    if request.pooling is not None:
        return len(request.prompt_token_ids) + 1
    longest = min(config.max_model_len, config.num_kv_blocks * config.block_size + 1)
    max_tokens = request.params.max_tokens
    return longest if max_tokens is None else min(longest, len(request.prompt_token_ids) + max_tokens)


def new_sequence(
    request: Request, config: SchedulerConfig, sequence_id: SequenceId, arrival: int, choice: int, now: float
) -> Sequence:
    """Return a choice of a servable request, which is WAITING, or HELD until choice 0 has computed the prompt."""
    has_prompt_logprobs = choice == 0 and request.params.prompt_logprobs is not None
    switch_len = config.rope_switch_len
    return Sequence(
        sequence_id=sequence_id,
        request=request,
        choice=choice,
        order_key=order_key(config.policy, request, arrival, choice),
        max_total_tokens=max_total_tokens(request, config),
        ending_token_ids=request.ending_token_ids,
        next_prompt_logprob=1 if has_prompt_logprobs else len(request.prompt_token_ids),
        token_ids=list(request.prompt_token_ids),
        added_s=now,
        status=SequenceStatus.WAITING if choice == 0 else SequenceStatus.HELD,
        short_rope_len=None if switch_len is None or len(request.prompt_token_ids) > switch_len else switch_len,
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
