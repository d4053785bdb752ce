"""StringForms: finds short completions of an open JSON string that satisfy the string constraints of a schema.

A matcher's masks do not help if a pattern may match anywhere in a string: nearly all tokens are allowed until it has matched.
So the expressions of the schema are simulated. Which of them apply to the open string is not known: the matcher is asked
which completion is valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from quire.contracts.constraint import Constraint
from quire.grammar.regex_automaton import Effort, RegexAutomaton, automaton_of, shortest_completion
from quire.grammar.schema_check import iter_tag_schemas
from quire.grammar.schema_formats import FORMATS
from quire.grammar.schema_walk import iter_reached

_MAX_FORMS = 64
_MAX_STATES = 20_000
_MAX_TEXT = 8192
_MAX_EFFORT = 30_000
"""Maximum number of states visited for the completions of one text: tens of milliseconds."""


@dataclass(frozen=True, slots=True)
class StringForm:
    """String constraints of one schema: expressions that must all match, and the length."""

    patterns: tuple[str, ...]
    least: int = 0
    most: int | None = None


class StringForms:
    """The forms of all strings of a constraint. Thread-safe.

    Forms that no automaton supports, or beyond the limits, are ignored.
    """

    def __init__(self, forms: tuple[StringForm, ...]) -> None:
        self._forms: list[tuple[StringForm, tuple[RegexAutomaton, ...]]] = []
        num_left = _MAX_STATES
        for form in dict.fromkeys(forms):
            automata = [automaton_of(pattern) for pattern in form.patterns]
            found = tuple(automaton for automaton in automata if automaton is not None)
            num_left -= sum(automaton.num_states for automaton in found)
            if num_left < 0 or len(self._forms) == _MAX_FORMS:
                break
            if len(found) == len(automata):
                self._forms.append((form, found))

    def __bool__(self) -> bool:
        return bool(self._forms)

    def completions(self, text: str) -> list[str]:
        """Return completions of a text that satisfy one of the forms, the shortest first."""
        if len(text) > _MAX_TEXT:
            return []
        effort = Effort(_MAX_EFFORT)
        found = [shortest_completion(automata, text, effort, form.least, form.most) for form, automata in self._forms]
        return sorted({completion for completion in found if completion}, key=lambda completion: (len(completion), completion))


NO_FORMS = StringForms(())


@lru_cache(maxsize=256)
def string_forms_of(kind: str, source: str) -> StringForms:
    """Return the forms of the JSON strings of a constraint of some kind."""
    if kind not in ("json_schema", "structural_tag"):
        return NO_FORMS
    parsed = Constraint(kind=cast("Any", kind), source=source).parsed()
    schemas = [parsed] if kind == "json_schema" else [schema for _, schema in iter_tag_schemas(parsed, "")]
    return StringForms(tuple(form for schema in schemas for form in _forms(schema)))


def _forms(root: object) -> Iterator[StringForm]:
    for _, schema in iter_reached(root):
        named = schema.get("patternProperties")
        for pattern in cast("dict[str, object]", named) if isinstance(named, dict) else ():
            yield StringForm((pattern,))
        parts = schema.get("allOf")
        around = [schema, *(part for part in cast("list[Any]", parts or []) if isinstance(part, dict))]
        form = _form(cast("list[dict[str, Any]]", around))
        if form.patterns:
            yield form


def _form(schemas: list[dict[str, Any]]) -> StringForm:
    """Return the combined constraints of several schemas on the same string."""
    patterns: list[str] = []
    least, most = 0, None
    for schema in schemas:
        if isinstance(schema.get("pattern"), str):
            patterns.append(schema["pattern"])
        known = FORMATS.get(str(schema.get("format")))
        lengths = [schema.get("maxLength"), None if known is None else known.max_length, most]
        patterns += () if known is None else known.patterns
        most = min((int(length) for length in lengths if isinstance(length, int | float)), default=None)
        if isinstance(schema.get("minLength"), int | float):
            least = max(least, int(schema["minLength"]))
    return StringForm(tuple(patterns), least, most)
