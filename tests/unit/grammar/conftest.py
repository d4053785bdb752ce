"""What the tests of grammars share."""

import pytest

from tests.unit.grammar.byte_vocabulary import make_compiler


@pytest.fixture(scope="module")
def compiler():
    with make_compiler() as compiler:
        yield compiler
