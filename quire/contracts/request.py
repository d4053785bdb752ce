"""Request: what the engine takes in, complete and validated; FinishReason: how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from quire.base.errors import RequestError
from quire.base.ids import RequestId
from quire.contracts.constraint import Grammar
from quire.contracts.lora import LoRARequest
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
    output_token_ids     the output so far of a request that another engine began: its only sequence starts as after a
                         preemption, and what follows is what that engine would have sampled
    lora                 its LoRA adapter; None: the base model
    adapter_key          AdapterReport.key of that adapter once it is loaded, which the engine sets; "": the base model
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
    output_token_ids: Sequence[int] = ()
    lora: LoRARequest | None = None
    adapter_key: str = ""

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


def check_output_tokens(request: Request, vocab_size: int | None = None) -> None:
    """Raise RequestError for a request that cannot go on from its output_token_ids."""
    token_ids, params = request.output_token_ids, request.params
    if not token_ids:
        return
    if params.num_sequences > 1 or params.logprobs is not None or params.prompt_logprobs is not None:
        raise RequestError(
            "output_token_ids: only a request with one choice and without log probabilities can go on from an output",
            "output_token_ids",
        )
    if request.pooling is not None:
        raise RequestError("output_token_ids: a pooling request has no output", "output_token_ids")
    if vocab_size is not None and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise RequestError(f"output_token_ids: token ids must be from 0 to {vocab_size - 1}", "output_token_ids")
    if not request.ending_token_ids.isdisjoint(token_ids):
        raise RequestError("output_token_ids: the output has ended: it contains a token that ends it", "output_token_ids")
    if params.max_tokens is not None and len(token_ids) >= params.max_tokens:
        raise RequestError(
            f"output_token_ids: the output has {len(token_ids)} tokens, and max_tokens is {params.max_tokens}: nothing is left",
            "output_token_ids",
        )
