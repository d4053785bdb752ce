"""Print the output of one request as it is generated."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.base.errors import QuireError
from quire.contracts.outputs import RequestOutput
from quire.contracts.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.contracts.lora import LoRARequest
    from quire.engine.llm_engine import LLMEngine
    from quire.engine.request_factory import PromptLike


@dataclass(frozen=True, slots=True)
class Streamed:
    """The printed output of one request: its text, its output tokens, the last output, and the verified drafts."""

    text: str
    num_tokens: int
    output: RequestOutput
    num_drafted: int = 0
    num_accepted: int = 0

    def describe_speed(self) -> str:
        """Return a line such as `[120 tokens in 1.30 s, first after 0.05 s, 96.0 tokens/s after it, stop]`."""
        metrics = self.output.metrics
        reason = self.output.outputs[-1].finish_reason if self.output.outputs else "stop"
        first_s, rest_s = (None, None) if metrics is None else (metrics.time_to_first_token_s, metrics.decode_time_s)
        if first_s is None or rest_s is None:
            return f"[{self.num_tokens} tokens, {reason}]"
        speed = f", {(self.num_tokens - 1) / rest_s:.1f} tokens/s after it" if rest_s > 0 else ""
        drafts = f", {self.num_accepted} of {self.num_drafted} drafts accepted" if self.num_drafted else ""
        return f"[{self.num_tokens} tokens in {first_s + rest_s:.2f} s, first after {first_s:.3f} s{speed}{drafts}, {reason}]"

    def describe_cut(self, params: SamplingParams, max_model_len: int) -> str | None:
        """Return the warning if the context ended the output before max_tokens; otherwise None."""
        is_cut = bool(self.output.outputs) and self.output.outputs[-1].finish_reason == "length"
        if not is_cut or params.max_tokens is None or self.num_tokens >= params.max_tokens:
            return None
        num_prompt = len(self.output.prompt_token_ids)
        return (
            f"warning: the output ends after {self.num_tokens} of max_tokens {params.max_tokens}: the context has "
            f"{max_model_len} tokens (max_model_len), the prompt {num_prompt}"
        )


def stream_to_terminal(
    engine: LLMEngine,
    request_id: str,
    prompt: PromptLike,
    params: SamplingParams,
    echo: str = "",
    lora: LoRARequest | None = None,
) -> Streamed:
    """Generate to standard output, after `echo`. Raises QuireError when the request is invalid or fails.

    lora  None: the base model
    """
    engine.add_request(request_id, prompt, params, output_kind="delta", lora_request=lora)
    num_drafted, num_accepted = engine.stats.num_draft_tokens, engine.stats.num_accepted_tokens
    sys.stdout.write(echo)
    sys.stdout.flush()
    text, num_tokens = "", 0
    try:
        while True:
            for output in engine.step():
                for choice in output.outputs:
                    text += choice.text
                    num_tokens += len(choice.token_ids)
                    sys.stdout.write(choice.text)
                sys.stdout.flush()
                if output.finished:
                    if output.error is not None:
                        sys.stdout.write("\n" if echo or text else "")  # the error begins on a new line
                        sys.stdout.flush()
                        raise QuireError(output.error)
                    drafts = engine.stats.num_draft_tokens - num_drafted, engine.stats.num_accepted_tokens - num_accepted
                    return Streamed(text, num_tokens, output, *drafts)
    finally:
        engine.abort_request(request_id)
