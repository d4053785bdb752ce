"""The operations and bytes that a run needs, for roofline shares; quire.kernels.peaks measures the peaks."""

from __future__ import annotations

from quire.contracts.memory import ModelReport


def needed_flops(report: ModelReport, num_prompt_tokens: int, num_output_tokens: int) -> float:
    """Return the FLOPs of the weights' products: two per parameter and token; the head only where a token is sampled.

    Attention is not included, so shares are, if anything, too low.
    """
    spec = report.spec
    head = spec.vocab_size * spec.hidden_size
    body = report.num_active_parameters - head
    return 2.0 * (body * (num_prompt_tokens + num_output_tokens) + head * num_output_tokens)


def needed_bytes(report: ModelReport, num_steps: int) -> float:
    """Return the bytes of weights read if every step reads each active parameter once, in its run-time format; without KV."""
    return float(num_steps) * report.active_weight_bytes
