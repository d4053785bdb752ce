"""EngineConfig: every option of the engine, validated, built once."""

from __future__ import annotations

import re
from dataclasses import InitVar, dataclass
from typing import Literal

from quire.base.errors import ConfigError
from quire.base.renamed_option import take_old_name
from quire.base.threads import check_num_threads
from quire.contracts.parallel import EXECUTOR_BACKENDS, ParallelConfig
from quire.contracts.speculative import SpeculativeConfig

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_POLICIES = ("fcfs", "priority")
_QUANTIZATIONS = ("int8", "int4", "fp8")
_KV_CACHE_DTYPES = ("auto", "int8", "fp8")
_KV_SAVES = ("reused", "all", "none")
KvSave = Literal["reused", "all", "none"]
STAGING_BYTES = 256 << 20
"""Size of the host tier where only a disk tier is asked for, whose pages pass through it."""
ATTENTION_LIBRARIES = ("flashinfer", "flash_attn")
"""Values of attention_backend that name what a user has to install."""

_ATTENTION_BACKENDS = ("auto", "triton", *ATTENTION_LIBRARIES)
MODEL_IMPLS = ("auto", "quire", "transformers")
TRANSFORMERS_DRAFT_METHODS = ("ngram", "suffix", "lookahead", "draft_model")
"""Methods of speculative_config for models of the transformers library: those that need nothing of it but its tokens."""

_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?|interpreter")


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{name} must be {allowed}, got {value!r}")


def _is_int(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _check_budget(max_num_batched_tokens: int, max_num_seqs: int) -> None:
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs ({max_num_seqs}), so that "
            "every running sequence can decode in a step"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler may do in one step. Raises ConfigError.

    max_num_seqs            sequences that run (hold blocks) at the same time
    max_num_batched_tokens  tokens computed in one step over all sequences
    long_prefill_token_threshold  prompt tokens that one sequence may compute in a step; 0: as many as the budget has left
    max_model_len           tokens of one sequence, prompt and output together
    policy                  "fcfs": in order of arrival; "priority": lower priority values first, then arrival
    rope_switch_len         tokens up to which a sequence takes the short variant of the rope, see ModelSpec.rope_switch_len
    num_pipeline_stages     steps that may be in flight at once, each of other sequences
    num_state_checkpoints   recurrent states that the worker keeps for prefixes; None: the model has no recurrent state
    max_num_drafts          drafts of one sequence in a step; None: no limit. 0 with a recurrent state and nothing that drafts
    computes_whole_prompts  a prompt is computed in one step: its tokens attend to those after them. Needs a prefix cache that
                            is off, as the KV of equal prefixes differs then
    num_host_pages          pages (full KV blocks) that the host tier holds; 0: there is none
    max_page_saves          pages that one step may save; more are dropped
    kv_save                 see EngineConfig
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    policy: Literal["fcfs", "priority"] = "fcfs"
    rope_switch_len: int | None = None
    num_pipeline_stages: int = 1
    num_state_checkpoints: int | None = None
    max_num_drafts: int | None = None
    computes_whole_prompts: bool = False
    num_host_pages: int = 0
    max_page_saves: int = 1024
    kv_save: KvSave = "reused"

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "block_size",
            "num_kv_blocks",
            "num_pipeline_stages",
            "max_page_saves",
        ):
            value = getattr(self, name)
            _require(_is_int(value, 1), name, value, "an integer >= 1")
        for name in ("num_state_checkpoints", "max_num_drafts"):
            value = getattr(self, name)
            _require(value is None or _is_int(value, 0), name, value, "None or an integer >= 0")
        has_states = self.num_state_checkpoints is not None
        _require(not has_states or self.num_pipeline_stages == 1, "num_pipeline_stages", self.num_pipeline_stages, "1 here")
        _require(_is_int(self.num_host_pages, 0), "num_host_pages", self.num_host_pages, "an integer >= 0")
        _require(self.kv_save in _KV_SAVES, "kv_save", self.kv_save, f"one of {_KV_SAVES}")
        threshold = self.long_prefill_token_threshold
        _require(_is_int(threshold, 0), "long_prefill_token_threshold", threshold, "an integer >= 0")
        _require(self.policy in _POLICIES, "policy", self.policy, f"one of {_POLICIES}")
        _check_budget(self.max_num_batched_tokens, self.max_num_seqs)
        if self.computes_whole_prompts and self.enable_prefix_caching:
            raise ConfigError("enable_prefix_caching must be False where prompts are computed whole (computes_whole_prompts)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The options of LLM, LLMEngine and AsyncLLM. Raises ConfigError.

    model                   a local folder, a hub id, or the name of a bundled model (demo, demo-draft, demo-moe)
    tokenizer               where the tokenizer is, when it is not with the model
    chat_template           a file with a Jinja template, or a name: of one of the checkpoint's, or "chatml"; None: its default
    skip_tokenizer_init     load no tokenizer: prompts are token ids then, and outputs have no text
    revision                branch, tag or commit of a hub id
    dtype                   of weights and activations; "auto" takes the checkpoint's
    model_impl              who computes the model: "auto" and "quire": quire's own implementation, for the model types that it
                            has; "transformers": the transformers library (`quire[transformers]`), for any causal model whose
                            attention goes through its attention interface. Slower, without quantization
    quantization            quantise the weights when they are loaded: "int8" per row, "int4" in groups of 128 columns (some
                            weights get int8 there, see quant/policy.py), "fp8" per row, None: run them as they are
                            stored. For checkpoints that are not quantised already
    allow_missing_head      use the embedding as the output head, with a warning, where a checkpoint that is not tied has no
                            lm_head.weight; otherwise that is an error. The model itself only, not a draft model
    kv_cache_dtype          "auto": the model's dtype; "int8": half of the memory, with a scale per token and head; "fp8": the
                            same on a GPU alone
    max_model_len           tokens of a sequence; None takes the model's own maximum
    max_num_seqs            sequences that run at the same time
    max_num_batched_tokens  tokens in one step; None: 2048, on a GPU 8192, or max_num_seqs where that is more
    block_size              tokens in a KV block; None: 16 on a CPU, 64 on a GPU
    num_kv_blocks           size of the KV pool in blocks; None: from kv_cache_memory_bytes
    kv_cache_memory_bytes   size of the KV pool in bytes; None: what the memory plan finds
    enable_prefix_caching   reuse the KV of equal prefixes
    kv_host_bytes           size of the host tier: full KV blocks that leave the pool are kept there, and loaded when a prompt
                            begins with their tokens again. None: no host tier, or 256 MiB where there is a disk tier
    kv_disk_dir             a folder for the disk tier, which several engines may share, and which outlives them; None: no disk
                            tier
    kv_disk_bytes           the most that the folder may hold; needed with kv_disk_dir
    kv_save                 which blocks the tiers keep: "reused": those that were asked for at least twice, and those that the
                            engine has time for while it is idle; "all"; "none": tiers are only read
    scheduling_policy       "fcfs" or "priority"
    complete_json_within_max_tokens  complete outputs that are JSON before max_tokens is reached, where possible; otherwise
                            max_tokens cuts them and finish_reason is "length". A request may override it with fit_max_tokens
    max_logprobs            the most logprobs and prompt_logprobs that a request may ask for; -1: the whole vocabulary too
    seed                    of requests that bring no seed of their own
    device                  "auto": a GPU where there is one that can be used; "cpu", "cuda", "cuda:N"; "interpreter": the GPU's
                            code on the CPU, for tests
    gpu_memory_utilization  share of a GPU's memory that may be taken, what others take included
    enforce_eager           launch every step kernel by kernel: start faster, decode slower
    async_scheduling        plan and launch a step while the one before still runs, on a GPU or with pipeline stages;
                            None: where that is possible
    attention_backend       "auto" and "triton": our kernels; "flashinfer" and "flash_attn": these libraries, where they are
                            installed, for the steps of a GPU that are launched one by one, those with prompts above all
    tile_table              a file of `quire tune`, with the tiles of a GPU's kernels; None: that of the environment variable
                            QUIRE_TILE_TABLE, the user's own, or the defaults
    deterministic           the same tokens whatever else is in the batch; always so with the native kernels of the CPU, at some
                            cost on a GPU, refused where torch alone runs the model
    num_threads             threads that torch computes with, in the whole process, at most one for each core that it may use;
                            None: torch's own choice
    speculative_config      draft tokens and verify several in a step: a SpeculativeConfig, or a dict or JSON of its fields
    tensor_parallel_size    processes of this host that share the model: each has a part of every weight and of the KV cache,
                            and num_threads divided by their number, or a GPU each. The same tokens at any number on a CPU, and
                            with deterministic on GPUs
    tensor_parallel_shares  what each of them gets, in parts: (2, 1) gives the first two thirds; None: equal shares
    data_parallel_size      replicas: engines of this host that share nothing and divide the requests. Each has a process,
                            weights and a KV pool of its own, and a GPU of its own where GPUs are used. num_threads and the
                            memory are divided among them; max_num_seqs, num_kv_blocks, kv_cache_memory_bytes and all else
                            are those of each replica
    data_parallel_threads   threads of each replica, in place of num_threads: (2, 1); None: num_threads, or the cores, divided
    host_memory_bytes       memory of the host that the engines together may plan with; None: what is free when they start
    pipeline_parallel_size  processes of this host that each have a range of the layers (a stage) with its KV cache, and
                            num_threads divided by their number; they compute steps of different sequences at the same time.
                            The same tokens at any number. On a CPU
    pipeline_layers         the number of layers of each stage; None: divided so that the stages take about the same time
    distributed_executor_backend  who starts the ranks: "spawn": this process; "ray": Ray; None: a launcher where one has set
                            the environment (torchrun, LeaderWorkerSet), and this process otherwise
    """

    model: str
    tokenizer: str | None = None
    chat_template: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    dtype: str = "auto"
    model_impl: Literal["auto", "quire", "transformers"] = "auto"
    quantization: Literal["int8", "int4", "fp8"] | None = None
    allow_missing_head: bool = False
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 128
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    kv_host_bytes: int | None = None
    kv_disk_dir: str | None = None
    kv_disk_bytes: int | None = None
    kv_save: KvSave = "reused"
    long_prefill_token_threshold: int = 0
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    complete_json_within_max_tokens: bool = False
    max_logprobs: int = 20
    seed: int = 0
    device: str = "auto"
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    attention_backend: Literal["auto", "triton", "flashinfer", "flash_attn"] = "auto"
    tile_table: str | None = None
    deterministic: bool = False
    num_threads: int | None = None
    speculative_config: SpeculativeConfig | None = None
    tensor_parallel_size: int = 1
    tensor_parallel_shares: tuple[float, ...] | None = None
    data_parallel_size: int = 1
    data_parallel_threads: tuple[int, ...] | None = None
    host_memory_bytes: int | None = None
    pipeline_parallel_size: int = 1
    pipeline_layers: tuple[int, ...] | None = None
    distributed_executor_backend: Literal["spawn", "ray"] | None = None
    fit_structured_outputs: InitVar[bool | None] = None  # the old name of complete_json_within_max_tokens

    @property
    def parallel(self) -> ParallelConfig:
        """How the model is divided among ranks."""
        return ParallelConfig(
            tensor_parallel_size=self.tensor_parallel_size,
            tensor_parallel_shares=self.tensor_parallel_shares,
            data_parallel_size=self.data_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            pipeline_layers=self.pipeline_layers,
        )

    def __post_init__(self, fit_structured_outputs: bool | None) -> None:
        take_old_name(self, "fit_structured_outputs", fit_structured_outputs, "complete_json_within_max_tokens")
        parallel = self.parallel
        object.__setattr__(self, "tensor_parallel_shares", parallel.tensor_parallel_shares)
        object.__setattr__(self, "pipeline_layers", parallel.pipeline_layers)
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", SpeculativeConfig.read(self.speculative_config))
        _require(isinstance(self.model, str) and bool(self.model), "model", self.model, "a string: a folder, a hub id or demo")
        _require(self.dtype in _DTYPES, "dtype", self.dtype, f"one of {_DTYPES}")
        _require(self.model_impl in MODEL_IMPLS, "model_impl", self.model_impl, f"one of {MODEL_IMPLS}")
        is_known = self.quantization is None or self.quantization in _QUANTIZATIONS
        _require(is_known, "quantization", self.quantization, f"None or one of {_QUANTIZATIONS}")
        is_known = self.kv_cache_dtype in _KV_CACHE_DTYPES
        _require(is_known, "kv_cache_dtype", self.kv_cache_dtype, f"one of {_KV_CACHE_DTYPES}")
        for name in (
            "max_model_len",
            "max_num_batched_tokens",
            "num_kv_blocks",
            "kv_cache_memory_bytes",
            "num_threads",
            "block_size",
            "host_memory_bytes",
            "kv_host_bytes",
            "kv_disk_bytes",
        ):
            value = getattr(self, name)
            _require(value is None or _is_int(value, 1), name, value, "None or an integer >= 1")
        check_num_threads("num_threads", self.num_threads)
        self._check_replicas()
        _require(_is_int(self.max_num_seqs, 1), "max_num_seqs", self.max_num_seqs, "an integer >= 1")
        self._check_tiers()
        for name in ("tokenizer", "chat_template", "revision", "tile_table", "kv_disk_dir"):
            value = getattr(self, name)
            _require(value is None or (isinstance(value, str) and bool(value)), name, value, "None or a string")
        threshold = self.long_prefill_token_threshold
        _require(_is_int(threshold, 0), "long_prefill_token_threshold", threshold, "an integer >= 0")
        _require(_is_int(self.max_logprobs, -1), "max_logprobs", self.max_logprobs, "an integer >= -1")
        for name in (
            "enable_prefix_caching",
            "skip_tokenizer_init",
            "allow_missing_head",
            "complete_json_within_max_tokens",
            "enforce_eager",
            "deterministic",
        ):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        is_known = self.async_scheduling is None or isinstance(self.async_scheduling, bool)
        _require(is_known, "async_scheduling", self.async_scheduling, "None, True or False")
        _require(self.scheduling_policy in _POLICIES, "scheduling_policy", self.scheduling_policy, f"one of {_POLICIES}")
        _require(_is_int(self.seed, 0) and self.seed < 2**64, "seed", self.seed, "an integer from 0 to 2**64 - 1")
        is_known = self.distributed_executor_backend in (None, *EXECUTOR_BACKENDS)
        backends = f"None or one of {EXECUTOR_BACKENDS}"
        _require(is_known, "distributed_executor_backend", self.distributed_executor_backend, backends)
        self._check_device()
        self._check_model_impl()
        if self.max_model_len == 1:
            raise ConfigError("max_model_len must be at least 2, one token of prompt and one of output, got 1")
        if self.max_num_batched_tokens is not None:
            _check_budget(self.max_num_batched_tokens, self.max_num_seqs)
        if self.num_kv_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError("num_kv_blocks and kv_cache_memory_bytes both size the KV pool: give one of them")

    def _check_model_impl(self) -> None:
        """Refuse the options that models of the transformers library do not have."""
        if self.model_impl != "transformers":
            return
        for name, value, allowed in (
            ("quantization", self.quantization, (None,)),
            ("allow_missing_head", self.allow_missing_head, (False,)),
            ("kv_cache_dtype", self.kv_cache_dtype, ("auto",)),
            ("tensor_parallel_size", self.tensor_parallel_size, (1,)),
            ("pipeline_parallel_size", self.pipeline_parallel_size, (1,)),
            ("deterministic", self.deterministic, (False,)),
        ):
            if value not in allowed:
                raise ConfigError(
                    f"{name} is {value!r}, but model_impl 'transformers' allows {' or '.join(map(repr, allowed))} only: "
                    "leave it out, or choose model_impl 'auto'"
                )
        if self.device == "interpreter":
            raise ConfigError("device is 'interpreter', but model_impl 'transformers' allows 'auto', 'cpu', 'cuda' or 'cuda:N'")
        methods = () if self.speculative_config is None else self.speculative_config.methods
        refused = [method for method in methods if method not in TRANSFORMERS_DRAFT_METHODS]
        if refused:
            raise ConfigError(
                f"speculative_config: method {refused[0]!r} reads inside of the model, which model_impl 'transformers' does "
                f"not allow; allowed: {', '.join(TRANSFORMERS_DRAFT_METHODS)}"
            )

    @property
    def host_tier_bytes(self) -> int:
        """Size of the host tier; 0: there is none."""
        return self.kv_host_bytes or (0 if self.kv_disk_dir is None else STAGING_BYTES)

    def _check_tiers(self) -> None:
        _require(self.kv_save in _KV_SAVES, "kv_save", self.kv_save, f"one of {_KV_SAVES}")
        if (self.kv_disk_dir is None) != (self.kv_disk_bytes is None):
            missing = "kv_disk_bytes" if self.kv_disk_bytes is None else "kv_disk_dir"
            raise ConfigError(f"a disk tier needs kv_disk_dir and kv_disk_bytes: {missing} is missing")
        if self.host_tier_bytes and not self.enable_prefix_caching:
            name = "kv_disk_dir" if self.kv_host_bytes is None else "kv_host_bytes"
            raise ConfigError(f"{name} needs enable_prefix_caching: the tiers hold blocks of the prefix cache")

    def _check_replicas(self) -> None:
        threads, size = self.data_parallel_threads, self.data_parallel_size
        if threads is not None:
            allowed = f"None or a sequence of {size} integers >= 1, one for each replica (data_parallel_size)"
            is_sequence = isinstance(threads, tuple | list) and len(threads) == size and all(_is_int(one, 1) for one in threads)
            _require(is_sequence, "data_parallel_threads", threads, allowed)
            if self.num_threads is not None:
                raise ConfigError(
                    f"num_threads ({self.num_threads}) and data_parallel_threads ({threads!r}) both say how many threads the "
                    "replicas have: give one of them"
                )
            for number in threads:
                check_num_threads("data_parallel_threads", number)
            object.__setattr__(self, "data_parallel_threads", tuple(threads))
        if size > 1 and isinstance(self.device, str) and self.device.startswith("cuda:"):
            raise ConfigError(
                f"device is {self.device!r}, one GPU, but data_parallel_size is {size} and every replica needs a GPU of its "
                "own: choose device='cuda', and the GPUs by CUDA_VISIBLE_DEVICES"
            )

    def _check_device(self) -> None:
        is_known = isinstance(self.device, str) and _DEVICE.fullmatch(self.device) is not None
        _require(is_known, "device", self.device, "'auto', 'cpu', 'cuda', 'cuda:N' or 'interpreter'")
        share = self.gpu_memory_utilization
        is_share = isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
        _require(is_share, "gpu_memory_utilization", share, "above 0 and at most 1")
        allowed = f"one of {_ATTENTION_BACKENDS}"
        _require(self.attention_backend in _ATTENTION_BACKENDS, "attention_backend", self.attention_backend, allowed)
