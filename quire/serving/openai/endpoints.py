"""The routes of the OpenAI API."""

from __future__ import annotations

from quire.api.openai.answers import (
    ChatCompletion,
    Completion,
    DetokenizeAnswer,
    Embeddings,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizerInfo,
)
from quire.api.openai.chat import ChatCompletionRequest
from quire.api.openai.completions import CompletionRequest
from quire.api.openai.embeddings import EmbeddingRequest
from quire.api.openai.pooled_answers import Classifications, PooledList, Ranking, Scores
from quire.api.openai.pooling import ClassifyRequest, PoolingRequest, RerankRequest, ScoreRequest
from quire.api.openai.tokenize import DetokenizeRequest, TokenizeRequest
from quire.serving.context import ServerContext
from quire.serving.endpoint import JOB_HEADERS, Endpoint
from quire.serving.openai.chat import post_chat
from quire.serving.openai.classify import post_classify, post_pooling
from quire.serving.openai.completions import post_completion
from quire.serving.openai.deployments import DEPLOYMENT_ENDPOINTS
from quire.serving.openai.embeddings import post_embeddings
from quire.serving.openai.models import get_model, list_models
from quire.serving.openai.scoring import post_rerank, post_score
from quire.serving.openai.tokenize import get_tokenizer_info, post_detokenize, post_tokenize

ENDPOINTS: tuple[Endpoint[ServerContext], ...] = (
    Endpoint(
        method="POST",
        path="/v1/chat/completions",
        handler=post_chat,
        summary="Continue a conversation",
        tag="openai",
        body=ChatCompletionRequest,
        answer=ChatCompletion,
        is_streaming=True,
        headers=JOB_HEADERS,
    ),
    Endpoint(
        method="POST",
        path="/v1/completions",
        handler=post_completion,
        summary="Continue a text",
        tag="openai",
        body=CompletionRequest,
        answer=Completion,
        is_streaming=True,
        headers=JOB_HEADERS,
    ),
    Endpoint(
        method="POST",
        path="/v1/embeddings",
        handler=post_embeddings,
        summary="Turn texts into vectors",
        tag="openai",
        body=EmbeddingRequest,
        answer=Embeddings,
        headers=JOB_HEADERS,
    ),
    *(
        Endpoint(
            method="POST",
            path=path,
            handler=post_score,
            summary="Score pairs of texts",
            tag="pooling",
            body=ScoreRequest,
            answer=Scores,
            headers=JOB_HEADERS,
        )
        for path in ("/v1/score", "/score")
    ),
    *(
        Endpoint(
            method="POST",
            path=path,
            handler=post_rerank,
            summary="Order documents by a query",
            tag="pooling",
            body=RerankRequest,
            answer=Ranking,
            headers=JOB_HEADERS,
        )
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    ),
    Endpoint(
        method="POST",
        path="/classify",
        handler=post_classify,
        summary="Classify texts",
        tag="pooling",
        body=ClassifyRequest,
        answer=Classifications,
        headers=JOB_HEADERS,
    ),
    Endpoint(
        method="POST",
        path="/pooling",
        handler=post_pooling,
        summary="Pool hidden states as the model is made for it",
        tag="pooling",
        body=PoolingRequest,
        answer=PooledList,
        headers=JOB_HEADERS,
    ),
    *DEPLOYMENT_ENDPOINTS,
    Endpoint(method="GET", path="/v1/models", handler=list_models, summary="List the models", tag="openai", answer=ModelList),
    Endpoint(
        method="GET",
        path="/v1/models/{model:path}",
        handler=get_model,
        summary="Describe a model",
        tag="openai",
        answer=ModelCard,
    ),
    Endpoint(
        method="POST",
        path="/tokenize",
        handler=post_tokenize,
        summary="Turn text into token ids",
        tag="tokens",
        body=TokenizeRequest,
        answer=TokenizeAnswer,
    ),
    Endpoint(
        method="GET",
        path="/tokenizer_info",
        handler=get_tokenizer_info,
        summary="Describe the tokenizer",
        tag="tokens",
        answer=TokenizerInfo,
    ),
    Endpoint(
        method="POST",
        path="/detokenize",
        handler=post_detokenize,
        summary="Turn token ids into text",
        tag="tokens",
        body=DetokenizeRequest,
        answer=DetokenizeAnswer,
    ),
)
