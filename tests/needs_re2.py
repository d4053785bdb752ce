"""What tests whose checkpoints or adapters have patterns of module names need: the package google-re2."""

from importlib.util import find_spec

import pytest

needs_re2 = pytest.mark.skipif(find_spec("re2") is None, reason="google-re2 is not installed")
