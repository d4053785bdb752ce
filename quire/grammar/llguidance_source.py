"""From a constraint to the source text that llguidance compiles."""

from __future__ import annotations

from typing import Any

from quire.contracts.constraint import Constraint
from quire.grammar.errors import GrammarError
from quire.grammar.lark import choice_source, regex_source, schema_fields, schema_options
from quire.grammar.schema_check import check_schema, close_ends
from quire.grammar.structural_tag import structural_tag_source
from quire.grammar.vocabulary import Vocabulary


def llguidance_source(constraint: Constraint, vocabulary: Vocabulary) -> str:
    """Return the grammar in llguidance's notation. Raises GrammarError for what it would weaken or does not support."""
    from llguidance import LLMatcher

    kind = constraint.kind
    if kind in ("json_schema", "json_object"):
        schema: Any = {"type": "object"} if kind == "json_object" else check_schema(constraint.parsed())
        fields = schema_fields(close_ends(schema, constraint.max_open_length))
        return LLMatcher.grammar_from_json_schema(fields, overrides=schema_options(schema, constraint))
    if kind == "choice":
        return LLMatcher.grammar_from_lark(choice_source(constraint.parsed()))
    if kind == "regex":
        return LLMatcher.grammar_from_lark(regex_source(constraint.source))
    if kind == "structural_tag":
        return LLMatcher.grammar_from_lark(structural_tag_source(constraint, vocabulary))
    return LLMatcher.grammar_from_lark(_grammar(constraint.source))


def _grammar(source: str) -> str:
    if "::=" not in source:
        return source
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(source)
    except Exception as error:  # noqa: BLE001 - whatever a text does to a reader of texts, it is the text's fault
        raise GrammarError(f"the GBNF grammar cannot be read: {error}") from None
