"""Ticket: one admitted job and its expected cost."""

from __future__ import annotations

from dataclasses import dataclass

from quire.serving.interfaces import Job

OUTPUT_TOKEN_WEIGHT = 4
"""Service tokens of one output token; a prompt token counts as one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ticket:
    """One admitted job.

    number                  of arrival, ascending
    num_sequences           that the engine will run: n, or best_of
    num_expected_tokens     output tokens over all sequences, as estimated when it came
    enqueued_s              of the clock
    """

    job: Job
    number: int
    num_sequences: int
    num_prompt_tokens: int
    num_expected_tokens: int
    enqueued_s: float

    @property
    def cost(self) -> float:
        """Return the expected service tokens."""
        return service_tokens(self.num_prompt_tokens, self.num_expected_tokens)


def service_tokens(num_prompt_tokens: int, num_output_tokens: int) -> float:
    """Return the charge of a request in the fair queue."""
    return float(num_prompt_tokens + OUTPUT_TOKEN_WEIGHT * num_output_tokens)
