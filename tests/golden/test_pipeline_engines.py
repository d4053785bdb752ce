"""Engines with pipeline stages give golden models the tokens of one process, with steps of other sequences in flight."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from quire import LLM, ConfigError, SamplingParams
from quire.kernels.native import load_native
from quire.worker import pipeline_build
from tests.thread_workers import ThreadWorkers

pytestmark = [pytest.mark.golden, pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")]

PROMPTS = [torch.randint(3, 131, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 9, 25, 31, 32, 33, 45)]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
CASES = [
    *("phi3-longrope", "gemma2", "gpt-oss", "qwen3-moe-mlp-only", "gpt2-scaled", "llama-mqa"),
    pytest.param("glm-moe-dsa", marks=pytest.mark.slow),
]
OPTIONS = {
    "plain": {},
    "small-pool": {"num_kv_blocks": 9, "max_num_seqs": 5},
    "small-steps-and-drafts": {"max_num_batched_tokens": 24, "speculative_config": DRAFTS},
}


def _outputs(folder, num_stages, **options):
    """Return tokens and log probabilities of sampled outputs, and how many sequences were preempted."""
    defaults = {"dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 8, "skip_tokenizer_init": True, "num_threads": 1}
    llm = LLM(str(folder), pipeline_parallel_size=num_stages, **{**defaults, **options})
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True, logprobs=2, detokenize=False)
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    found = repr([(list(output.token_ids), [entry.items() for entry in output.logprobs]) for output in outputs])
    num_preemptions = llm.llm_engine.scheduler.num_preemptions
    llm.close()
    return found, num_preemptions


@pytest.mark.covering
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_one_process(checkpoint, tmp_path, monkeypatch, case, options):
    monkeypatch.setattr(pipeline_build, "spawn_workers", ThreadWorkers)
    folder = shutil.copytree(checkpoint(case, "v5"), tmp_path / "model")
    if case == "phi3-longrope":  # room behind the original length of 32, where the other rope is taken
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    expected, _ = _outputs(folder, 1, **options)
    if case == "glm-moe-dsa":
        with pytest.raises(ConfigError, match=r"pipeline_layers is \(2, 2\), but layer 2 reads .* other layers than \[1, 2\]"):
            _outputs(folder, 2, pipeline_layers=(2, 2))
    found, num_preemptions = _outputs(folder, 2, **options)
    assert found == expected
    if "num_kv_blocks" in options:
        assert num_preemptions > 0
