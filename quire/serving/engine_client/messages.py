"""The messages between the HTTP process and the engine process: msgpack of these types only (no pickle).

Times are seconds of time.monotonic(), which is the same clock for all processes of a machine.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Self

import msgspec

from quire.base.errors import RequestError
from quire.base.ids import RequestId
from quire.contracts.config import Role
from quire.contracts.constraint import Constraint
from quire.contracts.expert_stats import ExpertStats
from quire.contracts.lora import LoRARequest
from quire.contracts.outputs import RequestMetrics
from quire.contracts.pooler_spec import PoolerSpec
from quire.contracts.pooling_params import PoolingParams
from quire.contracts.rank_stats import RankStats
from quire.contracts.request import FinishReason, Request
from quire.contracts.sampling_params import SamplingParams
from quire.contracts.sleep import SleepLevel
from quire.contracts.tier_stats import TierStats
from quire.contracts.timeline import RequestTimeline
from quire.serving.engine_client.kv_events import KvEventOptions

PROTOCOL_VERSION = 2
MAX_MESSAGE_BYTES = 64 << 20
MAX_STEP_PARTS = 64
"""Beyond this number of parts, a step reports no more decoding sequences; the page does not show them."""

_DEFAULT_PARAMS = {field.name: getattr(SamplingParams(), field.name) for field in dataclasses.fields(SamplingParams)}
_CONSTRAINT_NAMES = {field.name for field in dataclasses.fields(Constraint)}
_POOLING_NAMES = {field.name for field in dataclasses.fields(PoolingParams)}
_TOKEN_ID = "i"  # array's code of a C int, 4 bytes


# To the engine.


class Start(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first message, which is sent over standard input with its length in front.

    address     ZeroMQ endpoint to connect to
    server_key  with which CURVE encrypts the connection, where it crosses a network; known to no other process; empty: none
    session     8 random bytes that every later message of either side begins with
    parent_pid  the process with which the engine ends
    config      fields of EngineConfig
    log_format  of ServerConfig
    kv_events   where events of KV blocks are published; None: nowhere
    records_timelines  the last delta of a request has its timeline
    """

    address: str
    session: bytes
    parent_pid: int
    config: dict[str, Any]
    log_level: str = "INFO"
    log_format: str = "text"
    kv_events: KvEventOptions | None = None
    records_timelines: bool = False
    server_key: bytes = b""
    protocol_version: int = PROTOCOL_VERSION


class Submit(msgspec.Struct, frozen=True, tag="submit", kw_only=True, forbid_unknown_fields=True):
    """Add a request; its deltas have its id, and exactly one of them has finished=True.

    The fields are those of Request: prompt_token_ids as i32 in the machine's byte order, params only if they differ from the
    default, pooling with every field, and likewise the constraint in params; lora has those of LoRARequest in order.
    """

    request_id: str
    prompt_token_ids: bytes
    params: dict[str, Any]
    seed: int
    prompt: str | None
    eos_token_ids: list[int]
    arrival_time_s: float
    cache_salt: str
    pooling: dict[str, Any] | None = None
    is_background: bool = False
    cache_retention_s: float = 0.0
    output_token_ids: list[int] = []
    lora: tuple[str, int, str] | None = None

    @classmethod
    def of(cls, request: Request) -> Self:
        """Return the message of a request. Raises RequestError for a number that cannot be sent."""
        params = _stated_by(request.params)
        try:
            token_ids = request.prompt_token_ids
            token_ids = (token_ids if isinstance(token_ids, array) else array(_TOKEN_ID, token_ids)).tobytes()
        except OverflowError:
            raise RequestError("token ids must be within 32 bits", "prompt_token_ids") from None
        return cls(
            request_id=request.request_id,
            prompt_token_ids=token_ids,
            params=params,
            seed=request.seed,
            prompt=request.prompt,
            eos_token_ids=sorted(request.eos_token_ids),
            arrival_time_s=request.arrival_time_s,
            cache_salt=request.cache_salt,
            pooling=None if request.pooling is None else dataclasses.asdict(request.pooling),
            is_background=request.is_background,
            cache_retention_s=request.cache_retention_s,
            output_token_ids=list(request.output_token_ids),
            lora=None if request.lora is None else dataclasses.astuple(request.lora),
        )

    def request(self) -> Request:
        """Return the request, its params checked again. Raises RequestError, naming the field."""
        unknown = (self.params.keys() - _DEFAULT_PARAMS.keys()) | ((self.pooling or {}).keys() - _POOLING_NAMES)
        if unknown:
            raise RequestError(f"unknown parameters: {', '.join(sorted(unknown))}", "params")
        token_ids = array(_TOKEN_ID)
        if len(self.prompt_token_ids) % token_ids.itemsize:
            raise RequestError(f"prompt_token_ids: {len(self.prompt_token_ids)} bytes are no i32 values", "prompt_token_ids")
        token_ids.frombytes(self.prompt_token_ids)
        return Request(
            request_id=RequestId(self.request_id),
            prompt_token_ids=tuple(token_ids),
            params=_params({**self.params, **self._constraint()}),
            seed=self.seed,
            prompt=self.prompt,
            eos_token_ids=frozenset(self.eos_token_ids),
            arrival_time_s=self.arrival_time_s,
            cache_salt=self.cache_salt,
            pooling=None if self.pooling is None else PoolingParams(**self.pooling),
            is_background=self.is_background,
            cache_retention_s=self.cache_retention_s,
            output_token_ids=tuple(self.output_token_ids),
            lora=None if self.lora is None else LoRARequest(*self.lora),
        )

    def _constraint(self) -> dict[str, Constraint]:
        fields = self.params.get("constraint")
        if fields is None:
            return {}
        if not isinstance(fields, dict) or fields.keys() - _CONSTRAINT_NAMES:
            raise RequestError("constraint must be an object with the fields of Constraint", "constraint")
        return {"constraint": Constraint(**fields)}


# Most requests repeat the parameters of others: the (immutable) result is cached.


def _stated(params: SamplingParams) -> dict[str, Any]:
    stated: dict[str, Any] = {}
    for name, default in _DEFAULT_PARAMS.items():
        value = getattr(params, name)
        if name in ("constraint", "kv_compression") and value is not None:
            stated[name] = dataclasses.asdict(value)
        elif value != default and name != "structured_outputs":  # the constraint is derived from it
            if isinstance(value, int) and not -(2**63) <= value < 2**64:
                raise RequestError(f"{name} must be within 64 bits, got an integer of {value.bit_length()}", name)
            stated[name] = value
    return stated


_known_stated = lru_cache(maxsize=256)(_stated)


def _stated_by(params: SamplingParams) -> dict[str, Any]:
    if params.constraint is not None:  # which may be long
        return _stated(params)
    try:
        return _known_stated(params)
    except TypeError:  # there are lists or dicts among them
        return _stated(params)


def _params(fields: Mapping[str, Any]) -> SamplingParams:
    if "constraint" in fields:
        return SamplingParams(**fields)
    try:
        return _known_params(tuple((name, type(value), value) for name, value in fields.items()))
    except TypeError:  # there are lists or dicts among them
        return SamplingParams(**fields)


@lru_cache(maxsize=256)
def _known_params(fields: tuple[tuple[str, type, Any], ...]) -> SamplingParams:
    return SamplingParams(**{name: value for name, _, value in fields})


class Abort(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True):
    """Abort requests; each running one sends a last delta with finish_reason "abort". Unknown ids are ignored."""

    request_ids: list[str]


class Watch(msgspec.Struct, frozen=True, tag="watch", forbid_unknown_fields=True):
    """Send KvReports at this maximum rate (per second; 0 stops them), for the live view."""

    hz: float


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter", kw_only=True, forbid_unknown_fields=True):
    """Load a LoRA adapter; the answer is a RequestDelta with request_id, finished, with an error if it cannot be loaded."""

    request_id: str
    lora: tuple[str, int, str]


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter", forbid_unknown_fields=True):
    """Unload a LoRA adapter, as soon as no request uses it. Ignored if it is not loaded."""

    lora_int_id: int


class RebalanceExperts(msgspec.Struct, frozen=True, tag="rebalance_experts", forbid_unknown_fields=True):
    """Begin to move experts between ranks; the answer is a RequestDelta with request_id, finished, with an error if they do not
    move here, or are being moved already."""

    request_id: str


class SetPrefillUrls(msgspec.Struct, frozen=True, tag="set_prefill_urls", forbid_unknown_fields=True):
    """Ask the prefill engines that listen at these addresses from now on; the answer is a RequestDelta with request_id,
    finished, with an error if this engine takes none, or not these."""

    request_id: str
    urls: list[str]


class SetRole(msgspec.Struct, frozen=True, tag="set_role", forbid_unknown_fields=True):
    """Begin no more of what the role before was for; the answer is a RequestDelta with request_id, finished, with an error if
    this engine cannot have the role."""

    request_id: str
    role: Role


class AskTimelines(msgspec.Struct, frozen=True, tag="timelines", forbid_unknown_fields=True):
    """Send the timelines so far of unfinished requests, in one Timelines with the same number. Unknown ids are left out."""

    number: int
    request_ids: list[str]


class Sleep(msgspec.Struct, frozen=True, tag="sleep", forbid_unknown_fields=True):
    """Abort all requests, and fall asleep at this level; the answer is a SleepState with the same number.

    is_check  do not sleep: the answer says whether this engine can
    """

    number: int
    level: SleepLevel
    is_check: bool = False


class WakeUp(msgspec.Struct, frozen=True, tag="wake_up", forbid_unknown_fields=True):
    """Wake up; the answer is a SleepState with the same number."""

    number: int


class Stop(msgspec.Struct, frozen=True, tag="stop", forbid_unknown_fields=True):
    """Abort all requests, release the memory, and end the process with status 0."""


_Commands = LoadAdapter | UnloadAdapter | RebalanceExperts | SetPrefillUrls | SetRole | Sleep | WakeUp | Stop
ToEngine = Submit | Abort | Watch | AskTimelines | _Commands


# From the engine.


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The process runs and is connected; loading begins."""

    pid: int
    protocol_version: int


class AttentionKind(msgspec.Struct, frozen=True):
    """The layers of one window together.

    window              a token attends to itself and the window - 1 tokens before it; None: to all before it
    kv_bytes_per_token  bytes of keys and values of one cached token
    num_query_elements  of the queries of one token, all heads
    """

    window: int | None
    kv_bytes_per_token: int
    num_query_elements: int


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The description of the loaded model and engine for the HTTP process, which never imports torch.

    generation_defaults      SamplingParams fields recommended by the checkpoint
    model_folder             of the checkpoint, or its GGUF file
    tokenizer_folder         what quire.text.tokenizer.load_tokenizer takes; None without a tokenizer
    chat_template            likewise; None for the checkpoint's default one
    num_parameters           all weights; num_active_parameters those that one token uses
    weight_bytes             bytes of the weights that one token reads, as they are run
    kv_bytes_per_token       bytes of keys and values of one cached token, all layers
    kv_cache_dtype           of the keys and values: the model's dtype, "int8", "fp8", "turboquant_4bit" or "k8v4"
    attention                the layers by their windows
    peak_bytes_per_s         the machine's memory bandwidth; peak_flops_per_s its operations; both measured at start; None:
                             unknown
    load_time_s              seconds that loading took
    pooler                   the model's task and pooling
    enable_lora              whether requests may have LoRA adapters
    max_loras                adapters that are in memory at the same time; 0 without enable_lora
    role                     that the engine has now
    prefill_listen           where decode engines connect while the role is "prefill"; None: it cannot have that role
    takes_prefill_urls       whether the addresses of prefill engines come by SetPrefillUrls while the role is "decode"
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
    model_folder: str
    tokenizer_folder: str | None
    max_logprobs: int
    scheduling_policy: str
    enable_prefix_caching: bool
    seed: int
    num_parameters: int
    num_active_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_cache_dtype: str
    attention: list[AttentionKind]
    load_time_s: float
    pid: int
    peak_bytes_per_s: float | None = None
    peak_flops_per_s: float | None = None
    role: Role = "both"
    prefill_listen: str | None = None
    takes_prefill_urls: bool = False
    chat_template: str | None = None
    pooler: PoolerSpec = msgspec.field(default_factory=PoolerSpec)
    enable_lora: bool = False
    max_loras: int = 0
    protocol_version: int = PROTOCOL_VERSION


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is loaded and takes requests."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not be loaded, or its loop ended: the process exits after this.

    kind       the exception's class name
    is_config  True for errors that a restart cannot fix (ConfigError, ModelFormatError, UnsupportedError)
    """

    kind: str
    message: str
    is_config: bool


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """Sent by the engine's loop (never by another thread) once a second, also when idle, or after a longer step.

    time_s        when the loop last found no more commands
    num_steps     steps since the start: progress while num_unfinished > 0
    num_commands  one more than the sequence number of the last received command
    ranks         of a model on several processes
    tiers         of the KV cache
    experts       tokens of the experts of each layer, where they are placed on ranks or their load is saved
    """

    time_s: float
    num_steps: int
    num_unfinished: int
    num_commands: int
    ranks: list[RankStats] = []
    tiers: list[TierStats] = []
    experts: list[ExpertStats] = []


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """The commands with these sequence numbers, inclusive, did not arrive or were invalid."""

    first: int
    last: int


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One token at one position; the receiver looks up its text."""

    token_id: int
    logprob: float
    rank: int | None


class ChoiceDelta(msgspec.Struct, array_like=True, gc=False):
    """The new part of one choice. logprobs: a list per new token, first the token itself, then the most likely ones."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[list[TokenLogprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None


class RequestDelta(msgspec.Struct, array_like=True, gc=False):
    """The new part of one request.

    metrics          on the first delta that has tokens and on the last one
    prompt_logprobs  once, when the whole prompt is computed, if requested; None for the first token
    error            the error, if a choice has finish_reason "error"
    error_param      the invalid field, if the request was refused or its constraint cannot continue; then no choice follows
    embedding        of a request with PoolingParams, on its only delta, where its one choice ended with "stop"
    is_refused       a client error: the request is invalid, can never be served here, or excludes every next token
    """

    request_id: str
    choices: list[ChoiceDelta]
    finished: bool
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    error: str | None = None
    error_param: str | None = None
    embedding: list[float] | None = None
    is_refused: bool = False


class StepPart(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The tokens of one sequence in a step; is_prefill: of its prompt, or recomputed after a preemption."""

    request_id: str
    choice: int
    num_tokens: int
    is_prefill: bool


class StepReport(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One step, and the state of the engine after it. Counts named `total` grow from the start of the engine.

    attended            (tokens in the cache that were read, pairs of a new token and one that it attends to), summed over the
                        step's sequences, for each AttentionKind: for bytes read and FLOPs
    num_free_blocks     unused blocks, including those with a reusable prefix (num_cached_blocks)
    parts               the first MAX_STEP_PARTS parts, and all prefill parts
    total_drafts        number of verified drafts; total_accepted_per_pos: accepted tokens by position in the draft
    total_evicted_blocks KV blocks that kv_compression has evicted
    total_runs          runs of keys that it might have skipped by bounds, and those that it has
    total_stage_busy_s  seconds in which each pipeline stage computed, of the total_active_s in which steps were in flight
    """

    step_id: int
    started_s: float
    duration_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    attended: list[tuple[int, int]]
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_cached_blocks: int
    total_preemptions: int
    total_prefix_queries: int
    total_prefix_hits: int
    parts: list[StepPart]
    total_drafts: int = 0
    total_draft_tokens: int = 0
    total_accepted_per_pos: list[int] = []
    total_stage_busy_s: list[float] = []
    total_active_s: float = 0.0
    total_evicted_blocks: int = 0
    total_runs: tuple[int, int] = (0, 0)


class StepOutputs(msgspec.Struct, frozen=True, tag="step", gc=False):
    """The outputs of one step. `report` is None for outputs without a step (refused or aborted requests).

    replica  the replica that ran the step; set by the server
    """

    deltas: list[RequestDelta]
    report: StepReport | None = None
    replica: int = 0


class KvReport(msgspec.Struct, frozen=True, tag="kv"):
    """The owners of the KV blocks: request id -> block ids of its sequences; a block that appears twice is shared.

    cached  unused blocks that still have a reusable prefix
    """

    time_s: float
    num_blocks: int
    blocks: dict[str, list[int]]
    cached: list[int]


class Timelines(msgspec.Struct, frozen=True, tag="timelines"):
    """The answer to an AskTimelines: request id -> its timeline so far."""

    number: int
    timelines: dict[str, RequestTimeline]


class SleepState(msgspec.Struct, frozen=True, tag="sleep_state"):
    """The answer to Sleep and WakeUp.

    level       of the engine's sleep now; None: it is awake
    error       why the command had no effect
    is_refused  this engine does not support it
    """

    number: int
    level: SleepLevel | None
    error: str | None = None
    is_refused: bool = False


FromEngine = Hello | Ready | Failed | Heartbeat | Lost | StepOutputs | KvReport | Timelines | SleepState
