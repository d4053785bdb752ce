"""Beam search on top of the engine: one token a step for every hypothesis, which share their KV by the prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.base.errors import RequestError
from quire.contracts.outputs import BeamSearchOutput, BeamSearchSequence
from quire.contracts.request import Request
from quire.contracts.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from quire.engine.llm import LLM


def search_beams(llm: LLM, request: Request, params: BeamSearchParams) -> BeamSearchOutput:
    """Search the most likely continuations of one prompt.

    Every step takes, of all one-token extensions of the hypotheses, the beam_width best; one that ends with an
    end-of-sequence token is set aside and competes again at the end.
    """
    prompt = list(request.prompt_token_ids)
    max_model_len = llm.llm_engine.report.memory.max_model_len
    if len(prompt) + params.max_tokens > max_model_len:
        raise RequestError(
            f"{len(prompt)} prompt tokens and max_tokens={params.max_tokens} exceed the model's {max_model_len} tokens",
            "max_tokens",
        )
    eos = frozenset[int]() if params.ignore_eos else request.eos_token_ids
    step_params = SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=2 * params.beam_width, ignore_eos=True, detokenize=False
    )
    live: list[tuple[float, list[int]]] = [(0.0, prompt)]
    ended: list[tuple[float, list[int]]] = []
    for _ in range(params.max_tokens):
        outputs = llm.generate([tokens for _, tokens in live], step_params, use_tqdm=False)
        extended: list[tuple[float, list[int]]] = []
        for (total, tokens), output in zip(live, outputs, strict=True):
            if output.error is not None:
                raise RequestError(output.error, "prompt")
            for token_id, entry in (output.outputs[0].logprobs or [{}])[0].items():
                target = ended if token_id in eos else extended
                target.append((total + entry.logprob, [*tokens, token_id]))
        extended.sort(key=lambda beam: -beam[0])
        live = extended[: params.beam_width]
        if not live:
            break
    candidates = [_describe(llm, beam, len(prompt), params, "stop") for beam in ended]
    candidates += [_describe(llm, beam, len(prompt), params, "length") for beam in live]
    candidates.sort(key=lambda candidate: -candidate.score)
    return BeamSearchOutput(candidates[: params.beam_width])


def _describe(
    llm: LLM, beam: tuple[float, list[int]], num_prompt_tokens: int, params: BeamSearchParams, reason: str
) -> BeamSearchSequence:
    total, tokens = beam
    output = tokens[num_prompt_tokens:]
    text = llm.get_tokenizer().decode(output) if llm.llm_engine.tokenizer is not None else ""
    score = total / len(output) ** params.length_penalty
    return BeamSearchSequence(tokens, total, score, text, "stop" if reason == "stop" else "length")
