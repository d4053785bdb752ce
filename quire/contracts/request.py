"""Request: what the engine takes in, complete and validated; FinishReason: how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from quire.base.errors import RequestError
from quire.base.ids import RequestId
from quire.contracts.constraint import Grammar
from quire.contracts.pooling_params import PoolingParams
from quire.contracts.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request after tokenising; nothing in it refers to text but `prompt`, which is only handed back.

    prompt_token_ids     at least one token, every id below the vocabulary size
    pooling              the request asks for the pooled hidden state of its prompt instead of tokens; `params` are then the
                         default ones, and nothing is sampled
    seed                 64-bit; choice i samples with mix_seed(seed, i)
    eos_token_ids        the model's end-of-sequence tokens
    arrival_time_s       of time.monotonic(); orders requests of equal priority together with the order of arrival
    grammar              params.constraint compiled, without what params.bad_words bans; None until the engine has done so
    lists_allowed        of the most likely tokens, list those alone that the grammar allows; their log probabilities are those
                         among all
    cache_salt           requests share cached prefixes only with requests of the same salt
    cache_retention_s    above 0: KV tiers save the full blocks of the prompt as soon as they are computed, also of one that
                         comes once, and keep them as if they were last used so many seconds later
    is_background        runs behind all that are not, whatever the policy, and gives them its seat and blocks when they come
    """

    request_id: RequestId
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int
    pooling: PoolingParams | None = None
    prompt: str | None = None
    eos_token_ids: frozenset[int] = frozenset()
    arrival_time_s: float = 0.0
    cache_salt: str = field(default="")
    grammar: Grammar | None = field(default=None, compare=False, repr=False)
    lists_allowed: bool = False
    is_background: bool = False
    cache_retention_s: float = 0.0

    @property
    def priority(self) -> int:
        """Lower runs first under the priority policy."""
        return self.params.priority if self.pooling is None else self.pooling.priority

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """The tokens that end an output: end-of-sequence, unless ignored, and the request's own stop tokens."""
        eos = frozenset[int]() if self.params.ignore_eos else self.eos_token_ids
        return eos | frozenset(self.params.stop_token_ids or ())


def check_prompt_length(num_prompt: int, max_model_len: int, is_pooling: bool) -> None:
    """Raise RequestError for a prompt that the model's context does not hold, with room for a token where one is generated."""
    if is_pooling and num_prompt > max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, but max_model_len is {max_model_len}: shorten the prompt, or raise "
            "max_model_len where the model takes more",
            "prompt",
        )
    if not is_pooling and num_prompt >= max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, but with max_model_len {max_model_len} at most "
            f"{max_model_len - 1} leave room for an output token: shorten the prompt, or raise "
            "max_model_len where the model takes more",
            "prompt",
        )
