"""Parameters that change an answer somewhere else: on another route, or in another server of the same API.

They are refused where they are not known, so that nobody takes an answer for one that they shaped. What is in no table here
and in no body is not known to anybody, and is told in x-quire-ignored-params.
"""

from __future__ import annotations

from collections.abc import Collection

from quire.api.refusal import Refusal, always, unless

_ZERO, _ONE = (0, 0.0, False), (1, 1.0)

# Name -> the values with which it changes nothing, and is taken.
_PARAMETERS: dict[str, tuple[object, ...]] = {
    # of the routes that are here
    **dict.fromkeys(("messages", "prompt", "input", "system", "instructions", "previous_response_id", "conversation"), ()),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), ()),
    **dict.fromkeys(("stop", "stop_sequences", "stop_token_ids", "bad_words", "allowed_token_ids"), ([],)),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("auto", "none")),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs"), ({},)),
    **dict.fromkeys(("top_k",), (0, -1)),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "min_tokens", "top_logprobs"), _ZERO),
    **dict.fromkeys(("typical_p", "repetition_penalty", "n", "best_of"), _ONE),
    **dict.fromkeys(("skip_special_tokens", "add_special_tokens", "include_reasoning", "parallel_tool_calls"), (True,)),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "continue_final_message", "echo", "logprobs"), (False,)),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), (False,)),
    **dict.fromkeys(("seed", "prompt_logprobs", "structured_outputs", "output_config", "output_format"), ()),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding"), ()),
    **dict.fromkeys(("guided_whitespace_pattern", "structural_tag"), ()),
    "guided_json_object": (False,),
    "guided_decoding_backend": ("auto",),
    **dict.fromkeys(("reasoning_effort", "reasoning", "thinking"), ()),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}}, {}),
    "suffix": ("",),
    # of other servers
    **dict.fromkeys(("max_new_tokens", "n_predict", "num_predict", "enable_thinking", "thinking_budget"), ()),
    **dict.fromkeys(("detokenize", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("flat_logprobs", "return_token_offsets", "return_prompt_text", "watermark", "watermarking"), (False,)),
    **dict.fromkeys(("prompt_logprob_token_ids", "prompt_logprob_start", "routed_experts_prompt_start"), ()),
    **dict.fromkeys(("extra_args", "ec_transfer_params", "media_io_kwargs", "mm_payload", "mm_processor_kwargs"), ({},)),
    **dict.fromkeys(("custom_logit_processor", "negative_prompt", "truncation_side"), ()),
    **dict.fromkeys(("lora_path", "lora_request", "adapter", "adapter_id"), ()),
    **dict.fromkeys(("grammar", "regex", "ebnf"), ("",)),
    **dict.fromkeys(("json_schema", "min_new_tokens"), ()),
    **dict.fromkeys(("mirostat", "mirostat_mode", "xtc_probability", "dry_multiplier", "dynatemp_range", "top_a"), _ZERO),
    **dict.fromkeys(("no_repeat_ngram_size", "smoothing_factor", "epsilon_cutoff", "eta_cutoff"), _ZERO),
    **dict.fromkeys(("repeat_penalty", "tfs", "tfs_z", "typical", "guidance_scale", "cfg_scale"), _ONE),
    "top_n_sigma": (-1, -1.0, *_ZERO),
}

# Names for one thing; the first that a route has is what it is called there.
_SYNONYMS = (
    ("messages", "prompt", "input"),
    ("instructions", "system", "messages"),
    ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens", "n_predict", "num_predict"),
    ("stop", "stop_sequences"),
    ("min_tokens", "min_new_tokens"),
    ("repetition_penalty", "repeat_penalty"),
    ("typical_p", "typical"),
    ("tools", "functions"),
    ("tool_choice", "function_call"),
    (
        *("structured_outputs", "guided_regex", "guided_choice", "guided_grammar", "grammar", "regex", "ebnf"),
        *("structural_tag", "guided_decoding"),
    ),
    (
        *("response_format", "text", "output_config", "guided_json", "json_schema", "output_format"),
        *("structured_outputs", "guided_decoding", "guided_json_object"),
    ),
    (
        "reasoning_effort",
        "reasoning",
        "thinking",
        "output_config",
        "enable_thinking",
        "thinking_budget",
        "chat_template_kwargs",
    ),
)
_MORE_HINTS = {
    "reasoning_effort": "reasoning_effort, or chat_template_kwargs for a variable of the chat template",
    "text": "text.format",
}


def refusals_of_others(known: Collection[str]) -> dict[str, Refusal]:
    """Return the refusals of a route that has the fields `known`; values with which a parameter changes nothing are taken."""
    refusals: dict[str, Refusal] = {}
    for name, neutral in _PARAMETERS.items():
        if name not in known:
            reason = f"is not supported on this route; {_hint(name, known)}"
            refusals[name] = unless(*neutral, reason=reason) if neutral else always(reason)
    return refusals


def _hint(name: str, known: Collection[str]) -> str:
    own = next((other for group in _SYNONYMS if name in group for other in group if other in known), None)
    return "leave it out" if own is None else f"use {_MORE_HINTS.get(own, own)}"
