"""Parsers that are never finished, as for aborted outputs."""

import gc
import subprocess
import sys

from quire.text.parsing.message_reader import MessageReader
from quire.text.parsing.parser import OutputParser
from quire.text.parsing.tools import Tool

BEGUN = '<tool_call>{"name": "f", "arg'
# What outlives most modules, as test runners and debuggers make it; the parser's own module is kept, and emptied before.
LEFT_AT_EXIT = f"""
import os
import quire.text.parsing.message_reader
from quire.text.parsing.message_reader import MessageReader
from quire.text.parsing.parser import OutputParser
from quire.text.parsing.tools import Tool
os.module = quire.text.parsing.message_reader
os.parser = OutputParser(tool_format="hermes", reasoning_format=None, tools=[Tool("f")], starts_in_reasoning=False)
os.parser.feed({BEGUN!r})
"""


def test_program_ends_without_a_word_when_a_parser_is_left_open():
    ended = subprocess.run([sys.executable, "-c", LEFT_AT_EXIT], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr == ""


def num_readers():
    gc.collect()
    return sum(isinstance(one, MessageReader) for one in gc.get_objects())


def test_parser_goes_when_nobody_holds_it():
    before = num_readers()
    parser = OutputParser(tool_format="hermes", reasoning_format=None, tools=[Tool("f")], starts_in_reasoning=False)
    parser.feed(BEGUN)
    assert num_readers() == before + 1
    del parser
    assert num_readers() == before
