"""The options of the engine on the command line, as a table."""

from __future__ import annotations

import argparse
import warnings
from typing import Any, NamedTuple

from quire.contracts.config import MODEL_IMPLS
from quire.contracts.parallel import EXECUTOR_BACKENDS, REPLICA_BACKENDS


class EngineOption(NamedTuple):
    """The arguments of add_argument for one option; its default is that of the field of EngineConfig that it sets."""

    names: tuple[str, ...]
    settings: dict[str, Any]


def _option(*names: str, **settings: Any) -> EngineOption:
    return EngineOption(names, settings)


class _OldSwitch(argparse.BooleanOptionalAction):
    """A switch under its old name: it is accepted for one release, with a warning."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        """See argparse.Action."""
        prefix = "--no-" if option.startswith("--no-") else "--"
        new = prefix + self.dest.replace("_", "-")
        warnings.warn(
            f"{option} is deprecated, use {new}; the old name ends with the next release", FutureWarning, stacklevel=2
        )
        super().__call__(parser, namespace, values, option)


def _addresses(text: str) -> tuple[str, ...]:
    """Return the addresses of a list with commas."""
    return tuple(part.strip() for part in text.split(","))


def integers(text: str) -> tuple[int, ...]:
    """Return the integers of a list with commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers with commas between them, such as 10,18; got {text!r}") from None


def parse_shares(text: str) -> tuple[float, ...]:
    """Return the numbers of a list with commas."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, such as 2,1, got {text!r}") from None


ENGINE_OPTIONS: tuple[EngineOption, ...] = (
    _option("--tokenizer", help="folder or hub id of the tokenizer, when it is not with the model"),
    _option("--chat-template", metavar="FILE|NAME", help="Jinja file, or a name: of a template of the checkpoint's, or chatml"),
    _option("--revision", help="branch, tag or commit of a hub id"),
    _option("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="auto: the checkpoint's"),
    _option(
        "--model-impl",
        choices=MODEL_IMPLS,
        help="transformers: that library computes the model, slower, also types that quire has no implementation of",
    ),
    _option("--quantization", choices=("int8", "int4", "fp8"), help="quantise the weights when they are loaded"),
    _option(
        "--allow-missing-head", action="store_true", help="use the embedding where an untied checkpoint has no lm_head.weight"
    ),
    _option(
        "--kv-cache-dtype",
        choices=("auto", "int8", "fp8", "turboquant_4bit", "k8v4"),
        help="auto: the model's; int8, fp8: half; turboquant_4bit, k8v4: about a quarter, 2/5",
    ),
    _option(
        "--kv-cache-dtype-skip-layers",
        type=integers,
        metavar="0,-1",
        help="layers whose KV cache is not quantised; negative numbers count from the end",
    ),
    _option("--max-model-len", type=int, help="tokens of a sequence, prompt and output together"),
    _option("--max-num-seqs", type=int, help="sequences that run at the same time"),
    _option("--max-num-batched-tokens", type=int, help="tokens computed in one step"),
    _option("--block-size", type=int, help="tokens in a KV block; None: 16, on a GPU 64"),
    _option("--num-kv-blocks", type=int, help="size of the KV pool in blocks"),
    _option("--kv-cache-memory-bytes", type=int, help="size of the KV pool in bytes"),
    _option("--enable-prefix-caching", action=argparse.BooleanOptionalAction, help="reuse KV of equal prefixes"),
    _option("--kv-host-bytes", type=int, help="size of the host tier: KV blocks that leave the pool are kept there"),
    _option("--kv-disk-dir", metavar="DIR", help="folder of the disk tier of KV blocks; it outlives the server"),
    _option("--kv-disk-bytes", type=int, help="the most that the folder of the disk tier may hold"),
    _option("--kv-save", choices=("reused", "all", "write_through", "none"), help="which KV blocks the tiers keep"),
    _option("--role", choices=("both", "prefill", "decode"), help="compute prompts and outputs, or one of them"),
    _option(
        "--prefill-listen", metavar="ADDRESS", help="tcp://HOST:PORT or unix:PATH for decode engines while the role is prefill"
    ),
    _option(
        "--prefill-url",
        dest="prefill_urls",
        type=_addresses,
        metavar="ADDRESS[,ADDRESS]",
        help="of --role decode: where prefill engines listen; without it a router tells them",
    ),
    _option("--prefill-min-tokens", type=int, help="of --role decode: prompts with fewer uncached tokens are computed here"),
    _option("--transfer-secret-file", metavar="FILE", help="secret that prefill and decode engines share, made if absent"),
    _option(
        "--kv-transfer-backend",
        choices=("sockets", "nixl"),
        help="how pages travel between prefill and decode engines: shared memory or TCP, or NIXL (quire[nixl])",
    ),
    _option("--long-prefill-token-threshold", type=int, help="prompt tokens of one sequence a step"),
    _option("--scheduling-policy", choices=("fcfs", "priority"), help="order of requests"),
    _option(
        "--complete-json-within-max-tokens",
        action=argparse.BooleanOptionalAction,
        help="complete JSON within max_tokens, if possible",
    ),
    _option("--fit-structured-outputs", dest="complete_json_within_max_tokens", action=_OldSwitch, help=argparse.SUPPRESS),
    _option("--max-logprobs", type=int, help="limit for requests; -1: none"),
    _option("--seed", type=int, help="same seed, same output"),
    _option("--device", help="auto (a GPU if there is one), cpu, cuda or cuda:N"),
    _option("--gpu-memory-utilization", type=float, help="share of a GPU's memory that may be used"),
    _option("--cpu-offload-gb", type=float, help="GiB of weights in host memory, for models larger than the GPU; slower"),
    _option("--nvtx-ranges", action="store_true", help="mark each step on a GPU for profilers (Nsight Systems)"),
    _option("--enforce-eager", action="store_true", help="no CUDA graphs on a GPU: starts faster, decodes slower"),
    _option(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="plan a step while the previous one runs; None: on a GPU and with pipeline stages, if possible",
    ),
    _option(
        "--attention-backend",
        choices=("auto", "triton", "flashinfer", "flash_attn"),
        help="library for the attention of prompts on a GPU; auto: quire's kernels",
    ),
    _option("--tile-table", metavar="FILE", help="tile sizes of the GPU kernels, a file of `quire tune`"),
    _option(
        "--deterministic", action="store_true", help="batch-invariant: the same tokens in any batch; refused if not supported"
    ),
    _option("--num-threads", type=int, help="threads to compute with; fewer on a machine that others use too"),
    _option(
        "--tensor-parallel-size", "-tp", type=int, metavar="N", help="processes that share the model, with the same tokens"
    ),
    _option("--tensor-parallel-shares", type=parse_shares, metavar="2,1", help="relative share of each of them; None: equal"),
    _option(
        "--enable-dp-attention",
        action="store_true",
        help="each of these processes has whole attention weights and attends to sequences of its own",
    ),
    _option(
        "--dp-attention-size",
        type=int,
        metavar="N",
        help="with it: groups of these processes that do so, and divide the heads; None: one for each process",
    ),
    _option(
        "--enable-expert-parallel",
        action="store_true",
        help="each of these processes holds whole experts of a mixture model, instead of a part of every expert",
    ),
    _option(
        "--expert-placement",
        metavar="linear|balanced|FILE",
        help="experts of each process: consecutive ones, those that balance --expert-load, or those of a file",
    ),
    _option("--expert-load", metavar="FILE", help="tokens of each expert, for balanced: a file of --save-expert-load"),
    _option("--num-redundant-experts", type=int, metavar="N", help="copies of experts in other processes, in each layer"),
    _option("--save-expert-load", metavar="FILE", help="write the tokens of each expert there at the end"),
    _option(
        "--enable-eplb", action="store_true", help="move experts between these processes by their load while the engine runs"
    ),
    _option(
        "--eplb-config",
        metavar="JSON",
        help='when experts move: {"window_size": 1000, "step_interval": 3000, "num_redundant_experts": 0, '
        '"log_balancedness": false}',
    ),
    _option("--save-expert-placement", metavar="FILE", help="write the placement there after moves and at the end"),
    _option(
        "--expert-capacity-factor",
        type=float,
        metavar="F",
        help="lossy: an expert takes at most F times the mean of a step, the rest goes to the next best; usual: 1.2 to 1.5",
    ),
    _option(
        "--expert-bias-rate",
        type=float,
        metavar="R",
        help="lossy: choose busy experts less, by a bias that changes by R per step",
    ),
    _option(
        "--expert-min-share", type=float, metavar="S", help="lossy: leave out experts below this share of a token's best one"
    ),
    _option(
        "--data-parallel-size",
        "-dp",
        type=int,
        metavar="N",
        help="replicas that divide the requests, each with the whole model: more of them at a time; serve and batch run",
    ),
    _option(
        "--data-parallel-threads",
        type=integers,
        metavar="2,1",
        help="threads of each replica; None: --num-threads divided",
    ),
    _option(
        "--data-parallel-backend",
        choices=REPLICA_BACKENDS,
        help="who starts the replicas of `quire serve`: mp: the server, on its host; ray: Ray, on any node of its cluster",
    ),
    _option("--host-memory-bytes", type=int, help="memory that all replicas together may plan with; None: the free memory"),
    _option(
        "--pipeline-parallel-size",
        "-pp",
        type=int,
        metavar="N",
        help="processes that have a range of the layers each, with the same tokens",
    ),
    _option(
        "--decode-context-parallel-size",
        "-dcp",
        type=int,
        metavar="N",
        help="share the KV cache of a sequence among N of the processes of -tp, of which it is a divisor",
    ),
    _option(
        "--prefill-context-parallel-size",
        "-pcp",
        type=int,
        metavar="N",
        help="processes that have the whole model each and divide the tokens of a prompt, with the same tokens",
    ),
    _option(
        "--pipeline-layers",
        type=integers,
        metavar="10,18",
        help="how many layers each of them has; None: so that all take about the same time",
    ),
    _option("--enable-lora", action="store_true", help="take LoRA adapters (PEFT)"),
    _option("--max-loras", type=int, help="LoRA adapters that are in memory at the same time"),
    _option("--max-lora-rank", type=int, help="the largest rank of a LoRA adapter"),
    _option("--enable-lora-experts", action="store_true", help="take memory for LoRA adapters of all experts"),
    _option(
        "--distributed-executor-backend",
        choices=EXECUTOR_BACKENDS,
        help="who starts them; None: torchrun or a LeaderWorkerSet if one has, otherwise this process",
    ),
    _option(
        "--distributed-timeout", dest="distributed_timeout_s", type=float, help="seconds after which a silent rank has failed"
    ),
    _option(
        "--distributed-start-timeout",
        dest="distributed_start_timeout_s",
        type=float,
        help="seconds in which all ranks must have loaded",
    ),
    _option(
        "--speculative-config",
        "--speculative",
        metavar="JSON",
        help='draft tokens ahead: {"method": "ngram", "num_speculative_tokens": 6}; methods: ngram, suffix, draft_model, '
        "eagle, eagle3, medusa, mtp, lookahead, self, or a list of several to be merged; demo-draft, demo-eagle3, demo-medusa "
        "and demo-mtp draft for the bundled demo model",
    ),
)
