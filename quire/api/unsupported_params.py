"""Table of parameters of other servers and of other routes, with their neutral values.

A parameter that changes the response on another route or in another server of the same API is refused by name if it is not
supported, so that it is never silently ignored. Its neutral values, which change nothing, are accepted. WITHOUT_EFFECT lists
parameters that do not concern the response: they are accepted, and named in x-quire-ignored-params, as is every field that is
in no table and in no body. Sources: vLLM, SGLang, llama.cpp server, TGI, Ollama, LM Studio, Mistral, OpenRouter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from quire.api.refusal import Refusal, always, unless

_ZERO, _ONE, _MINUS_ONE = (0, 0.0, False), (1, 1.0), (-1, -1.0)

# Name -> neutral values. Parameters of a route of this server.
_OF_ROUTES: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("messages", "prompt", "input", "system", "instructions", "previous_response_id", "conversation"), ()),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), (-1,)),
    "stop": ([], ""),
    **dict.fromkeys(("stop_sequences", "stop_token_ids", "bad_words", "allowed_token_ids"), ([],)),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("auto", "none")),
    "logit_bias": ({}, []),
    "background": (False,),
    "chat_template_kwargs": ({},),
    "top_k": (0, -1),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "min_tokens", "top_logprobs"), _ZERO),
    **dict.fromkeys(("typical_p", "repetition_penalty", "n", "best_of"), _ONE),
    **dict.fromkeys(("skip_special_tokens", "add_special_tokens", "include_reasoning", "parallel_tool_calls"), (True,)),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "continue_final_message", "echo", "logprobs"), (False,)),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), (False,)),
    "seed": (-1,),
    **dict.fromkeys(("prompt_logprobs", "structured_outputs", "output_config", "output_format"), ()),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding"), ()),
    **dict.fromkeys(("guided_whitespace_pattern", "structural_tag"), ()),
    "guided_json_object": (False,),
    "guided_decoding_backend": ("auto",),
    **dict.fromkeys(("reasoning_effort", "reasoning", "thinking"), ()),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}}, {}),
    "suffix": ("",),
    "kv_compression": (),
}

# Parameters of other servers only, each listed under the first server that has it.
_OF_OTHERS: dict[str, tuple[object, ...]] = {
    # vLLM
    **dict.fromkeys(("detokenize", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("use_beam_search", "early_stopping"), (False,)),
    "length_penalty": _ONE,
    "truncate_prompt_tokens": (-1,),
    "truncation_side": (),
    **dict.fromkeys(("logits_processors", "documents", "logprob_token_ids", "prompt_logprob_token_ids"), ([],)),
    **dict.fromkeys(("kv_transfer_params", "vllm_xargs", "extra_args", "ec_transfer_params"), ({},)),
    **dict.fromkeys(("media_io_kwargs", "mm_payload", "mm_processor_kwargs"), ({},)),
    **dict.fromkeys(("flat_logprobs", "return_token_offsets", "return_prompt_text"), (False,)),
    **dict.fromkeys(("repetition_detection", "prompt_embeds", "prompt_logprob_start"), ()),
    "routed_experts_prompt_start": (0,),
    "thinking_token_budget": (-1,),
    "lora_request": (),
    # SGLang
    **dict.fromkeys(("regex", "ebnf"), ("",)),
    "json_schema": (),
    "stop_regex": ("", []),
    **dict.fromkeys(("no_stop_trim", "return_hidden_states", "return_routed_experts", "return_meta_info"), (False,)),
    **dict.fromkeys(("return_cached_tokens_details", "return_prompt_token_ids", "return_text_in_logprobs"), (False,)),
    "return_logprob": (False,),
    "top_logprobs_num": (0,),
    **dict.fromkeys(("logprob_start_len", "input_ids", "input_embeds", "sampling_params", "sampling_seed"), ()),
    "token_ids_logprob": ([],),
    **dict.fromkeys(("lora_path", "custom_logit_processor", "session_params"), ()),
    "custom_params": ({},),
    **dict.fromkeys(("separate_reasoning", "stream_reasoning"), (True,)),
    **dict.fromkeys(("min_new_tokens", "max_new_tokens"), ()),
    "ngram_corpus_id": (),
    # llama.cpp server
    "n_predict": (-1,),
    "n_probs": (0,),
    "n_keep": (0,),
    "n_indent": (0,),
    "n_discard": (0,),
    "n_cmpl": (1,),
    "min_keep": (0,),
    "post_sampling_probs": (False,),
    "return_tokens": (False,),
    "response_fields": ([],),
    **dict.fromkeys(("t_max_predict_ms", "t_max_prompt_ms"), (0, -1)),
    "lora": ([],),
    "samplers": (),
    "grammar": ("",),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "repeat_penalty": _ONE,
    "repeat_last_n": (-1,),
    "penalize_nl": (False,),
    "penalty_prompt": (),
    **dict.fromkeys(("mirostat", "xtc_probability", "dry_multiplier", "dynatemp_range"), _ZERO),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent"), ()),
    **dict.fromkeys(("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"), ()),
    "top_n_sigma": (*_MINUS_ONE, *_ZERO),
    "adaptive_target": _MINUS_ONE,
    "adaptive_decay": (),
    "image_data": ([],),
    **dict.fromkeys(("input_prefix", "input_suffix"), ("",)),
    "input_extra": ([],),
    "reasoning_format": ("auto", "deepseek"),
    "reasoning_in_content": (False,),
    "thinking_forced_open": (False,),
    "parse_tool_calls": (True,),
    **dict.fromkeys(("reasoning_budget", "reasoning_budget_tokens", "thinking_budget_tokens"), (-1,)),
    "reasoning_budget_message": ("",),
    # TGI
    "inputs": (),
    "parameters": ({},),
    "do_sample": (),
    **dict.fromkeys(("return_full_text", "decoder_input_details", "details", "watermark", "watermarking"), (False,)),
    "top_n_tokens": (0,),
    "truncate": (False,),
    **dict.fromkeys(("adapter_id", "adapter", "guideline", "tool_prompt"), ()),
    # Ollama
    "options": ({},),
    "format": ("",),
    "template": ("",),
    "raw": (False,),
    "images": ([],),
    "context": ([],),
    **dict.fromkeys(("num_predict",), (-1,)),
    **dict.fromkeys(("num_ctx", "context_length"), ()),
    "num_keep": (0,),
    "penalize_newline": (False,),
    "shift": (False,),
    **dict.fromkeys(("tfs", "tfs_z", "typical"), _ONE),
    # LM Studio
    "system_prompt": ("",),
    "integrations": ([],),
    # Mistral
    "random_seed": (),
    **dict.fromkeys(("safe_prompt",), (False,)),
    "prompt_mode": (),
    "guardrails": ([],),
    **dict.fromkeys(("document_image_limit", "document_page_limit"), ()),
    # OpenRouter, text-generation-webui, Aphrodite, DashScope
    **dict.fromkeys(("transforms", "plugins", "models"), ([],)),
    **dict.fromkeys(("mirostat_mode", "top_a", "no_repeat_ngram_size", "smoothing_factor", "epsilon_cutoff"), _ZERO),
    "eta_cutoff": _ZERO,
    **dict.fromkeys(("guidance_scale", "cfg_scale"), _ONE),
    "negative_prompt": ("",),
    "enable_search": (False,),
    **dict.fromkeys(("enable_thinking", "think", "thinking_budget"), ()),
}
PARAMETERS: Mapping[str, tuple[object, ...]] = {**_OF_ROUTES, **_OF_OTHERS}

NO_REASONING: Mapping[str, tuple[object, ...]] = {
    "reasoning_effort": ("none",),
    "enable_thinking": (False,),
    "think": (False,),
    "thinking": ({"type": "disabled"},),
    "reasoning": ({"effort": "none"}, {"enabled": False}),
}
"""How other servers disable reasoning. Without a chat template, this is neutral."""

WITHOUT_EFFECT = frozenset(
    (
        # caller and purpose
        *(
            "user",
            "metadata",
            "client_metadata",
            "request_id",
            "rid",
            "session_id",
            "custom_labels",
            "log_metrics",
            "extra_key",
        ),
        *("safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_control"),
        # placement and speed, which do not change the tokens
        *("cache_prompt", "id_slot", "keep_alive", "ttl", "draft_model", "prediction", "backend_sampling", "sse_ping_interval"),
        *("speed", "diagnostics"),
        *("speculative.n_max", "speculative.n_min", "speculative.p_min", "num_gpu", "main_gpu", "num_thread", "num_batch"),
        *("use_mmap", "use_mlock", "numa", "low_vram", "provider", "route"),
        *(
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
            "data_parallel_rank",
            "routed_dp_rank",
            "skip_reading_prefix_cache",
        ),
        # metadata in the response
        *("timings_per_token", "return_progress", "verbose", "usage", "preserved_tokens", "use_default_badwordsids"),
    )
)
"""Fields that do not affect the generated tokens."""

# Synonyms; errors name the first one that the route has.
_SYNONYMS = (
    ("model", "lora_request", "lora_path", "lora", "adapter_id", "adapter"),
    ("messages", "prompt", "input", "inputs", "input_ids"),
    ("instructions", "system", "messages", "system_prompt"),
    (
        *("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens", "n_predict", "num_predict"),
        "t_max_predict_ms",
    ),
    ("stop", "stop_sequences", "stop_regex"),
    ("include_stop_str_in_output", "no_stop_trim"),
    ("min_tokens", "min_new_tokens"),
    ("n", "n_cmpl"),
    ("seed", "random_seed", "sampling_seed"),
    ("temperature", "do_sample"),
    ("top_logprobs", "logprobs", "n_probs", "top_logprobs_num", "top_n_tokens", "return_logprob", "post_sampling_probs"),
    ("return_token_ids", "return_tokens", "return_prompt_token_ids"),
    ("include_reasoning", "separate_reasoning", "reasoning_format", "reasoning_in_content"),
    ("repetition_penalty", "repeat_penalty"),
    ("typical_p", "typical"),
    ("tools", "functions"),
    ("tool_choice", "function_call"),
    (
        *("structured_outputs", "guided_regex", "guided_choice", "guided_grammar", "grammar", "regex", "ebnf"),
        *("structural_tag", "guided_decoding"),
    ),
    (
        *("response_format", "text", "output_config", "guided_json", "json_schema", "output_format", "format"),
        *("structured_outputs", "guided_decoding", "guided_json_object"),
    ),
    (
        *("reasoning_effort", "reasoning", "thinking", "output_config", "enable_thinking", "think", "thinking_budget"),
        *("thinking_budget_tokens", "thinking_token_budget", "reasoning_budget", "reasoning_budget_tokens"),
        *("prompt_mode", "chat_template_kwargs"),
    ),
)
_MORE_HINTS = {
    "model": "model, which may be the name of a LoRA adapter",
    "reasoning_effort": "reasoning_effort, or chat_template_kwargs for a variable of the chat template",
    "text": "text.format",
}


def refusals_of_others(known: Collection[str]) -> dict[str, Refusal]:
    """Return the refusals for a route that has the fields `known`; neutral values are accepted."""
    return refusals_of({name: neutral for name, neutral in PARAMETERS.items() if name not in known}, known)


def refusals_of(neutral_values: Mapping[str, tuple[object, ...]], known: Collection[str]) -> dict[str, Refusal]:
    """Return refusals that accept the neutral values, and that name an alternative among the fields `known` of the route."""
    return {name: _refusal_of(name, neutral, known) for name, neutral in neutral_values.items()}


def _refusal_of(name: str, neutral: tuple[object, ...], known: Collection[str]) -> Refusal:
    reason = f"is not supported{' on this route' if name in _OF_ROUTES else ''}; {_hint(name, known)}"
    return unless(*neutral, reason=reason) if neutral else always(reason)


def _hint(name: str, known: Collection[str]) -> str:
    own = next((other for group in _SYNONYMS if name in group for other in group if other in known and other != name), None)
    return "leave it out" if own is None else f"use {_MORE_HINTS.get(own, own)}"
