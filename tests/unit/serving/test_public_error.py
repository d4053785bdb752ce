"""The part of an exception that clients may see."""

import random
import string

import pytest

from quire.serving.public_error import MAX_LENGTH, show_error


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("RuntimeError: the cache is broken at block 7", "RuntimeError: the cache is broken at block 7"),
        ("InvariantError: the engine's pool isn't whole: 5 of 8 blocks", None),
        ("ValueError: shape [4, 32, 64] is not [4, 32, 128]", None),
        ("OutOfMemoryError: 3.5 GiB wanted\nwhat follows is advice\n", "OutOfMemoryError: 3.5 GiB wanted"),
        ("KeyError: 'my secret diary'", "KeyError: '...'"),
        ('ValueError: "it\'s a secret" is no number', "ValueError: '...' is no number"),
        ("ValueError: b'secret\\' more secret' is wrong", "ValueError: '...' is wrong"),
        ("ValueError: cannot read 'a secret that was cut", "ValueError: cannot read '...'"),
        ("ValueError: 'a secret\nof two lines' is wrong", "ValueError: '...' is wrong"),
        (f"IndexError: {list(range(20))} is too long", "IndexError: [...] is too long"),
        ("OSError: [Errno 2] No such file: /home/ann/secret.bin", "OSError: [Errno 2] No such file: <path>"),
        ("ImportError: in quire/secret/x.py, line 5", "ImportError: in <path>, line 5"),
        ("OSError: C:\\Users\\secret is gone", "OSError: <path> is gone"),
        ("RuntimeError: asked with Bearer secret", "RuntimeError: asked with ..."),
        ("RuntimeError: asked with sk-secret0123", "RuntimeError: asked with ..."),
        ("RuntimeError: 30 tokens/s and 1 / 2 of it", None),
        (
            'Traceback (most recent call last):\n  File "/secret/x.py", line 1, in f\n    secret()\nValueError: broken',
            "ValueError: broken",
        ),
        ("RuntimeError: \x1b[31mred\x00", "RuntimeError: [31mred"),
        ("", ""),
    ],
)
def test_type_and_message_are_shown_and_what_may_be_of_others_is_not(text, shown):
    assert show_error(text) == (text if shown is None else shown)


def test_message_is_one_short_line_whatever_it_is():
    random_ = random.Random(0)
    for _ in range(300):
        text = "".join(random_.choices(string.printable + "'\"\\\x00\u2028é", k=random_.randrange(6000)))
        shown = show_error("E: " + text)
        assert len(shown) <= MAX_LENGTH
        assert len(shown.splitlines()) <= 1
