"""Identifiers as distinct types, so that a type checker distinguishes a block from a sequence."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
SequenceId = NewType("SequenceId", int)
BlockId = NewType("BlockId", int)
