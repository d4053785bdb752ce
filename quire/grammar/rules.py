"""Rules: collects the rules and terminals of a grammar in llguidance's Lark."""

from __future__ import annotations

from quire.grammar.errors import GrammarError
from quire.grammar.lark import quote
from quire.grammar.special_tokens import SpecialTexts
from quire.grammar.vocabulary import Vocabulary

ANY_TEXT = r"/(?s:.*)/"
_MAX_PARTS = 16384


class Rules:
    """The rules and terminals so far; names are numbered."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lines: list[str] = []
        self._num_rules = 0
        self._terminals: dict[str, str] = {}
        self._special: SpecialTexts | None = None

    def write(self, start: str) -> str:
        """Return the grammar whose start rule is `start`."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._lines]) + "\n"

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule and return its name. Raises GrammarError if there are too many."""
        if self._num_rules >= _MAX_PARTS:
            raise GrammarError(f"a structural tag may have {_MAX_PARTS} parts")
        name = f"r{self._num_rules}"
        self._num_rules += 1
        self._lines.append(f"{name}{options}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Return the name of a terminal, adding it if necessary."""
        name = self._terminals.get(body)
        if name is None:
            name = self._terminals[body] = f"T{len(self._terminals)}"
            self._lines.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Return a text as items of a rule, with special tokens by id; it may be empty."""
        return " ".join(self.literal_parts(text)) or '""'

    def literal_parts(self, text: str) -> list[str]:
        """Return the items of a text, none if it is empty."""
        if self._special is None:
            self._special = SpecialTexts.of(self._vocabulary)
        return [f"<[{part}]>" if isinstance(part, int) else quote(part) for part in self._special.split(text)]

    def is_special(self, text: str) -> bool:
        """Return whether a text contains special tokens, so that it cannot be part of other text."""
        return any(part.startswith("<[") for part in self.literal_parts(text))

    def ended(self, body: str, end: str) -> str:
        """Return a rule of a text, given the body of a terminal, followed by `end`; the text ends at the first `end`.

        A special token ends a text anyway, as it is not text.
        """
        parts = self.literal_parts(end)
        if not parts:
            return self.rule(self.terminal(body))
        at = next((index for index, part in enumerate(parts) if part.startswith("<[")), None)
        if at is None:
            return self.rule(self.terminal(body), f"[suffix={quote(end)}]")
        text = " ".join([f"({body})", *parts[:at]])
        return self.rule(" ".join([self.terminal(text), *parts[at:]]))


def without(texts: tuple[str, ...] | list[str]) -> str:
    """Return what is put behind the body of a terminal so that none of some texts is in it.

    One expression for all: of one for each, the numbers of states would multiply.
    """
    spelled = [quote(text) for text in dict.fromkeys(texts)]
    return f" & ~({ANY_TEXT} ({' | '.join(spelled)}) {ANY_TEXT})" if spelled else ""
