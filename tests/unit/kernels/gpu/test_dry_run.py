"""What is run to plan the memory of a device, run where every address is checked: no real step may differ from it there."""

import sys
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.worker.device import build, drafters
from quire.worker.device.memory import HostMemory
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.kernels.gpu.conftest import HAS_GPU

sys.path.insert(0, str(Path(__file__).parents[2] / "speculate"))
import head_checkpoints as heads

pytestmark = [
    pytest.mark.skipif(HAS_GPU, reason="a GPU plans its own memory at every start"),
    pytest.mark.usefixtures("few_programs"),
]
SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
SMALL = SHAPE | {"num_hidden_layers": 1, "vocab_size": 97}
OPTIONS = {"dtype": "float32", "block_size": 4, "num_kv_blocks": 8, "max_model_len": 6, "max_num_seqs": 2}
OPTIONS |= {"max_num_batched_tokens": 64}
NUM_TOKENS = 12  # of two sequences of six
GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
HEADS = {"eagle3": heads.eagle3, "eagle": heads.eagle1, "medusa": heads.medusa}


class RunMemory(HostMemory):
    """The host's memory, where what is to be measured is run, as on a device that counts."""

    def __init__(self):
        super().__init__()
        self.num_runs = 0

    def peak_of(self, run):
        self.num_runs += 1
        run()
        return 0

    taken_by = peak_of


@pytest.fixture
def planned(monkeypatch):
    """Have engines plan their memory by dry runs; the memory that they measure, and the steps that they launch."""
    memory, launched = RunMemory(), []
    launch = build.GpuStepExecutor.launch_mixed

    def note(stepper, step, *rest):
        launched.append((stepper, step))
        return launch(stepper, step, *rest)

    monkeypatch.setattr(build, "_memory_to_plan", lambda *_: memory)
    monkeypatch.setattr(build.GpuStepExecutor, "launch_mixed", note)
    return memory, launched


def start(folder, **options):
    return LLM(str(folder), device="interpreter", **OPTIONS | options)


def expect_within_tables(launched, num_steppers):
    """Expect the largest step of each model, of sequences that block tables have room for."""
    steppers = {id(stepper): stepper for stepper, _ in launched}.values()
    assert len(steppers) == num_steppers
    for stepper in steppers:
        largest = max((step for other, step in launched if other is stepper), key=lambda step: len(step.given_ids))
        assert len(largest.given_ids) == NUM_TOKENS
        assert int(largest.context_lens.max()) == OPTIONS["max_model_len"]


def test_a_step_has_more_tokens_than_a_sequence(tmp_path, planned, address_check):
    memory, launched = planned
    before = address_check.num_launches.copy()
    llm = start(write_checkpoint(tmp_path / "model", "qwen3", **SMALL))
    assert memory.num_runs == 3  # a full step, and captured ones: of every sort, and some once more
    expect_within_tables(launched, 1)
    found = address_check.num_launches - before
    assert found["attend_runs"] > 0
    assert found["attend_projected"] > 0  # captured steps of decoding have layers of five launches
    assert found["fused_linear"] > 0
    assert len(llm.generate([[5, 9]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 2
    llm.close()


@pytest.mark.golden
def test_a_model_has_no_attention(tmp_path, planned):
    pytest.importorskip("transformers", reason="the golden checkpoints are made by transformers")
    from tests.golden.make_checkpoints import make_checkpoint

    memory, launched = planned
    start(make_checkpoint("mamba", tmp_path / "mamba"), enforce_eager=True, skip_tokenizer_init=True).close()
    assert memory.num_runs
    expect_within_tables(launched, 1)


@pytest.mark.parametrize("quantization", ["int4", "fp8"])
def test_weights_are_quantised(tmp_path, planned, quantization, address_check):
    _, launched = planned
    before = address_check.num_launches.copy()
    start(write_checkpoint(tmp_path / "model", "qwen3", **SMALL), quantization=quantization, enforce_eager=True).close()
    expect_within_tables(launched, 1)
    found = address_check.num_launches - before
    assert found["multiply_packed"] > 0


@pytest.mark.parametrize(
    ("method", "drafts"),
    [
        ("draft_model", {}),
        ("eagle3", {}),
        ("eagle3", {"draft_top_k": 2, "num_speculative_tokens": 4}),
        pytest.param("eagle", {}, marks=pytest.mark.slow),
        ("medusa", {}),
    ],
    ids=["draft model", "eagle3", "eagle3 trees", "eagle", "medusa"],
)
def test_what_drafts_has_more_tokens_in_a_step_than_a_sequence(tmp_path, planned, method, drafts):
    _, launched = planned
    folder = write_checkpoint(tmp_path / "model", "qwen3", **SHAPE)
    head = folder if method == "draft_model" else HEADS[method](tmp_path / "head")
    config = {"method": method, "model": str(head), "num_speculative_tokens": 3, "adaptive": False} | drafts
    start(folder, speculative_config=config, enforce_eager=True).close()
    expect_within_tables(launched, 1 if method == "medusa" else 2)


def test_all_tokens_of_a_level_of_trees_have_logits(tmp_path, planned, monkeypatch):
    counts, logits = [], drafters.DeviceHead.logits

    def count(head, hidden, **options):
        counts.append(len(hidden))
        return logits(head, hidden, **options)

    monkeypatch.setattr(drafters.DeviceHead, "logits", count)
    monkeypatch.setattr(drafters, "MAX_PENDING", 1)
    folder = write_checkpoint(tmp_path / "model", "qwen3", **SHAPE)
    drafts = {"method": "eagle3", "model": str(HEADS["eagle3"](tmp_path / "head")), "draft_top_k": 7}
    drafts |= {"num_speculative_tokens": 8, "adaptive": False}
    start(folder, max_num_batched_tokens=2, speculative_config=drafts, enforce_eager=True).close()
    assert max(counts) == 2 * 7  # more than a step of the head has tokens
