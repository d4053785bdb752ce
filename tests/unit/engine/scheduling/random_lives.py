"""Random pools, requests and mishaps, for tests that let a scheduler live through them."""

from dataclasses import replace

import pytest
from reference_model import EOS, STOP_STRING, VOCAB_SIZE, make_config, make_request


def seeds(first, count, num_fast):
    """Return the first `num_fast` of `count` seeds as parameters of a test, and as slow ones every third of the others."""
    fast = range(first, first + num_fast)
    return [*fast, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(fast.stop, first + count, 3))]


def random_config(rng):
    max_num_seqs = rng.choice([1, 2, 3, 4, 8])
    budget = max_num_seqs + rng.choice([0, 1, 3, 8, 40])
    return make_config(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=rng.choice([0, 0, 1, 3, 7]),
        max_model_len=rng.choice([12, 30, 48]),
        block_size=rng.choice([1, 2, 3, 4, 8]),
        num_kv_blocks=rng.choice([3, 6, 9, 12, 20, 40]),
        enable_prefix_caching=rng.random() < 0.75,
        policy=rng.choice(["fcfs", "priority"]),
        rope_switch_len=rng.choice([None, None, 5, 8, 21]),
    )


def with_window(config, rng):
    """Return a configuration with a window group, whose pool is as small as it may be, or a little larger."""
    config = replace(config, window_tokens=rng.choice([1, 2, 3, 5, 8, 16]), num_window_blocks=1000)
    least = min(config.peak_window_blocks, config.num_kv_blocks)
    return replace(config, num_window_blocks=least + rng.choice([0, 0, 1, 3, 9]))


def with_places(config, rng):
    """Return a configuration whose blocks are at several places."""
    num_places, chunk = rng.choice([2, 3, 4]), rng.choice([1, 1, 2, 3])
    unit = num_places * chunk
    num_blocks = -(-config.num_kv_blocks // unit) * unit
    return replace(config, num_block_places=num_places, block_chunk=chunk, num_kv_blocks=num_blocks)


def with_homes(config, rng):
    """Return a configuration with homes of sequences."""
    num_homes = rng.choice([2, 3, 4])
    return replace(config, num_homes=num_homes, num_kv_blocks=num_homes * config.num_kv_blocks)


def random_request(rng, name, prefixes):
    """Return a request; of three that follow one another, one is in the background."""
    tail = [rng.randrange(3) for _ in range(rng.choice([0, 1, 2, 5, 12]))]
    prefix = rng.choice(prefixes)
    prompt = (prefix[: rng.randint(0, len(prefix))] if rng.random() < 0.5 else prefix) + tail
    n = rng.choice([1, 1, 1, 2, 3, 4])
    max_tokens = rng.choice([None, 1, 2, 5, 12, 30])
    if rng.random() < 0.2:
        salt, pooling = rng.choice(["", "", "tenant"]), rng.choice(["last", "mean"])
        return make_request(name, prompt, salt=salt, pooling=pooling, background=name % 3 == 0, priority=rng.randint(-2, 2))
    return make_request(
        name,
        prompt,
        seed=rng.randrange(3),
        salt=rng.choice(["", "", "tenant"]),
        arrival=float(rng.randrange(100)) if rng.random() < 0.2 else 0.0,
        eos={EOS} if rng.random() < 0.7 else frozenset(),
        background=name % 3 == 0,
        n=n,
        best_of=n + 1 if rng.random() < 0.1 else None,
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, min(4, max_tokens or 4)),
        ignore_eos=rng.random() < 0.1,
        stop=STOP_STRING if rng.random() < 0.2 else None,
        stop_token_ids=[rng.randrange(VOCAB_SIZE)] if rng.random() < 0.3 else None,
        logprobs=rng.choice([None, None, 2]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
        priority=rng.randint(-2, 2),
    )


def fail_some(rng, result, plan):
    """Let one sequence of the step fail, as a worker does when its logits are not finite."""
    if not plan.num_scheduled_tokens:
        return result
    victim = rng.choice(list(plan.num_scheduled_tokens))
    sampled = {key: tokens for key, tokens in result.sampled.items() if key != victim}
    pooled = {key: vector for key, vector in result.pooled.items() if key != victim}
    return replace(result, sampled=sampled, pooled=pooled, errors={victim: "logits are not finite"})
