from __future__ import annotations

import random
import time

import pytest

from quire.base.errors import RequestError
from quire.text.stop_strings import StopStringScanner


def run(pieces, stops, include=False, num_passed=0):
    scanner = StopStringScanner(stops, include)
    emitted, found = [], None
    for index, piece in enumerate(pieces):
        text, match = scanner.feed(piece, index >= num_passed)
        emitted.append(text)
        found = found or match
    if found is None:
        emitted.append(scanner.flush())
    return "".join(emitted), found


def scan_whole(text, stops, include, first=1):
    for end in range(first, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("include", [False, True])
def test_any_split_gives_the_result_of_the_whole_text(include):
    rng = random.Random(3)
    for _ in range(3000):
        text = "".join(rng.choice("aab\n") for _ in range(rng.randrange(30)))
        stops = tuple("".join(rng.choice("aab\n") for _ in range(rng.randint(1, 5))) for _ in range(rng.randrange(4)))
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        for passed in {0, rng.randrange(len(pieces))}:
            want = scan_whole(text, stops, include, len("".join(pieces[:passed])) + 1)
            assert run(pieces, stops, include, passed) == want, (pieces, stops, passed)


def test_only_what_could_begin_a_stop_string_is_held_back():
    scanner = StopStringScanner(("</end>", "\n\n"), False)
    assert scanner.feed("a</e") == ("a", None)
    assert scanner.feed("x") == ("</ex", None)
    assert scanner.feed("b\n") == ("b", None)
    assert scanner.flush() == "\n"


def test_stop_string_that_is_complete_first_wins_and_then_the_longest():
    assert run(["xabcd"], ("abcd", "bc")) == ("xa", "bc")
    assert run(["xabc"], ("bc", "abc")) == ("x", "abc")
    assert run(["x", "ab", "c"], ("ab", "abc")) == ("x", "ab")


def test_nothing_is_emitted_after_a_match():
    scanner = StopStringScanner(("b",), True)
    assert scanner.feed("abc") == ("ab", "b")
    assert scanner.feed("b") == ("", None)
    assert scanner.flush() == ""


def test_included_stop_string_holds_nothing_back():
    scanner = StopStringScanner(("abc",), True)
    assert [scanner.feed(c) for c in "abc"] == [("a", None), ("b", None), ("c", "abc")]


def test_empty_stop_string_is_rejected():
    with pytest.raises(RequestError):
        StopStringScanner(("a", ""), False)


def test_repetitive_stop_string_costs_linear_time():
    scanner = StopStringScanner(("a" * 20_000 + "b",), False)
    begin = time.process_time()
    for _ in range(5_000):
        scanner.feed("aaaa")
    assert time.process_time() - begin < 5
    assert len(scanner.flush()) == 20_000
