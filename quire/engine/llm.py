"""LLM: offline generation and embedding, with the interface of vLLM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from quire.base.errors import ConfigError, RequestError
from quire.base.ids import RequestId
from quire.base.logging import get_logger, show_log
from quire.contracts.config import EngineConfig
from quire.contracts.lora import LoRARequest
from quire.contracts.outputs import (
    BeamSearchOutput,
    ClassificationOutput,
    EmbeddingRequestOutput,
    PooledT,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from quire.contracts.pooling_params import PoolingParams, PoolingTask
from quire.contracts.request import Request
from quire.contracts.sampling_params import BeamSearchParams, SamplingParams
from quire.engine.beam_search import BeamSearch
from quire.engine.config import make_config
from quire.engine.llm_engine import EngineOutput, LLMEngine
from quire.engine.replica_engine import ReplicaEngine
from quire.engine.request_factory import PromptLike
from quire.engine.scoring import cosine, encode_pair, make_pairs
from quire.text.tokenizer import Tokenizer

logger = get_logger(__name__)

Params = TypeVar("Params", SamplingParams, PoolingParams)
Loras = LoRARequest | Sequence[LoRARequest | None] | None
"""The LoRA adapter of all prompts, or one or None for each of them."""


class LLM:
    """A loaded model. It runs in this process, unless it is shared by ranks or run as replicas.

    model    a local folder, a hub id, or a bundled model (demo, demo-draft, demo-moe); or a whole EngineConfig
    options  the fields of EngineConfig: dtype, max_model_len, max_num_seqs, max_num_batched_tokens, block_size,
             num_kv_blocks, kv_cache_memory_bytes, enable_prefix_caching, seed, ... An unknown one is a ConfigError.
    """

    def __init__(self, model: str | EngineConfig, **options: Any) -> None:
        show_log()
        if isinstance(model, EngineConfig) and options:
            raise ConfigError("give options or an EngineConfig, not both")
        config = model if isinstance(model, EngineConfig) else make_config(model=model, **options)
        self.llm_engine = ReplicaEngine(config) if config.data_parallel_size > 1 else LLMEngine(config)
        self._num_requests = 0

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Loras = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt and return the outputs in their order.

        prompts          one prompt or a list: strings, lists of token ids, or {"prompt_token_ids": [...]}
        sampling_params  one for all, or one per prompt; None: the checkpoint's defaults
        lora_request     the LoRA adapter of all, or one or None per prompt; None: the base model. Needs enable_lora
        Raises RequestError before anything runs when one of them is invalid or can never fit.
        """
        prompt_list = _as_prompts(prompts)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params_list = _as_params(params, len(prompt_list), SamplingParams, "sampling_params")
        loras = _as_loras(lora_request, len(prompt_list))
        triples = zip(prompt_list, params_list, loras, strict=True)
        return self._run([self._make(prompt, params, lora) for prompt, params, lora in triples], use_tqdm)

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Loras = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of every prompt, in their order: `output.outputs.embedding` is a list of floats.

        prompts         as for generate; up to max_model_len tokens
        pooling_params  one for all, or one per prompt; None: the last token's hidden state, normalised
        lora_request    as for generate
        Raises RequestError before anything runs when one of them is invalid or can never fit.
        """
        prompt_list = _as_prompts(prompts)
        params = PoolingParams() if pooling_params is None else pooling_params
        params_list = _as_params(params, len(prompt_list), PoolingParams, "pooling_params")
        loras = _as_loras(lora_request, len(prompt_list))
        triples = zip(prompt_list, params_list, loras, strict=True)
        return self._run([self._make(prompt, params, lora) for prompt, params, lora in triples], use_tqdm)

    def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Loras = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Return the class probabilities of every prompt: `output.outputs.probs` has a number for each class.

        pooling_params  with task "classify"; None: the checkpoint's activation function turns the logits into probabilities
        Raises RequestError as embed does, and if the model is not a classifier.
        """
        params = PoolingParams(task="classify") if pooling_params is None else pooling_params
        return [
            _pooled(output, ClassificationOutput(output.outputs.embedding))
            for output in self.embed(prompts, _with_task(params, "classify"), use_tqdm, lora_request)
        ]

    def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Loras = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Run the task of pooling_params for every prompt and return `output.outputs.data`: see embed and classify.

        pooling_params  None: the model's task
        """
        if pooling_params is None:
            is_classifier = self.llm_engine.report.pooler.task == "classify"
            pooling_params = PoolingParams(task="classify" if is_classifier else "embed")
        outputs = self.embed(prompts, pooling_params, use_tqdm, lora_request)
        return [_pooled(output, PoolingOutput(output.outputs.embedding)) for output in outputs]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Return the similarity of pairs of texts as `output.outputs.score`: data_1[i] with data_2[i], or one with many.

        A classifier with one label (a cross-encoder, a reranker) reads both texts in one prompt. With an embedding model the
        score is the cosine of the two embeddings. lora_request: the LoRA adapter of all pairs; None: the base model.
        Raises RequestError as embed does, and if the model is neither.
        """
        tokenizer = self.get_tokenizer()
        pairs = make_pairs(data_1, data_2, "data_1", "data_2")
        params = PoolingParams(task="score") if pooling_params is None else replace(pooling_params, task="score")
        pooler = self.llm_engine.report.pooler
        if pooler.task == "embed":
            return self._score_by_embeddings(pairs, replace(params, task="embed", normalize=True), use_tqdm, lora_request)
        limit = self.llm_engine.prompt_limit(params)
        prompts: list[PromptLike] = [encode_pair(tokenizer, *pair, limit) for pair in pairs]
        outputs = self.embed(prompts, params, use_tqdm, lora_request)
        return [_pooled(output, ScoringOutput((output.outputs.embedding or [math.nan])[0])) for output in outputs]

    def _score_by_embeddings(
        self, pairs: list[tuple[str, str]], params: PoolingParams, use_tqdm: bool, lora_request: LoRARequest | None
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        found = dict(zip(texts, self.embed(list[PromptLike](texts), params, use_tqdm, lora_request), strict=True))
        scored: list[PoolingRequestOutput[ScoringOutput]] = []
        for first, second in (tuple(found[text] for text in pair) for pair in pairs):
            failed = first.error or second.error
            score = math.nan if failed else cosine(first.outputs.embedding, second.outputs.embedding)
            token_ids = first.prompt_token_ids + second.prompt_token_ids
            scored.append(PoolingRequestOutput(first.request_id, ScoringOutput(score), token_ids, error=failed))
        return scored

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: Loras = None,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation, or of each of a list of them, through the chat template.

        lora_request  as for generate
        """
        if not isinstance(messages, list | tuple):
            raise RequestError(
                f"messages must be a list of dicts with role and content, got {type(messages).__name__}", "messages"
            )
        is_single = not messages or isinstance(messages[0], dict)
        conversations: list[Any] = [messages] if is_single else list(messages)
        options = {"add_generation_prompt": add_generation_prompt, "tools": tools, **(chat_template_kwargs or {})}
        tokenizer = self.get_tokenizer()
        rendered = [tokenizer.render_chat(conversation, **options) for conversation in conversations]
        prompts: list[PromptLike] = [
            {"prompt": chat.text, "prompt_token_ids": tokenizer.encode_rendered(chat)} for chat in rendered
        ]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request)

    def beam_search(
        self, prompts: PromptLike | Sequence[PromptLike], params: BeamSearchParams, lora_request: Loras = None
    ) -> list[BeamSearchOutput]:
        """Return for every prompt the beam_width best continuations, best first. lora_request: as for generate.

        With replicas, structured_outputs are refused, because the grammars of hypotheses live in this process.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be a BeamSearchParams, got {type(params).__name__}", "params")
        if isinstance(self.llm_engine, ReplicaEngine) and params.structured_outputs is not None:
            raise RequestError(
                "beam search with structured_outputs needs data_parallel_size 1: replicas do not know the grammars of its "
                "hypotheses",
                "structured_outputs",
            )
        asked = SamplingParams(temperature=0.0, max_tokens=params.max_tokens, structured_outputs=params.structured_outputs)
        prompt_list = _as_prompts(prompts)
        pairs = zip(prompt_list, _as_loras(lora_request, len(prompt_list)), strict=True)
        requests = [self._make(prompt, asked, lora) for prompt, lora in pairs]
        requests = _with_grammars(self.llm_engine, requests)
        return BeamSearch(self.llm_engine, lambda steps: self._run(steps, use_tqdm=False), params).run(requests)

    def _run(self, requests: list[Request], use_tqdm: bool) -> list[Any]:
        with self.llm_engine.interrupts.watched():
            return self._run_watched(requests, use_tqdm)

    def _run_watched(self, requests: list[Request], use_tqdm: bool) -> list[Any]:
        engine = self.llm_engine
        requests = _with_grammars(engine, requests)
        outputs: dict[str, EngineOutput] = {}
        submitted: list[RequestId] = []
        progress = _progress(len(requests)) if use_tqdm else None
        try:
            for request in requests:  # nothing runs before the first step, so a refused request does not start the others
                engine.submit(request, "final")
                submitted.append(request.request_id)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    outputs[output.request_id] = output
                    if progress is not None:
                        progress.update(1)
        finally:
            # Left early (for example by an interrupt): no request of this call may run on in the next call.
            for request_id in submitted:
                engine.abort_request(request_id)
            if progress is not None:
                progress.close()
        failed = [output for output in outputs.values() if output.error is not None]
        if failed:
            logger.warning("%d of %d requests failed; the first: %s", len(failed), len(requests), failed[0].error)
        return [outputs[request.request_id] for request in requests]

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; raises RequestError when the model has none."""
        if self.llm_engine.tokenizer is None:
            raise RequestError("the model has no tokenizer", "prompt")
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the checkpoint recommends in generation_config.json."""
        return self.llm_engine.default_sampling_params()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Release memory until `wake_up`; calls of generate and the like raise WorkerError meanwhile.

        level  1: the KV cache is freed, and weights on a GPU are moved to host memory. 2: the weights are dropped, and
               `wake_up` reads them from the checkpoint again
        mode   what becomes of requests that an interrupted call has left: "abort" or "wait"

        The prefix cache is emptied; what KV tiers hold stays. Without an effect if the engine sleeps at this level or a higher
        one. Raises RequestError for other arguments, and UnsupportedError if this engine cannot sleep so.
        """
        engine = self.llm_engine
        engine.begin_sleep(level, mode)
        while engine.has_unfinished_requests():
            engine.step()

    def wake_up(self) -> None:
        """Load what sleeping released. Without an effect while the engine is awake.

        Raises ModelFormatError or ConfigError if the model cannot be loaded again; the engine then stays asleep.
        """
        self.llm_engine.wake_up()

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine is asleep."""
        return self.llm_engine.is_sleeping

    def close(self) -> None:
        """Release the model's memory."""
        self.llm_engine.close()

    def _make(
        self, prompt: PromptLike, params: SamplingParams | PoolingParams, lora_request: LoRARequest | None = None
    ) -> Request:
        request = self.llm_engine.make_request(f"llm-{self._num_requests}", prompt, params, lora_request)
        self._num_requests += 1
        return request


def _with_grammars(engine: LLMEngine | ReplicaEngine, requests: list[Request]) -> list[Request]:
    """Return the requests with compiled constraints. Raises RequestError for the first one that cannot be compiled."""
    compilations = [engine.start_compilation(request) for request in requests]
    return [
        request if compilation is None else replace(request, grammar=compilation.result())
        for request, compilation in zip(requests, compilations, strict=True)
    ]


def _as_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    if isinstance(prompts, str | dict):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise RequestError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}", "prompts")
    if not prompts:
        raise RequestError("prompts is empty: give at least one prompt", "prompts")
    is_token_ids = all(isinstance(item, int) for item in prompts)
    return [prompts] if is_token_ids else list(prompts)  # type: ignore[list-item]


def _as_params(params: object, count: int, kind: type[Params], name: str) -> list[Params]:
    """Return one per prompt; name is the argument's name."""
    if isinstance(params, kind):
        return [params] * count
    items = list(params) if isinstance(params, list | tuple) else [params]
    for item in items:
        if not isinstance(item, kind):
            other = "; generate takes SamplingParams and embed PoolingParams" if _is_params(item) else ""
            raise RequestError(f"{name} must be a {kind.__name__} or a list of them, got {type(item).__name__}{other}", name)
    if len(items) != count:
        raise RequestError(f"{name} must be one for all or one per prompt: got {len(items)} for {count} prompts", name)
    return items


def _as_loras(loras: object, count: int) -> list[LoRARequest | None]:
    """Return one per prompt."""
    items = list(loras) if isinstance(loras, list | tuple) else [loras] * count
    for item in items:
        if item is not None and not isinstance(item, LoRARequest):
            raise RequestError(
                f"lora_request must be a LoRARequest, None or a list of them, got {type(item).__name__}", "lora_request"
            )
    if len(items) != count:
        raise RequestError(
            f"lora_request must be one for all or one per prompt: got {len(items)} for {count} prompts", "lora_request"
        )
    return items


def _with_task(params: PoolingParams | Sequence[PoolingParams], task: PoolingTask) -> PoolingParams | list[PoolingParams]:
    if isinstance(params, PoolingParams):
        return replace(params, task=task)
    return [replace(one, task=task) if isinstance(one, PoolingParams) else one for one in params]


def _pooled(output: EmbeddingRequestOutput, outputs: PooledT) -> PoolingRequestOutput[PooledT]:
    return PoolingRequestOutput(output.request_id, outputs, output.prompt_token_ids, error=output.error)


def _is_params(item: object) -> bool:
    return isinstance(item, SamplingParams | PoolingParams)


def _progress(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="Processed prompts", unit="request", dynamic_ncols=True)
