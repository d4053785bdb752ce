"""What the options and methods of a speculative_config are called elsewhere."""

from __future__ import annotations

from typing import Any, cast

from quire.base.errors import ConfigError
from quire.contracts.speculative_ranges import LOOKUP, MAX_SPECULATIVE_TOKENS, check_int

_OTHER_NAMES = {"speculative_eagle_topk": "draft_top_k", "speculative_num_steps": "draft_depth"}
"""Names that options have elsewhere."""

_MTP_MODELS = (
    "qwen3_next",
    "qwen3_5",
    "glm4_moe",
    "glm4_moe_lite",
    "mimo",
    "ernie",
    "exaone_moe",
    "longcat_flash",
    "nemotron_h",
)
_OTHER_METHODS = {"ngram_gpu": "ngram", **{f"{model}_mtp": "mtp" for model in _MTP_MODELS}}
"""Names that methods have elsewhere: which layout a layer for multi-token prediction has is seen in what is stored."""

_SETTLED: dict[str, tuple[tuple[object, ...], str]] = {
    **dict.fromkeys(("draft_tensor_parallel_size", "tensor_parallel_size"), ((1,), "drafts are made on one device")),
    **dict.fromkeys(
        ("enforce_eager", "disable_padded_drafter_batch"), ((False, True), "drafts are neither recorded nor padded")
    ),
    "speculative_token_tree": ((), "trees are asked for with draft_top_k and draft_depth, of medusa with medusa_choices"),
    "parallel_drafting": ((False,), "heads draft one token after the other"),
    "use_heterogeneous_vocab": ((False,), "a draft model has the model's own vocabulary"),
    "rejection_sample_method": (("standard",), "tokens are always those of plain decoding"),
    **dict.fromkeys(
        ("num_speculative_tokens_per_batch_size", "disable_by_batch_size"),
        ((), "adaptive measures how many drafts pay at each batch size"),
    ),
}
"""Options elsewhere that have one meaning here: the values that ask for it, and what it is. Null asks for nothing."""


def renamed(options: dict[str, Any]) -> dict[str, Any]:
    """Return options by the names that they have here. Raises ConfigError where one is given twice."""
    found = dict(options)
    for name, (allowed, why) in _SETTLED.items():
        value = found.pop(name, None)
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            raise ConfigError(f"speculative_config: {name} is {value!r}, but {why}; leave it out")
    if found.get("model") in ("ngram", "[ngram]") and found.get("method") in (None, "ngram"):
        found.pop("model")  # where vLLM once had this method
        found["method"] = "ngram"
    if isinstance(found.get("method"), str):
        found["method"] = _OTHER_METHODS.get(found["method"], found["method"])
    _set_other_bound(found)
    if "speculative_num_draft_tokens" in found:  # which counts the last known token too
        given = found.pop("speculative_num_draft_tokens")
        check_int("speculative_num_draft_tokens", given, 2, MAX_SPECULATIVE_TOKENS + 1)
        _set_once(found, "num_speculative_tokens", given - 1)
    for other, name in _OTHER_NAMES.items():
        if other in found:
            _set_once(found, name, found.pop(other))
    return found


def _as_list(value: object) -> list[object]:
    return list(cast("list[object]", value)) if isinstance(value, list | tuple) else [value]


def _set_other_bound(options: dict[str, Any]) -> None:
    """Where only one bound of the lookup is given, move the default of the other one so far that it allows this."""
    least, most = options.get("prompt_lookup_min"), options.get("prompt_lookup_max")
    if most is None and type(least) is int and "ngram" in _as_list(options.get("method")):
        options["prompt_lookup_max"] = max(least, LOOKUP[1])
    if least is None and type(most) is int and most >= 1:
        options["prompt_lookup_min"] = min(most, LOOKUP[0])


def _set_once(options: dict[str, Any], name: str, value: object) -> None:
    if options.get(name, value) != value:
        raise ConfigError(f"speculative_config: {name} is given twice, as {options[name]!r} and as {value!r}")
    options[name] = value
