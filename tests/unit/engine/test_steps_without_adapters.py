"""Steps of engines without enable_lora run no code of adapters, and with it those without an adapter only look for one."""

import sys
from collections import Counter
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.kernels.native import load_native
from tests.lora_adapter import write_adapter

PROMPTS = [{"prompt_token_ids": list(range(start, start + size))} for start, size in ((5, 20), (50, 13), (90, 9))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
OF_ADAPTERS = ("/model/lora/", "/worker/lora.py", "/engine/adapters.py")


@contextmanager
def counted_calls():
    """Count calls of functions of quire by (file, name)."""
    counts: Counter[tuple[str, str]] = Counter()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and "/quire/" in code.co_filename:
            counts[code.co_filename, code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield counts
    finally:
        sys.setprofile(before)


def calls_of_steps(model, lora=None, **more):
    """Return the calls while requests without an adapter run, after others with one."""
    options = {"num_kv_blocks": 60, "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 16, **more}
    with closing(LLM(str(model), device="cpu", enable_prefix_caching=False, **options)) as llm:
        for adapter in (lora, None):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=adapter)
        engine = llm.llm_engine
        for number, prompt in enumerate(PROMPTS):
            engine.add_request(f"r{number}", prompt, PARAMS)
        with counted_calls() as counts:
            while engine.has_unfinished_requests():
                engine.step()
    return counts


@pytest.mark.parametrize("block_size", [4, 16], ids=["torch", "native"])
def test_nothing_of_adapters_runs_without_the_option(tiny_model, block_size):
    counts = calls_of_steps(tiny_model, block_size=block_size)
    assert sum(counts.values()) > 100
    found = {name for file, name in counts if any(part in file for part in OF_ADAPTERS)}
    assert found <= {"AdapterRegistry.has_waiting", "AdapterRegistry.release"}  # whether a queue, and a key, is empty


@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
def test_steps_without_adapters_only_find_that_they_have_none(tiny_model, tmp_path):
    """The kernels are told of no adapters, also after requests that had one."""
    write_adapter(tmp_path / "one", {"model.layers.0.self_attn.q_proj": (32, 32)})
    never, taken = calls_of_steps(tiny_model), calls_of_steps(tiny_model, enable_lora=True)
    assert calls_of_steps(tiny_model, LoRARequest("one", 1, str(tmp_path / "one")), enable_lora=True) == taken
    more = taken - never
    assert {(Path(file).name, name) for file, name in more} <= {
        ("numbers.py", "AdapterNumbers.of_runs"),
        ("input_batch.py", "InputBatch.build.<locals>.<listcomp>"),
    }
    assert max(more.values()) <= never[next(call for call in never if call[1] == "LLMEngine.step")]
    assert not never - taken
