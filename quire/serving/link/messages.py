"""What crosses between the HTTP process and the engine process: msgpack of these types and no others (no pickle).

Times are seconds of time.monotonic(), which is one clock for all processes of a machine.
"""

from __future__ import annotations

import msgspec

from quire.contracts.outputs import RequestMetrics
from quire.contracts.request import FinishReason, Request

PROTOCOL_VERSION = 1


# To the engine.


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Take in a request; its deltas carry its id, and exactly one of them has finished=True."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End requests; each that still runs sends a last delta with finish_reason "abort". Unknown ids are ignored."""

    request_ids: list[str]


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Send a KvReport this often (per second; 0 stops it): for the live view, which few have open."""

    hz: float


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Abort everything, release the memory, end the process with status 0."""


ToEngine = Submit | Abort | Watch | Stop


# From the engine.


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the HTTP process has to know of the loaded model and engine, so that it never loads torch.

    generation_defaults      SamplingParams fields recommended by the checkpoint
    tokenizer_folder         what quire.text.tokenizer.load_tokenizer takes; None without a tokenizer
    num_parameters           all weights; num_active_parameters those that one token uses
    weight_bytes             bytes that one decode step reads of the weights
    kv_bytes_per_token       bytes of keys and values of one cached token, all layers
    load_time_s              seconds that loading took
    """

    model: str
    architecture: str
    dtype: str
    quantization: str | None
    device: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_kv_blocks: int
    eos_token_ids: list[int]
    generation_defaults: dict[str, object]
    tokenizer_folder: str | None
    max_logprobs: int
    scheduling_policy: str
    enable_prefix_caching: bool
    seed: int
    num_parameters: int
    num_active_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    load_time_s: float
    pid: int
    protocol_version: int = PROTOCOL_VERSION


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is loaded and takes requests."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not be loaded, or its loop ended: the process exits after this.

    kind       the exception's class name
    is_config  True for errors that a restart cannot mend (ConfigError, ModelFormatError, UnsupportedError)
    """

    kind: str
    message: str
    is_config: bool


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """Sent by the engine's own loop at least once a second, also when idle, and never by another thread.

    num_steps  steps since the start: progress while num_unfinished > 0
    """

    time_s: float
    num_steps: int
    num_unfinished: int


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """One token at one position; the text is the receiver's to look up."""

    token_id: int
    logprob: float
    rank: int | None


class ChoiceDelta(msgspec.Struct, array_like=True):
    """What is new in one choice. logprobs: per new token a list, the token that is there first, then the most likely ones."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[list[TokenLogprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None


class RequestDelta(msgspec.Struct, array_like=True):
    """What is new in one request.

    metrics          on the first delta that has tokens and on the last one
    prompt_logprobs  once, when the whole prompt is computed, where they were asked for; None for the first token
    error            what went wrong, when a choice has finish_reason "error"
    error_param      the field at fault, when the engine refused the request; then no choice follows
    embedding        of a pooling request, on its only delta
    """

    request_id: str
    choices: list[ChoiceDelta]
    finished: bool
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    error: str | None = None
    error_param: str | None = None
    embedding: list[float] | None = None


class StepPart(msgspec.Struct, array_like=True, frozen=True):
    """What one sequence computed in a step."""

    request_id: str
    choice: int
    num_tokens: int
    is_prefill: bool


class StepReport(msgspec.Struct, array_like=True, frozen=True):
    """One step, and where the engine stands after it. Counts named `total` grow from the start of the engine.

    num_context_tokens  cached tokens that the step's sequences attended to, summed: for bytes read and FLOPs
    num_free_blocks     blocks that nothing uses, those that hold a reusable prefix (num_cached_blocks) among them
    """

    step_id: int
    started_s: float
    duration_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_context_tokens: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_cached_blocks: int
    total_preemptions: int
    total_prefix_queries: int
    total_prefix_hits: int
    parts: list[StepPart]


class StepOutputs(msgspec.Struct, frozen=True, tag="step"):
    """All that one step has to say. `report` is None for outputs without a step (refused or aborted requests)."""

    deltas: list[RequestDelta]
    report: StepReport | None = None


class KvReport(msgspec.Struct, frozen=True, tag="kv"):
    """Who holds the KV blocks: request id -> its block ids over all choices; a block in two lists is shared.

    cached  blocks that nobody holds and that still have a reusable prefix
    """

    time_s: float
    num_blocks: int
    blocks: dict[str, list[int]]
    cached: list[int]


FromEngine = Ready | Failed | Heartbeat | StepOutputs | KvReport
