"""RequestFactory: makes a validated Request from a caller's arguments."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Self

from quire.base.errors import RequestError
from quire.base.ids import RequestId
from quire.base.seeds import mix_seed
from quire.contracts.config import EngineConfig
from quire.contracts.lora import LoRARequest
from quire.contracts.memory import ModelReport
from quire.contracts.pooler_spec import PoolerSpec
from quire.contracts.pooling_params import PoolingParams
from quire.contracts.request import Request, check_output_tokens
from quire.contracts.sampling_params import SamplingParams
from quire.engine.kv_compression import bounds_refusal, check_compression, compression_refusal, score_refusal
from quire.text.text_pairs import encode_texts
from quire.text.tokenizer import Tokenizer

PromptLike = str | list[int] | tuple[int, ...] | dict[str, Any]
"""Text, token ids, or a dict with "prompt" or "prompt_token_ids" and optionally "cache_salt".

With both, the token ids are the prompt, and the text is only returned in the output."""


def check_request_id(request_id: object) -> None:
    """Raise RequestError unless the id is a non-empty string."""
    if not isinstance(request_id, str) or not request_id:
        raise RequestError(f"request_id must be a non-empty string, got {request_id!r}", "request_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRules:
    """The properties of the model and the engine that requests are checked against.

    compression_refusal, score_refusal, bounds_refusal  see engine/kv_compression.py
    """

    vocab_size: int
    hidden_size: int
    eos_token_ids: frozenset[int]
    seed: int
    max_logprobs: int
    scheduling_policy: str
    max_model_len: int
    pooler: PoolerSpec
    enable_lora: bool = False
    compression_refusal: str | None = None
    score_refusal: str | None = None
    bounds_refusal: str | None = None

    @classmethod
    def of(cls, report: ModelReport, config: EngineConfig) -> Self:
        """Return the rules of a model in an engine."""
        spec = report.spec
        return cls(
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            eos_token_ids=spec.eos_token_ids,
            seed=config.seed,
            max_logprobs=config.max_logprobs,
            scheduling_policy=config.scheduling_policy,
            max_model_len=report.memory.max_model_len,
            pooler=report.pooler,
            enable_lora=config.enable_lora,
            compression_refusal=compression_refusal(report, config),
            score_refusal=score_refusal(report),
            bounds_refusal=bounds_refusal(report, config),
        )


class RequestFactory:
    """Tokenises prompts and checks everything about a request that depends on the model. Safe to call from any thread."""

    def __init__(self, rules: RequestRules, tokenizer: Tokenizer | None, lora: LoRARequest | None = None) -> None:
        """lora: the adapter of requests that name none."""
        self._rules = rules
        self._tokenizer = tokenizer
        self._lora = lora

    def with_lora(self, lora: LoRARequest) -> RequestFactory:
        """Return a factory whose requests have a LoRA adapter. Raises RequestError if the engine takes none."""
        self.check_lora(lora)
        return RequestFactory(self._rules, self._tokenizer, lora)

    def make(
        self,
        request_id: str,
        index: int,
        prompt: PromptLike,
        params: SamplingParams | PoolingParams,
        lora: LoRARequest | None = None,
    ) -> Request:
        """Return the request, or raise RequestError with the invalid field.

        index  number of the request in this engine: requests without a seed derive theirs from it
        """
        check_request_id(request_id)
        if lora is not None:
            self.check_lora(lora)
            return replace(self.make(request_id, index, prompt, params), lora=lora)
        if isinstance(params, PoolingParams):
            return self._make_pooling(request_id, prompt, params)
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be a SamplingParams, got {type(params).__name__}", "sampling_params")
        self._rules.pooler.check_generates()
        text, token_ids, cache_salt = self._read_prompt(prompt)
        self._check_params(params)
        seed = mix_seed(self._rules.seed, index) if params.seed is None else params.seed % 2**64
        return Request(
            request_id=RequestId(request_id),
            prompt_token_ids=token_ids,
            params=params,
            seed=seed,
            prompt=text,
            eos_token_ids=self._rules.eos_token_ids,
            arrival_time_s=time.monotonic(),
            cache_salt=cache_salt,
            lora=self._lora,
        )

    def check(self, request: Request) -> None:
        """Raise RequestError if a request that was made elsewhere has a field that the model or the engine does not allow."""
        check_request_id(request.request_id)
        token_ids, size = request.prompt_token_ids, self._rules.vocab_size
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= size:  # a fast check for long prompts
            self._check_token_ids(token_ids, "prompt_token_ids")
        check_output_tokens(request, size)
        self._check_pooling(request.pooling)
        self._check_params(request.params)
        if request.lora is not None:
            self.check_lora(request.lora)

    def check_lora(self, lora: object) -> None:
        """Raise RequestError unless an adapter can be given to this engine."""
        if not isinstance(lora, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest or None, got {type(lora).__name__}", "lora_request")
        if not self._rules.enable_lora:
            raise RequestError(
                f"the LoRA adapter {lora.lora_name!r} cannot be used: this engine takes none; start it with enable_lora=True "
                "(--enable-lora)",
                "lora_request",
            )

    def _make_pooling(self, request_id: str, prompt: PromptLike, params: PoolingParams) -> Request:
        params = self._rules.pooler.resolve(params, self._rules.hidden_size)
        self._check_priority(params.priority)
        text, token_ids, cache_salt = self._read_prompt(prompt, self.prompt_limit(params.truncate_prompt_tokens))
        return Request(
            request_id=RequestId(request_id),
            prompt_token_ids=token_ids,
            params=SamplingParams(),
            seed=0,
            pooling=params,
            prompt=text,
            arrival_time_s=time.monotonic(),
            cache_salt=cache_salt,
            lora=self._lora,
        )

    def _read_prompt(self, prompt: PromptLike, limit: int | None = None) -> tuple[str | None, tuple[int, ...], str]:
        text, cache_salt = None, ""
        if isinstance(prompt, dict):
            text, prompt, cache_salt = self._read_dict(prompt)
        if isinstance(prompt, str):
            token_ids = tuple(encode_texts(self._need_tokenizer("prompt"), (prompt,), limit))
            self._check_token_ids(token_ids, "prompt")
            return prompt, token_ids, cache_salt
        if not isinstance(prompt, list | tuple):
            raise RequestError(
                f"a prompt must be a string, a list of token ids or a dict, got {type(prompt).__name__}", "prompt"
            )
        self._check_token_ids(prompt, "prompt_token_ids")
        return text, tuple(prompt[:limit]), cache_salt

    def _read_dict(self, prompt: dict[str, Any]) -> tuple[str | None, Any, str]:
        """Return the text for the output, the prompt, and the salt."""
        if set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"} or not {"prompt", "prompt_token_ids"} & set(prompt):
            raise RequestError(
                'a prompt as a dict has "prompt" or "prompt_token_ids", and optionally "cache_salt"; '
                f"got the keys {sorted(map(str, prompt))}",
                "prompt",
            )
        text, token_ids, cache_salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt", "")
        if not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt must be a string, got {cache_salt!r}", "cache_salt")
        if text is not None and not isinstance(text, str):
            raise RequestError(f'"prompt" must be a string, got {type(text).__name__}', "prompt")
        if "prompt_token_ids" not in prompt:
            return None, text, cache_salt
        if not isinstance(token_ids, list | tuple):
            raise RequestError(
                f'"prompt_token_ids" must be a list of token ids, got {type(token_ids).__name__}', "prompt_token_ids"
            )
        return text, token_ids, cache_salt

    def _check_token_ids(self, token_ids: list[int] | tuple[int, ...], param: str) -> None:
        if not token_ids:
            raise RequestError("the prompt is empty: at least one token is needed", param)
        size = self._rules.vocab_size
        for position, token_id in enumerate(token_ids):
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < size:
                raise RequestError(
                    f"token ids must be integers from 0 to {size - 1}, got {token_id!r} at position {position}", param
                )

    def _check_params(self, params: SamplingParams) -> None:
        size = self._rules.vocab_size
        for name in ("allowed_token_ids", "stop_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                if token_id >= size:
                    raise RequestError(f"{name}: token ids must be below {size}, got {token_id}", name)
        max_logprobs = self._rules.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and max_logprobs != -1 and not 0 <= value <= max_logprobs:
                raise RequestError(
                    f"{name} must be from 0 to {max_logprobs}, got {value}; the engine's max_logprobs sets the limit, "
                    "-1 takes it away",
                    name,
                )
        self._check_priority(params.priority)
        rules = self._rules
        check_compression(params.kv_compression, rules.compression_refusal, rules.score_refusal, rules.bounds_refusal)
        for name in ("stop", "bad_words"):
            if getattr(params, name):
                self._need_tokenizer(name)
        if params.constraint is not None:
            self._need_tokenizer(params.constraint.param)

    def _check_pooling(self, params: PoolingParams | None) -> None:
        """Check the pooling of a request that was made elsewhere."""
        if params is None:
            self._rules.pooler.check_generates()
            return
        self._rules.pooler.resolve(params, self._rules.hidden_size)
        self._check_priority(params.priority)

    def prompt_limit(self, num_tokens: int | None) -> int | None:
        """Return how many tokens of a prompt are kept, None: all. Raises RequestError."""
        limit = self._rules.max_model_len
        if num_tokens is not None and num_tokens > limit:
            raise RequestError(
                f"truncate_prompt_tokens must be -1 or from 1 to {limit} (max_model_len), got {num_tokens}",
                "truncate_prompt_tokens",
            )
        return limit if num_tokens == -1 else num_tokens

    def _check_priority(self, priority: int) -> None:
        if priority != 0 and self._rules.scheduling_policy != "priority":
            raise RequestError(
                f"priority is {priority}, but the engine runs with scheduling_policy 'fcfs', which knows none; "
                "leave it 0 or start the engine with scheduling_policy 'priority'",
                "priority",
            )

    def _need_tokenizer(self, param: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(f"{param}: the model has no tokenizer, so only token ids can be used", param)
        return self._tokenizer
