"""PoolerSpec: what a checkpoint makes of its hidden states when it is not asked for text: vectors, or scores of classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from quire.base.errors import RequestError
from quire.contracts.pooling_params import Pooling, PoolingParams

ModelTask = Literal["generate", "embed", "classify"]
Activation = Literal["identity", "tanh", "gelu", "gelu_tanh", "relu", "silu", "sigmoid", "softmax"]

_NAMES = {"generate": "a generative model", "embed": "an embedding model", "classify": "a classifier"}
_SCORES = (
    "scores need a classifier (a ...ForSequenceClassification checkpoint, or a reranker with classifier_from_token in its "
    "config.json) or an embedding model (sentence-transformers files, or a base model without an LM head)"
)


@dataclass(frozen=True, slots=True)
class HeadLayerSpec:
    """One linear layer between the pooled hidden state and the result, on the host.

    weight      where its weight is stored: a file of the checkpoint folder ("" for the model's own weights) and a name
    bias        likewise; None: it has none
    activation  applied to what it gives
    """

    weight: tuple[str, str]
    bias: tuple[str, str] | None = None
    activation: Activation = "identity"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerSpec:
    """How a checkpoint pools. The default is that of a generative model, whose hidden states may be pooled, too.

    task             what the checkpoint is for
    pooling          which hidden states are pooled where a request does not say
    normalize        whether vectors have length 1 where a request does not say
    layers           applied to the pooled hidden state; of a classifier the last gives the logits
    token_ids        of a classifier without a layer for it: the logit is that of the last token in the LM head, minus that of
                     the first where there are two
    size             of a vector, or the number of classes; None: the hidden size
    activation       of a classifier's logits
    labels           of the classes
    prompts          names of texts that are put before inputs (config_sentence_transformers.json)
    default_prompt   the name of the one that is used where a request names none
    max_tokens       the longest input the checkpoint is made for (sentence_bert_config.json); None: not stated
    is_bidirectional every token attends to all tokens: prompts are computed whole, without the prefix cache
    """

    task: ModelTask = "generate"
    pooling: Pooling = "last"
    normalize: bool = True
    layers: tuple[HeadLayerSpec, ...] = ()
    token_ids: tuple[int, ...] = ()
    size: int | None = None
    activation: Activation = "identity"
    labels: tuple[str, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    default_prompt: str | None = None
    max_tokens: int | None = None
    is_bidirectional: bool = False

    def check_generates(self) -> None:
        """Raise RequestError where the checkpoint is not for generating text."""
        if self.task != "generate":
            routes = (
                "/v1/embeddings or LLM.embed" if self.task == "embed" else "/classify, /v1/score, LLM.classify or LLM.score"
            )
            raise RequestError(f"the model is {_NAMES[self.task]} and does not generate text: use {routes}", "model")

    def resolve(self, params: PoolingParams, hidden_size: int) -> PoolingParams:
        """Return the parameters with what the checkpoint says where they say nothing. Raises RequestError, with the field."""
        self._check_task(params.task)
        pooling = params.pooling or self.pooling
        if pooling == "cls" and not self.is_bidirectional:
            raise RequestError(
                "pooling 'cls' is for models in which every token attends to all others; this one is causal, its first token "
                "knows nothing of the others: choose 'last' or 'mean'",
                "pooling",
            )
        if params.task != "embed":
            self._check_classes(params, pooling)
        size = hidden_size if self.size is None or self.task != "embed" else self.size
        if params.dimensions is not None and params.dimensions > size:
            what = "the hidden size of the model" if size == hidden_size else "the size of the model's vectors"
            raise RequestError(f"dimensions must be from 1 to {size}, {what}, got {params.dimensions}", "dimensions")
        normalize = self.normalize if params.normalize is None else params.normalize
        use_activation = True if params.use_activation is None else params.use_activation
        return params.resolved(pooling, normalize, use_activation)

    def _check_task(self, task: str) -> None:
        if task == "embed" and self.task == "classify":
            raise RequestError(
                "the model is a classifier, which has scores of classes and no embeddings: use /classify, /v1/score, "
                "LLM.classify or LLM.score",
                "model",
            )
        if task != "embed" and self.task != "classify":
            needs = _SCORES if task == "score" else "classes need a ...ForSequenceClassification checkpoint"
            raise RequestError(f"the model is {_NAMES[self.task]} without a classification head: {needs}", "model")

    def _check_classes(self, params: PoolingParams, pooling: Pooling) -> None:
        if params.dimensions is not None:
            raise RequestError("dimensions is for embeddings, and the request asks for classes: leave it out", "dimensions")
        if pooling != self.pooling:
            raise RequestError(f"pooling must be {self.pooling!r}, as the classifier was trained, got {pooling!r}", "pooling")
        if params.task == "score" and self.size != 1:
            raise RequestError(f"a score needs a classifier with 1 label, and this one has {self.size}: use /classify", "model")


def prompt_before(spec: PoolerSpec, name: str | None) -> str:
    """Return the text put before an input: the prompt of this name, or the checkpoint's default. Raises RequestError."""
    chosen = spec.default_prompt if name is None else name
    if chosen is None:
        return ""
    if chosen not in spec.prompts:
        known = ", ".join(map(repr, spec.prompts)) or "none"
        raise RequestError(f"prompt_name must be one of the model's prompts ({known}), got {chosen[:100]!r}", "prompt_name")
    return spec.prompts[chosen]
