"""A model that is a hash of the tokens so far, and a request that is computed alone with it: the oracle of the scheduler."""

from __future__ import annotations

from zlib import crc32

from quire.base.ids import RequestId
from quire.base.seeds import mix_seed
from quire.contracts.pooling_params import PoolingParams
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.contracts.scheduler_config import SchedulerConfig
from quire.engine.scheduling.admission import max_total_tokens
from quire.engine.scheduling.eviction import EvictionRule

VOCAB_SIZE = 40
EOS = 0
STOP_STRING = "stop!"


def make_config(**options) -> SchedulerConfig:
    defaults = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "block_size": 4,
        "num_kv_blocks": 32,
    }
    return SchedulerConfig(**{**defaults, **options})


def make_request(
    name, prompt, *, seed=0, salt="", arrival=0.0, eos=frozenset[int](), pooling=None, background=False, keep_s=0.0, **params
):
    """Return a request; with `pooling`, the name of one, for an embedding, of which `params` are the PoolingParams."""
    prompt_token_ids = tuple(range(100, 100 + prompt)) if isinstance(prompt, int) else tuple(prompt)
    return Request(
        request_id=RequestId(str(name)),
        prompt_token_ids=prompt_token_ids,
        params=SamplingParams(**(params if pooling is None else {})),
        pooling=None if pooling is None else PoolingParams(pooling=pooling, **params),
        seed=seed,
        eos_token_ids=frozenset(eos),
        arrival_time_s=arrival,
        cache_salt=salt,
        is_background=background,
        cache_retention_s=keep_s,
    )


def extend_chain(chain: list[int], token_ids, salt: str) -> None:
    """Append to `chain` the fake KV of the tokens that it does not cover yet."""
    last = chain[-1] if chain else crc32(salt.encode())
    for token_id in token_ids[len(chain) :]:
        last = hash((last, token_id))
        chain.append(last)


def kv_root(request: Request, uses_short_rope: bool) -> str:
    """Return what the fake KV of a request starts from."""
    root = f"short rope {request.cache_salt}" if uses_short_rope else request.cache_salt
    return f"adapter {request.adapter_key} {root}" if request.adapter_key else root


def sample(request: Request, choice: int, chain: list[int], evicted: tuple = ()) -> int:
    """Return the token after the prefix of `chain`: a function of the request, the choice, the prefix and what was evicted."""
    return mix_seed(mix_seed(request.seed, choice) ^ chain[-1] ^ (hash(evicted) if evicted else 0), len(chain)) % VOCAB_SIZE


def score(values: list[int]) -> float:
    """Return the fake score of a block: a function of its KV."""
    return float(hash(tuple(values)) % 97)


def evictions(request: Request, chain: list[int], block_size: int) -> tuple:
    """Return the evictions (length, indices) of a request that runs alone, before the token after `chain`."""
    rule = EvictionRule.of(request.params.kv_compression, len(request.prompt_token_ids), block_size)
    values: list[int] = []
    evicted: tuple = ()
    num_dropped = 0
    for position in range(len(chain) - 1 if rule is not None else 0):
        values.append(hash((chain[position], evicted)) if evicted else chain[position])
        if position + 1 != rule.next_len(position, num_dropped):
            continue
        count = rule.num_scored(position + 1, num_dropped)
        scores = [score(values[index * block_size : (index + 1) * block_size]) for index in range(count)]
        indices = rule.choose(position + 1, num_dropped, scores if rule.compression.needs_scores else None)
        values = [value for place, value in enumerate(values) if place // block_size not in indices]
        num_dropped += len(indices) * block_size
        if indices:
            evicted += ((position + 1, indices),)
    return evicted


def pool(request: Request, chain: list[int]) -> tuple[float, ...]:
    """Return the fake vector of a prompt, given the fake KV of the tokens that are pooled."""
    return tuple(float(value % 1009) for value in (chain if request.pooling.needs_every_token else chain[-1:]))


def is_stop_string(request: Request, token_id: int) -> bool:
    """Stand in for the text layer: some tokens complete the stop string."""
    return bool(request.params.stop) and token_id % 13 == 5


def reference_run(request: Request, choice: int, config: SchedulerConfig):
    """Return (output tokens, finish reason, stop reason) of a choice that runs alone, by the words of the contract."""
    tokens, chain = list(request.prompt_token_ids), []
    if request.pooling is not None:
        return [], "stop", None
    num_prompt, params = len(tokens), request.params
    limit = min(config.max_model_len, config.num_sequence_blocks * config.block_size + 1)
    if params.max_tokens is not None:
        limit = min(limit, num_prompt + params.max_tokens)
    if params.kv_compression is not None:  # which may go beyond the pool
        limit = max_total_tokens(request, config)
    is_short = None
    while True:
        was_short, is_short = is_short, config.rope_switch_len is not None and len(tokens) <= config.rope_switch_len
        if is_short is not was_short:
            chain = []
        extend_chain(chain, tokens, kv_root(request, is_short))
        token = sample(request, choice, chain, evictions(request, chain, config.block_size))
        tokens.append(token)
        output = tokens[num_prompt:]
        if is_stop_string(request, token):
            return output, "stop", STOP_STRING
        if len(output) >= params.min_tokens:
            if token in request.eos_token_ids and not params.ignore_eos:
                return output, "stop", None
            if token in params.stop_token_ids:
                return output, "stop", token
        if len(tokens) == limit:
            return output, "length", None
