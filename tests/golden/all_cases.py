"""All golden cases as pytest parameters: those of dense families are `slow`, as a fast test compares them already."""

from __future__ import annotations

import pytest

from tests.golden.make_checkpoints import CASES, DENSE_CASES

ALL_CASES = [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in DENSE_CASES)]
