"""String formats as regular expressions: the texts that each enforced format allows, and their maximum length.

Each is at most as wide as its standard, so that a validator accepts the output. Some are stricter: internationalised names are
written in ASCII, and host names have no two hyphens in the third and fourth place, where a prefix such as `xn--` would be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

_DAY = (
    r"[0-9]{4}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_DURATION = (
    r"P(?:[0-9]+W|(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
    r"(?:T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))?"
    r"|T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))"
)
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_HEX = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [
        rf"(?:{_HEX}:){{7}}{_HEX}",
        *(rf"(?:{_HEX}:){{{left}}}(?::{_HEX}){{1,{7 - left}}}" for left in range(1, 7)),
        rf"(?:{_HEX}:){{1,7}}:",
        rf":(?:(?::{_HEX}){{1,7}}|:)",
    ]
)
_ALNUM, _INNER = "[A-Za-z0-9]", "[A-Za-z0-9-]"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"


def _label(most: int) -> str:
    """Return a label of a host name with at most `most` characters, 5 or more."""
    long = f"{_INNER}(?:{_ALNUM}{_INNER}{{0,{most - 4}}}|-{_ALNUM}{_INNER}{{0,{most - 5}}})"
    return f"{_ALNUM}(?:(?:{_INNER}|{long}|{_INNER}-)?{_ALNUM})?"


def _joined(part: str, count: str) -> str:
    return rf"{part}(?:\.{part}){count}"


_HEX_PAIR = "%[0-9A-Fa-f]{2}"
_PATH_CHARACTER = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_HEX_PAIR})"
_SEGMENTS = f"(?:/{_PATH_CHARACTER}*)*"
_FIRST_SEGMENT = f"(?:[A-Za-z0-9._~!$&'()*+,;=@-]|{_HEX_PAIR})+"
_AUTHORITY = rf"//[A-Za-z0-9.-]+(?::[0-9]{{1,5}})?{_SEGMENTS}"
_ROOTED = f"/(?:{_PATH_CHARACTER}+{_SEGMENTS})?"
_QUERY = rf"(?:\?(?:{_PATH_CHARACTER}|[/?])*)?(?:#(?:{_PATH_CHARACTER}|[/?])*)?"
_URI = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}|{_ROOTED}|{_PATH_CHARACTER}+{_SEGMENTS}){_QUERY}"
_URI_REFERENCE = f"{_URI}|(?:{_AUTHORITY}|{_ROOTED}|{_FIRST_SEGMENT}{_SEGMENTS})?{_QUERY}"
_VARIABLE = r"[A-Za-z0-9_](?:\.?[A-Za-z0-9_])*(?:\*|:[1-9][0-9]{0,3})?"
_URI_TEMPLATE = rf"(?:[A-Za-z0-9._~!$&()*+,;=:/?#@-]|{_HEX_PAIR}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"
_CLASS = r"\[\^?(?:[A-Za-z0-9 _.,:;/@]|\\[dDwWsS\\\]\[.-]|a-z|A-Z|0-9)+\]"
_REGEX_ATOM = rf"[A-Za-z0-9 _,:;<>=!@#%&'~/-]|\.|\\[dDwWsStnr.*+?^$(){{}}\[\]|\\/]|{_CLASS}"
_QUANTIFIER = r"(?:(?:[*+?]|\{[1-9][0-9]?(?:,)?\})\??)?"


def _expression(groups: int) -> str:
    """Return regular expressions with groups nested up to this depth."""
    atom = _REGEX_ATOM if groups == 0 else rf"{_REGEX_ATOM}|\((?:\?:)?{_expression(groups - 1)}\)"
    sequence = f"(?:(?:{atom}){_QUANTIFIER})*"
    return rf"{sequence}(?:\|{sequence})*"


@dataclass(frozen=True, slots=True)
class Format:
    """What a format allows.

    body        an expression of the whole text
    starts      an additional expression that a prefix of the text must match; "" for none
    max_length  of the text, None without a limit
    single      one expression for all of this, if `body` is not; it may be stricter
    """

    body: str
    starts: str = ""
    max_length: int | None = None
    single: str = ""

    @property
    def patterns(self) -> tuple[str, ...]:
        """The expressions, anchored for a search."""
        return (f"^(?:{self.body})$", *([f"^{self.starts}"] if self.starts else []))


_NAME = _joined(_label(63), "*")
_SINGLE_NAME = rf"(?:{_label(63)}\.)?(?:{_joined(_label(22), '{0,7}')})|{_joined(_label(63), '{0,2}')}"
_HOSTNAME = Format(_NAME, "", 253, _SINGLE_NAME)
_EMAIL = Format(
    rf"{_ATOM}(?:\.?{_ATOM})*@{_NAME}",
    "[^@]{1,64}@",
    254,
    rf"(?:{_ATOM}{{1,64}}|{_ATOM}{{1,31}}\.{_ATOM}{{1,32}}|{_ATOM}(?:\.?{_ATOM}){{0,31}})"
    rf"@(?:{_joined(_label(62), '{0,2}')}|{_joined(_label(22), '{0,7}')})",
)
FORMATS: dict[str, Format] = {
    "date": Format(_DAY),
    "time": Format(_TIME),
    "date-time": Format(rf"(?:{_DAY})T{_TIME}"),
    "duration": Format(_DURATION),
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOSTNAME,
    "idn-hostname": _HOSTNAME,
    "ipv4": Format(_IPV4),
    "ipv6": Format(_IPV6),
    "uuid": Format(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"),
    "uri": Format(_URI),
    "iri": Format(_URI),
    "uri-reference": Format(_URI_REFERENCE),
    "iri-reference": Format(_URI_REFERENCE),
    "uri-template": Format(_URI_TEMPLATE),
    "json-pointer": Format(_POINTER),
    "relative-json-pointer": Format(rf"(?:0|[1-9][0-9]*)(?:#|{_POINTER})"),
    "regex": Format(rf"\^?(?:{_expression(2)})\$?"),
}
"""The formats of the standard. Dates and times are those of RFC 3339, without leap seconds."""

_TEXT_KEYS = frozenset(("pattern", "allOf"))


def write_format(schema: dict[str, Any]) -> None:
    """Replace a format in FORMATS by equivalent patterns and a length."""
    known = FORMATS.get(str(schema.get("format")))
    if known is None:
        return
    del schema["format"]
    exact = [{"pattern": pattern} for pattern in known.patterns]
    if not schema.keys() & _TEXT_KEYS:
        schema.update(exact.pop(0))
    if exact:
        schema["allOf"] = [*cast("list[object]", schema.get("allOf", ())), *exact]
    if known.max_length is not None:
        schema["maxLength"] = min(known.max_length, schema.get("maxLength", known.max_length))
