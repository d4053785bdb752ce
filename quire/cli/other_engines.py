"""Options of vLLM, SGLang and llama.cpp that quire does not have, and what to use in place of them."""

from __future__ import annotations

from collections.abc import Collection

RENAMED = {
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--context-length": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "-c": "--max-model-len",
    "--disable-log-requests": "--no-access-log",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--dp": "--data-parallel-size",
    "--dp-size": "--data-parallel-size",
    "--ep": "--enable-expert-parallel",
    "--kv-events-config": "--kv-events-endpoint",
    "--kv-transfer-config": "--role",
    "--max-running-requests": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "-np": "--max-num-seqs",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--model-path": "--model",
    "-m": "--model",
    "--n-gpu-layers": "--device",
    "-ngl": "--device",
    "--num-gpu-blocks-override": "--num-kv-blocks",
    "--num-speculative-tokens": "--speculative-config",
    "--pp-size": "--pipeline-parallel-size",
    "--schedule-policy": "--scheduling-policy",
    "--speculative-model": "--speculative-config",
    "--swap-space": "--kv-host-bytes",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
}
_ALWAYS = frozenset(
    (
        *("--enable-auto-tool-choice", "--enable-chunked-prefill", "--enable-reasoning", "--enable-request-id-headers"),
        *("--enable-server-load-tracking", "--enable-sleep-mode"),
    )
)


def explain_option(option: str, known: Collection[str]) -> str | None:
    """Return what to use in place of another engine's option, None if no option of the command (`known`) is listed for it."""
    if option in _ALWAYS:
        return " (leave it out: it is always on)"
    if option == "--trust-remote-code":
        return " (leave it out: code of a checkpoint is never run)"
    name = RENAMED.get(option)
    return f" (use {name})" if name in known else None
