"""EngineConfig: every option of the engine, validated, built once."""

from __future__ import annotations

import math
import re
from dataclasses import InitVar, dataclass
from typing import Literal

from quire.base.errors import ConfigError
from quire.base.renamed_option import take_old_name
from quire.base.threads import check_num_threads
from quire.contracts.expert_options import EplbConfig, LossyRouting, check_experts, take_redundant
from quire.contracts.option_checks import check_budget, is_int, require
from quire.contracts.parallel import EXECUTOR_BACKENDS, REPLICA_BACKENDS, ParallelConfig
from quire.contracts.scheduler_config import KV_SAVES, POLICIES, KvSave
from quire.contracts.speculative import SpeculativeConfig

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_QUANTIZATIONS = ("int8", "int4", "fp8")
_MAX_LORAS, _MAX_LORA_RANK = 8, 64
_MAX_TIMEOUT_S = 86_400
_KV_CACHE_DTYPES = ("auto", "int8", "fp8", "turboquant_4bit", "k8v4")
Role = Literal["both", "prefill", "decode"]
KvTransferBackend = Literal["sockets", "nixl"]
_ROLES = ("both", "prefill", "decode")
STAGING_BYTES = 256 << 20
"""Size of the host tier where only a disk tier or a role is asked for, whose pages pass through it."""
ATTENTION_LIBRARIES = ("flashinfer", "flash_attn")
"""Values of attention_backend that name what a user has to install."""

_ATTENTION_BACKENDS = ("auto", "triton", *ATTENTION_LIBRARIES)
MODEL_IMPLS = ("auto", "quire", "transformers")
TRANSFORMERS_DRAFT_METHODS = ("ngram", "suffix", "lookahead", "draft_model")
"""Methods of speculative_config for models of the transformers library: those that need nothing of it but its tokens."""

_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?|interpreter")


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
                            same, in e4m3; "turboquant_4bit": about a quarter, rotated vectors with sixteen levels;
                            "k8v4": keys in int8 and values in turboquant_4bit
    kv_cache_dtype_skip_layers  layers that keep the KV cache in the model's dtype, where kv_cache_dtype is a quantised format:
                            their numbers, negative ones from the end, such as (0, -1). None: none
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
                            engine has time for while it is idle; "all", when they leave the pool; "write_through": all, as soon
                            as they are computed; "none": tiers are only read
    role                    "both": prompts and outputs are computed here; "prefill": computes prompts for decode engines, which
                            pull their KV; "decode": has long prompts computed by prefill engines
    prefill_listen          where decode engines connect while the role is "prefill", tcp://HOST:PORT or unix:PATH; with it a
                            running engine can change its role
    prefill_urls            while the role is "decode": where prefill engines listen; None: the server is told by a router
    prefill_min_tokens      with role "decode": prompts with fewer uncached tokens are computed here
    transfer_secret_file    a file with a secret that prefill and decode engines share, made if absent; needed to listen to
                            other machines
    kv_transfer_backend     how pages travel between prefill and decode engines, the same on both: "sockets": shared memory on
                            one machine, TCP between machines; "nixl": NIXL with UCX (RDMA where there is any; CPU only)
    scheduling_policy       "fcfs" or "priority"
    complete_json_within_max_tokens  complete outputs that are JSON before max_tokens is reached, where possible; otherwise
                            max_tokens cuts them and finish_reason is "length". A request may override it with fit_max_tokens
    max_logprobs            the most logprobs and prompt_logprobs that a request may ask for; -1: the whole vocabulary too
    seed                    of requests that bring no seed of their own
    device                  "auto": a GPU where there is one that can be used; "cpu", "cuda", "cuda:N"; "interpreter": the GPU's
                            code on the CPU, for tests
    gpu_memory_utilization  share of a GPU's memory that may be taken, what others take included
    cpu_offload_gb          GiB of weights that stay in pinned host memory, for models larger than the GPU: whole layers, which
                            every step copies to the GPU before they run. Steps take as long as these copies, and are launched
                            without CUDA graphs. One GPU only
    enforce_eager           launch every step kernel by kernel: start faster, decode slower
    nvtx_ranges             mark the launch of each step on a GPU with an NVTX range, for profilers such as Nsight Systems
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
    enable_dp_attention     each of these processes has whole attention weights and attends to sequences of its own
    dp_attention_size       with it: groups of these processes that do so, and divide the heads; None: one for each process. CPU
    enable_expert_parallel  each of these processes, at least two, holds whole experts of a mixture model, instead of a part of
                            every expert. The same tokens at any number of them, on GPUs with deterministic
    expert_placement        which experts each process holds: "linear": consecutive ones; "balanced": those with which the
                            processes have even loads, given expert_load; or a file with a placement
    expert_load             with "balanced": a file with the tokens of each expert, written by save_expert_load
    num_redundant_experts   copies of experts in each layer, in other processes; with "balanced" of the busiest ones
    save_expert_load        write the tokens of each expert to this file when the engine is closed. Without
                            prefill_context_parallel_size
    enable_eplb             move experts between the processes while the engine runs, so that their loads stay even. The same
                            tokens
    eplb_config             when experts are moved: window_size, step_interval, num_redundant_experts, log_balancedness
    save_expert_placement   write the placement to this file when experts have moved, and when the engine is closed
    expert_capacity_factor  lossy, changes outputs: an expert takes at most this many times the mean of a step (1 to 8; usual:
                            1.2 to 1.5), the rest goes to the next best experts; None: no limit
    expert_bias_rate        lossy, changes outputs: busy experts are chosen less, by a bias that changes by this much in a step
                            (1e-6 to 0.05) and is at most 0.05; None: off
    expert_min_share        lossy, changes outputs: experts with less than this share (0.001 to 1) of the weight of a token's
                            best expert are left out; None: off
    data_parallel_size      replicas: engines of this host that share nothing and divide the requests. Each has a process,
                            weights and a KV pool of its own, and a GPU of its own where GPUs are used. num_threads and the
                            memory are divided among them; max_num_seqs, num_kv_blocks, kv_cache_memory_bytes and all else
                            are those of each replica
    data_parallel_threads   threads of each replica, in place of num_threads: (2, 1); None: num_threads, or the cores, divided
    data_parallel_backend   who starts the replicas of `quire serve`: "mp": the server, on its host; "ray": Ray, on any node of
                            its cluster, as actors with num_threads CPUs each
    host_memory_bytes       memory of the host that the engines together may plan with; None: what is free when they start
    pipeline_parallel_size  processes that each have a range of the layers (a stage) with its KV cache, and num_threads divided
                            by their number; they compute steps of different sequences at the same time. With
                            tensor_parallel_size each stage is so many processes; on CPUs with a launcher they may be on several
                            hosts. The same tokens at any number. On GPUs each process has one
    decode_context_parallel_size  the processes of tensor_parallel_size, which it divides, in groups of so many that share the
                            tokens of a sequence: each holds the KV cache of some of them, for the heads of all, where otherwise
                            those with the same key and value head hold copies. The same tokens at any number; on GPUs with
                            deterministic
    prefill_context_parallel_size  processes of this host, or groups of tensor_parallel_size of them, that each hold the whole
                            model and KV cache and compute a part of the tokens of a prompt. The same tokens at any number; on
                            GPUs with deterministic
    pipeline_layers         the number of layers of each stage; None: divided so that the stages take about the same time
    enable_lora             take LoRA adapters (PEFT), which requests name. Not with enable_dp_attention or
                            prefill_context_parallel_size
    max_loras               adapters that are in memory at the same time; others are loaded when a request needs them, in place
                            of those that no request uses
    max_lora_rank           the largest rank of an adapter
    enable_lora_experts     count adapters of all experts in the memory plan: GPUs refuse adapters of experts without
    distributed_executor_backend  who starts the ranks: "spawn": this process; "ray": Ray; None: a launcher where one has set
                            the environment (torchrun, LeaderWorkerSet), and this process otherwise
    distributed_timeout_s   seconds without a sign of life of a rank, or in a wait for it, after which the group ends with an
                            error that names it. Raise it where a step takes longer, for example under a debugger
    distributed_start_timeout_s  seconds in which all ranks must have loaded their part
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
    kv_cache_dtype: Literal["auto", "int8", "fp8", "turboquant_4bit", "k8v4"] = "auto"
    kv_cache_dtype_skip_layers: tuple[int, ...] | None = None
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
    role: Role = "both"
    prefill_listen: str | None = None
    prefill_urls: tuple[str, ...] | None = None
    prefill_min_tokens: int = 256
    transfer_secret_file: str | None = None
    kv_transfer_backend: KvTransferBackend = "sockets"
    long_prefill_token_threshold: int = 0
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    complete_json_within_max_tokens: bool = False
    max_logprobs: int = 20
    seed: int = 0
    device: str = "auto"
    gpu_memory_utilization: float = 0.9
    cpu_offload_gb: float = 0
    enforce_eager: bool = False
    nvtx_ranges: bool = False
    async_scheduling: bool | None = None
    attention_backend: Literal["auto", "triton", "flashinfer", "flash_attn"] = "auto"
    tile_table: str | None = None
    deterministic: bool = False
    num_threads: int | None = None
    speculative_config: SpeculativeConfig | None = None
    tensor_parallel_size: int = 1
    tensor_parallel_shares: tuple[float, ...] | None = None
    enable_dp_attention: bool = False
    dp_attention_size: int | None = None
    enable_expert_parallel: bool = False
    expert_placement: str = "linear"
    expert_load: str | None = None
    num_redundant_experts: int = 0
    save_expert_load: str | None = None
    enable_eplb: bool = False
    eplb_config: EplbConfig | None = None
    save_expert_placement: str | None = None
    expert_capacity_factor: float | None = None
    expert_bias_rate: float | None = None
    expert_min_share: float | None = None
    data_parallel_size: int = 1
    data_parallel_threads: tuple[int, ...] | None = None
    data_parallel_backend: Literal["mp", "ray"] = "mp"
    host_memory_bytes: int | None = None
    pipeline_parallel_size: int = 1
    pipeline_layers: tuple[int, ...] | None = None
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    enable_lora: bool = False
    max_loras: int = _MAX_LORAS
    max_lora_rank: int = _MAX_LORA_RANK
    enable_lora_experts: bool = False
    distributed_executor_backend: Literal["spawn", "ray"] | None = None
    distributed_timeout_s: float = 60.0
    distributed_start_timeout_s: float = 600.0
    fit_structured_outputs: InitVar[bool | None] = None  # the old name of complete_json_within_max_tokens

    @property
    def lossy_routing(self) -> LossyRouting:
        """The measures for experts that change outputs."""
        return LossyRouting(self.expert_capacity_factor or 0.0, self.expert_bias_rate or 0.0, self.expert_min_share or 0.0)

    @property
    def parallel(self) -> ParallelConfig:
        """How the model is divided among ranks."""
        return ParallelConfig(
            tensor_parallel_size=self.tensor_parallel_size,
            tensor_parallel_shares=self.tensor_parallel_shares,
            enable_expert_parallel=self.enable_expert_parallel,
            enable_dp_attention=self.enable_dp_attention,
            dp_attention_size=self.dp_attention_size,
            data_parallel_size=self.data_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            pipeline_layers=self.pipeline_layers,
            decode_context_parallel_size=self.decode_context_parallel_size,
            prefill_context_parallel_size=self.prefill_context_parallel_size,
        )

    def __post_init__(self, fit_structured_outputs: bool | None) -> None:
        take_old_name(self, "fit_structured_outputs", fit_structured_outputs, "complete_json_within_max_tokens")
        parallel = self.parallel
        object.__setattr__(self, "tensor_parallel_shares", parallel.tensor_parallel_shares)
        object.__setattr__(self, "pipeline_layers", parallel.pipeline_layers)
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", SpeculativeConfig.read(self.speculative_config))
        require(isinstance(self.model, str) and bool(self.model), "model", self.model, "a string: a folder, a hub id or demo")
        require(self.dtype in _DTYPES, "dtype", self.dtype, f"one of {_DTYPES}")
        require(self.model_impl in MODEL_IMPLS, "model_impl", self.model_impl, f"one of {MODEL_IMPLS}")
        is_known = self.quantization is None or self.quantization in _QUANTIZATIONS
        require(is_known, "quantization", self.quantization, f"None or one of {_QUANTIZATIONS}")
        is_known = self.kv_cache_dtype in _KV_CACHE_DTYPES
        require(is_known, "kv_cache_dtype", self.kv_cache_dtype, f"one of {_KV_CACHE_DTYPES}")
        self._check_skip_layers()
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
            require(value is None or is_int(value, 1), name, value, "None or an integer >= 1")
        self._check_replicas()
        take_redundant(self)
        check_experts(self)
        require(is_int(self.max_num_seqs, 1), "max_num_seqs", self.max_num_seqs, "an integer >= 1")
        self._check_role()
        self._check_tiers()
        self._check_values()

    def _check_values(self) -> None:
        texts = (
            "tokenizer",
            "chat_template",
            "revision",
            "tile_table",
            "kv_disk_dir",
            "expert_load",
            "save_expert_load",
            "save_expert_placement",
            "prefill_listen",
            "transfer_secret_file",
        )
        for name in texts:
            value = getattr(self, name)
            require(value is None or (isinstance(value, str) and bool(value)), name, value, "None or a string")
        threshold = self.long_prefill_token_threshold
        require(is_int(threshold, 0), "long_prefill_token_threshold", threshold, "an integer >= 0")
        require(is_int(self.max_logprobs, -1), "max_logprobs", self.max_logprobs, "an integer >= -1")
        for name in (
            "enable_prefix_caching",
            "skip_tokenizer_init",
            "allow_missing_head",
            "complete_json_within_max_tokens",
            "enforce_eager",
            "nvtx_ranges",
            "deterministic",
            "enable_lora",
            "enable_lora_experts",
        ):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        is_known = self.async_scheduling is None or isinstance(self.async_scheduling, bool)
        require(is_known, "async_scheduling", self.async_scheduling, "None, True or False")
        require(self.scheduling_policy in POLICIES, "scheduling_policy", self.scheduling_policy, f"one of {POLICIES}")
        require(is_int(self.seed, 0) and self.seed < 2**64, "seed", self.seed, "an integer from 0 to 2**64 - 1")
        is_known = self.distributed_executor_backend in (None, *EXECUTOR_BACKENDS)
        backends = f"None or one of {EXECUTOR_BACKENDS}"
        require(is_known, "distributed_executor_backend", self.distributed_executor_backend, backends)
        for name in ("distributed_timeout_s", "distributed_start_timeout_s"):
            value = getattr(self, name)
            is_time = isinstance(value, (int, float)) and not isinstance(value, bool) and 1 <= value <= _MAX_TIMEOUT_S
            require(is_time, name, value, f"a number of seconds from 1 to {_MAX_TIMEOUT_S}")
        self._check_device()
        self._check_model_impl()
        self._check_lora()
        if self.max_model_len == 1:
            raise ConfigError("max_model_len must be at least 2, one token of prompt and one of output, got 1")
        if self.max_num_batched_tokens is not None:
            check_budget(self.max_num_batched_tokens, self.max_num_seqs)
        if self.num_kv_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError("num_kv_blocks and kv_cache_memory_bytes both size the KV pool: give one of them")

    def _check_skip_layers(self) -> None:
        layers = self.kv_cache_dtype_skip_layers
        if layers is None:
            return
        is_list = isinstance(layers, tuple | list) and bool(layers)
        is_list = is_list and all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers)
        require(is_list, "kv_cache_dtype_skip_layers", layers, "None or a sequence of integers")
        object.__setattr__(self, "kv_cache_dtype_skip_layers", tuple(layers))
        if self.kv_cache_dtype == "auto":
            raise ConfigError(
                "kv_cache_dtype_skip_layers needs a quantised kv_cache_dtype, but that is 'auto', which quantises no layer: "
                "leave one of them out"
            )

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
            ("prefill_context_parallel_size", self.prefill_context_parallel_size, (1,)),
            ("enable_expert_parallel", self.enable_expert_parallel, (False,)),
            ("save_expert_load", self.save_expert_load, (None,)),
            ("deterministic", self.deterministic, (False,)),
            ("cpu_offload_gb", self.cpu_offload_gb, (0,)),
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

    def _check_lora(self) -> None:
        for name, default in (("max_loras", _MAX_LORAS), ("max_lora_rank", _MAX_LORA_RANK)):
            value = getattr(self, name)
            require(is_int(value, 1), name, value, "an integer >= 1")
            require(self.enable_lora or value == default, name, value, f"{default}, its default, without enable_lora")
        if not self.enable_lora:
            require(not self.enable_lora_experts, "enable_lora_experts", True, "False without enable_lora")
            return
        for name, allowed in (
            ("prefill_context_parallel_size", 1),
            ("enable_dp_attention", False),
            ("model_impl", None),
        ):
            value = getattr(self, name)
            is_refused = value == "transformers" if name == "model_impl" else value != allowed
            if is_refused:
                instead = "'auto'" if name == "model_impl" else repr(allowed)
                raise ConfigError(
                    f"{name} is {value!r}, but with LoRA adapters (enable_lora) only {instead} is supported: change it, or "
                    "merge the adapter into the weights and leave enable_lora out"
                )

    @property
    def host_tier_bytes(self) -> int:
        """Size of the host tier; 0: there is none."""
        is_staging = self.kv_disk_dir is not None or self.has_kv_transfer
        return self.kv_host_bytes or (STAGING_BYTES if is_staging else 0)

    @property
    def has_kv_transfer(self) -> bool:
        """Whether pages may go to or come from other engines, now or in another role."""
        return self.role != "both" or self.prefill_listen is not None

    def _check_tiers(self) -> None:
        require(self.kv_save in KV_SAVES, "kv_save", self.kv_save, f"one of {KV_SAVES}")
        if (self.kv_disk_dir is None) != (self.kv_disk_bytes is None):
            missing = "kv_disk_bytes" if self.kv_disk_bytes is None else "kv_disk_dir"
            raise ConfigError(f"a disk tier needs kv_disk_dir and kv_disk_bytes: {missing} is missing")
        if self.host_tier_bytes and not self.enable_prefix_caching:
            name = "kv_disk_dir" if self.kv_host_bytes is None else "kv_host_bytes"
            raise ConfigError(f"{name} needs enable_prefix_caching: the tiers hold blocks of the prefix cache")

    def _check_role(self) -> None:
        require(self.role in _ROLES, "role", self.role, f"one of {_ROLES}")
        require(is_int(self.prefill_min_tokens, 1), "prefill_min_tokens", self.prefill_min_tokens, "an integer >= 1")
        urls = self.prefill_urls
        if urls is not None:
            is_list = isinstance(urls, tuple | list) and bool(urls) and all(isinstance(url, str) and url for url in urls)
            require(is_list, "prefill_urls", urls, "None or a sequence of addresses")
            object.__setattr__(self, "prefill_urls", tuple(urls))
        backend = self.kv_transfer_backend
        require(backend in ("sockets", "nixl"), "kv_transfer_backend", backend, "'sockets' or 'nixl'")
        if self.role == "prefill" and self.prefill_listen is None:
            raise ConfigError("role is 'prefill', and prefill_listen is missing: say where decode engines connect")
        if not self.has_kv_transfer:
            for name, default in (("kv_transfer_backend", "sockets"), ("transfer_secret_file", None), ("prefill_urls", None)):
                value = getattr(self, name)
                if value != default:
                    raise ConfigError(
                        f"role is 'both', and {name} is {value!r}: it is for the roles 'prefill' and 'decode', and for engines "
                        "with prefill_listen, which can change to them"
                    )
            return
        if self.prefill_listen is not None and self.data_parallel_size > 1:
            raise ConfigError(
                f"prefill_listen is {self.prefill_listen!r} and data_parallel_size {self.data_parallel_size}: replicas cannot "
                "share prefill_listen; start a server for each"
            )
        if not self.enable_prefix_caching:
            raise ConfigError(f"{self.transfer_field} needs enable_prefix_caching: pages are blocks of the prefix cache")

    @property
    def transfer_field(self) -> str:
        """The field that asks for KV transfer, with its value, for messages."""
        return f"role {self.role!r}" if self.role != "both" else f"prefill_listen {self.prefill_listen!r}"

    def _check_replicas(self) -> None:
        threads, size = self.data_parallel_threads, self.data_parallel_size
        allowed = f"one of {REPLICA_BACKENDS}"
        require(self.data_parallel_backend in REPLICA_BACKENDS, "data_parallel_backend", self.data_parallel_backend, allowed)
        if self.data_parallel_backend == "mp":  # otherwise the cores are those of other hosts
            check_num_threads("num_threads", self.num_threads)
        elif self.distributed_executor_backend == "ray":
            raise ConfigError(
                "data_parallel_backend and distributed_executor_backend are both 'ray': Ray starts a replica on one node, "
                "and the replica its ranks, with distributed_executor_backend='spawn' or None"
            )
        elif self.prefill_listen is not None:
            raise ConfigError(
                f"prefill_listen is {self.prefill_listen!r} and data_parallel_backend 'ray', which may start the engine on "
                "another node: start a server on each node instead"
            )
        if threads is not None:
            allowed = f"None or a sequence of {size} integers >= 1, one for each replica (data_parallel_size)"
            is_sequence = isinstance(threads, tuple | list) and len(threads) == size and all(is_int(one, 1) for one in threads)
            require(is_sequence, "data_parallel_threads", threads, allowed)
            if self.num_threads is not None:
                raise ConfigError(
                    f"num_threads ({self.num_threads}) and data_parallel_threads ({threads!r}) both say how many threads the "
                    "replicas have: give one of them"
                )
            for number in threads if self.data_parallel_backend == "mp" else ():
                check_num_threads("data_parallel_threads", number)
            object.__setattr__(self, "data_parallel_threads", tuple(threads))
        if size > 1 and isinstance(self.device, str) and self.device.startswith("cuda:"):
            raise ConfigError(
                f"device is {self.device!r}, one GPU, but data_parallel_size is {size} and every replica needs a GPU of its "
                "own: choose device='cuda', and the GPUs by CUDA_VISIBLE_DEVICES"
            )

    def _check_offload(self) -> None:
        size = self.cpu_offload_gb
        is_size = isinstance(size, int | float) and not isinstance(size, bool) and 0 <= size < math.inf
        require(is_size, "cpu_offload_gb", size, "a number of GiB, 0 or more")
        for name in ("tensor_parallel_size", "pipeline_parallel_size") if size > 0 else ():
            require(getattr(self, name) == 1, name, getattr(self, name), "1 with cpu_offload_gb")
        if size > 0 and self.device == "cpu":
            raise ConfigError(
                f"cpu_offload_gb is {size:g}, but device is 'cpu', where all weights are in host memory already: leave it out"
            )

    def _check_device(self) -> None:
        is_known = isinstance(self.device, str) and _DEVICE.fullmatch(self.device) is not None
        require(is_known, "device", self.device, "'auto', 'cpu', 'cuda', 'cuda:N' or 'interpreter'")
        share = self.gpu_memory_utilization
        is_share = isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
        require(is_share, "gpu_memory_utilization", share, "above 0 and at most 1")
        self._check_offload()
        allowed = f"one of {_ATTENTION_BACKENDS}"
        require(self.attention_backend in _ATTENTION_BACKENDS, "attention_backend", self.attention_backend, allowed)
