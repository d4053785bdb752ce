"""The interference benchmark: phases, the same tokens in every case, and options that are refused."""

import json
import time

import pytest

from quire import EngineConfig
from quire.base.errors import ConfigError
from quire.bench.interference import PHASES, InterferenceOptions, measure_interference
from quire.engine import remote_prefill
from quire.engine.llm_engine import LLMEngine
from quire.kernels.native import load_native

SMALL = {"num_decodes": 2, "decode_tokens": 8, "prompt_tokens": 130, "num_steps": 3, "num_rounds": 2}


def config_of(folder, **options):
    return EngineConfig(model=str(folder), num_kv_blocks=64, max_num_seqs=4, **options)


def test_gaps_of_each_phase_are_measured_with_the_same_tokens(tiny_model):
    found = measure_interference(config_of(tiny_model), InterferenceOptions(chunks=(0, 16), prefill_threads=0, **SMALL))
    whole, chunked = found.cases
    for case in found.cases:
        assert case.is_same
        assert case.num_remote == 0
        assert {case.phases[phase].num_gaps for phase in ("before", "after")} == {2 * 2 * 3}  # rounds, sequences, steps
        assert all(0 < case.phases[phase].p50_s <= case.phases[phase].p99_s for phase in PHASES)
    assert chunked.phases["during"].num_gaps >= 8 * whole.phases["during"].num_gaps  # a step for each chunk
    lines = found.describe().splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == ["one engine", "chunks of 16"]
    assert json.loads(found.to_json())["cases"][1]["phases"]["during"]["p99_s"] > 0


@pytest.mark.slow
@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
def test_a_separate_engine_computes_the_long_prompts(tiny_model, monkeypatch):
    # This machine may be busy, so that the peer is slow: it is preferred and waited for all the same.
    for name, value in {"_MAX_SLOWDOWN": 1e9, "_MIN_WAIT_S": 60.0, "_UNKNOWN_WAIT_S": 60.0}.items():
        monkeypatch.setattr(remote_prefill, name, value)
    step = LLMEngine.step

    def step_slowly(engine):
        if engine.remote_prefill:  # a prompt is computed by the peer; the other sequences must not end before
            time.sleep(0.2)
        return step(engine)

    monkeypatch.setattr(LLMEngine, "step", step_slowly)
    options = InterferenceOptions(chunks=(0,), prefill_threads=1, **SMALL)
    case = measure_interference(config_of(tiny_model, num_threads=2), options).cases[1]
    assert (case.name, case.num_threads, case.is_same) == ("separate engine", (1, 1), True)
    assert case.num_remote > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_decodes": 0}, "num_decodes must be at least 1, got 0"),
        ({"prefill_threads": -1}, "prefill_threads must be at least 0, got -1"),
        ({"chunks": (0, -2)}, "chunks must be at least 0, got -2"),
    ],
    ids=["decodes", "threads", "chunks"],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        InterferenceOptions(**options)


def test_prompts_that_do_not_fit_are_refused(tiny_model):
    with pytest.raises(ConfigError, match="prompt_tokens must be less than max_model_len"):
        measure_interference(config_of(tiny_model), InterferenceOptions(chunks=(0,), prefill_threads=0, prompt_tokens=9999))
    with pytest.raises(ConfigError, match="leave role and data_parallel_size out"):
        measure_interference(config_of(tiny_model, data_parallel_size=2), InterferenceOptions())
    with pytest.raises(ConfigError, match="long_prefill_token_threshold has no effect here: give chunks"):
        measure_interference(config_of(tiny_model, long_prefill_token_threshold=16), InterferenceOptions())
