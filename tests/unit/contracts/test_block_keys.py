"""Keys of KV blocks are the same in every process: routers, tiers and other hosts compare them."""

import os
import subprocess
import sys

import pytest

CODE = """
from quire.contracts.block_keys import block_keys
from quire.router.block_index import chain_keys
print(block_keys("a salt", range(100, 140), 16), chain_keys(range(100, 140), 16), chain_keys(range(9), 4, is_separate=True))
"""


@pytest.mark.slow
def test_keys_do_not_depend_on_the_hash_seed_of_the_process():
    outputs = set()
    for seed in ("0", "1", "4294967295"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        outputs.add(subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, check=True).stdout)
    (output,) = outputs
    assert output.count(b",") == 3
