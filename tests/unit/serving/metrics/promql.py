"""As much of PromQL as deploy/ uses: parses an expression, and says which labels its result has.

What Prometheus would refuse is refused here (ValueError): a rate of what is no counter or has no range, a label that the metric
lacks, a quantile without `le`, an operator between vectors whose labels never match.
"""

import re
from dataclasses import dataclass

TOKEN = re.compile(
    r"\s*(?:(?P<duration>\d+(?:ms|[smhdwy]))|(?P<number>\d+(?:\.\d+)?)|(?P<name>[A-Za-z_][\w:]*)"
    r'|(?P<string>"(?:[^"\\]|\\.)*")|(?P<symbol>=~|!~|!=|==|<=|>=|[-+*/%^<>=(){}\[\],]))'
)
AGGREGATIONS = {"sum", "max", "min", "avg", "count"}
OF_COUNTERS = {"rate", "increase", "irate"}
OF_RANGES = {"max_over_time", "min_over_time", "avg_over_time", "delta"}
OF_VECTORS = {"abs", "ceil", "floor", "clamp_min", "clamp_max"}
PRECEDENCE = ({"or"}, {"and", "unless"}, {"==", "!=", "<", ">", "<=", ">="}, {"+", "-"}, {"*", "/", "%"})
SCALAR, VECTOR, RANGE = "scalar", "vector", "range"


@dataclass(frozen=True)
class Value:
    """The type of an expression, and its labels; `is_counter` of what only ever grows."""

    kind: str
    labels: frozenset = frozenset()
    is_counter: bool = False


class Parser:
    """Parses one expression over the metrics `known`: name of a sample -> (labels, whether it is a counter)."""

    def __init__(self, text, known):
        self.text, self.known = text, known
        self.tokens, position = [], 0
        while text[position:].strip():
            found = TOKEN.match(text, position)
            if found is None:
                raise ValueError(f"no token at {text[position : position + 20]!r}")
            self.tokens.append((found.lastgroup, found[found.lastgroup]))
            position = found.end()
        self.place = 0
        self.selectors = []  # (name, [(label, operator, value)]), in order

    def parse(self):
        found = self.binary(0)
        if self.place < len(self.tokens):
            raise ValueError(f"{self.peek()!r} is too much")
        if found.kind == RANGE:
            raise ValueError("a range is no result")
        return found

    def peek(self):
        return self.tokens[self.place][1] if self.place < len(self.tokens) else None

    def take(self, expected=None, kind=None):
        if self.place >= len(self.tokens):
            raise ValueError("ends too early")
        found_kind, found = self.tokens[self.place]
        if expected not in (None, found) or kind not in (None, found_kind):
            raise ValueError(f"{expected or kind} is expected, got {found!r}")
        self.place += 1
        return found

    def binary(self, level):
        if level == len(PRECEDENCE):
            return self.primary()
        left = self.binary(level + 1)
        while self.peek() in PRECEDENCE[level]:
            operator = self.take()
            matched, many = self.matching()
            left = self.joined(operator, left, self.binary(level + 1), matched, many)
        return left

    def matching(self):
        """Return which labels are matched, as a function of all, and whether the left side has several for one."""
        word = self.peek()
        if word not in ("on", "ignoring"):
            return (lambda labels: labels), False
        self.take()
        names = self.names()
        many = self.peek() == "group_left"
        if many:
            self.take()
        return (lambda labels: labels & names if word == "on" else labels - names), many

    def joined(self, operator, left, right, matched, many):
        if RANGE in (left.kind, right.kind):
            raise ValueError(f"{operator} of a range")
        if left.kind == right.kind == VECTOR:
            if matched(left.labels) != matched(right.labels) or (not many and left.labels != right.labels):
                raise ValueError(f"{operator} of vectors that never match: {set(left.labels)} and {set(right.labels)}")
        elif operator in ("and", "or", "unless"):
            raise ValueError(f"{operator} needs vectors")
        kind = VECTOR if VECTOR in (left.kind, right.kind) else SCALAR
        return Value(kind, left.labels if left.kind == VECTOR else right.labels)

    def primary(self):
        kind, word = self.tokens[self.place] if self.place < len(self.tokens) else (None, None)
        if word == "(":
            self.take()
            found = self.binary(0)
            self.take(")")
            return found
        if kind == "number":
            self.take()
            return Value(SCALAR)
        if kind != "name":
            raise ValueError(f"an expression is expected, got {word!r}")
        self.take()
        if word in AGGREGATIONS:
            return self.aggregation()
        return self.call(word) if self.peek() == "(" else self.selector(word)

    def aggregation(self):
        by = self.labels_of_by()
        self.take("(")
        inner = self.binary(0)
        self.take(")")
        by = self.labels_of_by() if by is None else by
        if inner.kind != VECTOR:
            raise ValueError("an aggregation needs a vector")
        if missing := (by or frozenset()) - inner.labels:
            raise ValueError(f"by {set(missing)}, which there is not")
        return Value(VECTOR, by or frozenset())

    def labels_of_by(self):
        if self.peek() != "by":
            return None
        self.take()
        return self.names()

    def names(self):
        self.take("(")
        found = {self.take(kind="name")}
        while self.peek() == ",":
            self.take()
            found.add(self.take(kind="name"))
        self.take(")")
        return frozenset(found)

    def call(self, name):
        self.take("(")
        arguments = [self.binary(0)]
        while self.peek() == ",":
            self.take()
            arguments.append(self.binary(0))
        self.take(")")
        kinds, last = [one.kind for one in arguments], arguments[-1]
        if name in OF_COUNTERS | OF_RANGES and kinds == [RANGE]:
            if (name in OF_COUNTERS) != last.is_counter:
                raise ValueError(f"{name} is of {'counters' if name in OF_COUNTERS else 'gauges'}")
            return Value(VECTOR, last.labels)
        if name == "histogram_quantile" and kinds == [SCALAR, VECTOR] and "le" in last.labels:
            return Value(VECTOR, last.labels - {"le"})
        if name == "absent" and kinds == [VECTOR]:
            return Value(VECTOR)
        if name in OF_VECTORS and kinds[0] == VECTOR:
            return Value(VECTOR, arguments[0].labels)
        raise ValueError(f"{name} does not take {kinds}, or is not known")

    def selector(self, name):
        if name not in self.known:
            raise ValueError(f"there is no metric {name}")
        labels, is_counter = self.known[name]
        kind = VECTOR
        self.selectors.append((name, self.matchers(name, labels) if self.peek() == "{" else []))
        if self.peek() == "[":
            self.take()
            self.take(kind="duration")
            self.take("]")
            kind = RANGE
        if self.peek() == "offset":
            self.take()
            self.take(kind="duration")
        return Value(kind, frozenset(labels), is_counter)

    def matchers(self, name, labels):
        found = []
        self.take("{")
        while self.peek() != "}":
            label = self.take(kind="name")
            if label not in labels:
                raise ValueError(f"{name} has no label {label}")
            operator = self.take(kind="symbol")
            if operator not in ("=", "!=", "=~", "!~"):
                raise ValueError(f"{operator} is no matcher")
            value = self.take(kind="string")
            found.append((label, operator, value[1:-1]))
            if "~" in operator:
                re.compile(value[1:-1].replace("$", ""))
            if self.peek() != "}":
                self.take(",")
        self.take("}")
        return found


def takes(matchers, labels):
    """Return whether a selector with these matchers takes a sample with these labels; an expression matches a whole value."""
    for label, operator, value in matchers:
        is_equal = re.fullmatch(value, labels[label]) is not None if "~" in operator else value == labels[label]
        if is_equal == (operator[0] == "!"):
            return False
    return True
