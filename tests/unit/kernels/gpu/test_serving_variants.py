"""All kernels that serving launches are found, and compiled, before the first request."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
# What Triton takes, or refuses, as its own where kernels are launched.
RESERVED = {
    "stream",
    "device",
    "device_type",
    "grid",
    "warmup",
    "debug",
    "num_warps",
    "num_stages",
    "num_ctas",
    "instrumentation_mode",
}


def run_without_interpreter(cache, *arguments):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.unit.kernels.gpu.serving_variants", *arguments]
    environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_random_steps_launch_nothing_that_was_not_found_ahead(tmp_path):
    models = run_without_interpreter(tmp_path)
    assert len(models) == 9
    assert [model for model in models if model["missing"]] == []
    assert all(20 < model["count"] < 120 for model in models)
    assert [RESERVED & set(model["parameters"]) for model in models] == [set()] * 9


@pytest.mark.slow
def test_what_was_found_compiles_into_the_cache_without_a_gpu(tmp_path):
    *_, compiled = run_without_interpreter(tmp_path, "compile")
    assert compiled["launched"] == compiled["hashes"][-1]  # a launch with tensors finds what was compiled without
    assert len(compiled["hashes"]) == len(set(compiled["hashes"])) > 5
    assert len(list(tmp_path.glob("*/*.cubin"))) == len(compiled["hashes"])
