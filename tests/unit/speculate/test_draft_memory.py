"""What drafts take is counted before it is taken."""

import head_checkpoints as heads
import pytest

from quire import LLM, EngineConfig
from quire.base.errors import ConfigError
from quire.contracts.kv_spec import KvSpec
from quire.contracts.memory import MemoryPlan
from quire.contracts.mixer_spec import StateShape
from quire.contracts.speculative import SpeculativeConfig
from quire.kernels.native import load_native
from quire.model.config_reader import read_model_spec
from quire.model.heads.build import read_layer_head, read_parallel_head
from quire.speculate.build import count_drafts
from quire.speculate.memory import (
    DraftBytes,
    StepLimits,
    check_drafts_fit,
    layer_head_bytes,
    parallel_head_bytes,
    verification_bytes,
)
from quire.worker import memory
from quire.worker.inspect import inspect_model

LIMITS = StepLimits(4, 64)


def test_kept_inputs_waiting_places_and_scratch_are_counted(tiny_model, tmp_path):
    spec, report = read_model_spec(tiny_model), inspect_model(EngineConfig(model=str(tiny_model), num_kv_blocks=500))
    head = read_layer_head(heads.eagle3(tmp_path / "head"), "eagle3", spec)
    taken = layer_head_bytes(head, 1000, report.memory, LIMITS)
    assert taken.weights == sum(tensor.numel() * 4 for tensor in head.parameters.values())
    assert taken.kv == 1000
    feature = 2 * heads.HIDDEN * 4  # two layers in f32
    assert taken.work > 2 * 64 * feature + 2 * 4 * 512 * feature
    wider = layer_head_bytes(head, 1000, report.memory, StepLimits(4, 1064))
    assert wider.work - taken.work == 2 * 1000 * feature
    narrow = layer_head_bytes(
        read_layer_head(heads.eagle3(tmp_path / "one", layers=(1,)), "eagle3", spec), 1000, report.memory, LIMITS
    )
    assert taken.work - narrow.work >= (2 * 64 + 2 * 4 * 512) * feature // 2


def test_what_medusa_says_and_what_is_verified_are_counted(tiny_model, tmp_path):
    head = read_parallel_head(heads.medusa(tmp_path / "head"), read_model_spec(tiny_model))
    taken = parallel_head_bytes(head, LIMITS)
    assert taken.weights == 3 * (heads.HIDDEN**2 + heads.HIDDEN + heads.VOCAB * heads.HIDDEN) * 4
    assert taken.work > 4 * 3 * heads.VOCAB * 4
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=5)
    assert verification_bytes(config, 301, LIMITS).work == 4 * 5 * 301 * 4


@pytest.mark.skipif(load_native() is None, reason="the plan of the torch decoder is another one")
@pytest.mark.parametrize("kind", ["eagle3", "medusa", "mtp"])
def test_heads_that_do_not_fit_are_refused_with_the_numbers(tiny_model, tmp_path, monkeypatch, kind):
    folder = getattr(heads, kind)(tmp_path / "head")
    options = {"model": str(tiny_model), "num_kv_blocks": 20}
    plan = inspect_model(EngineConfig(**options)).memory
    needed = plan.weight_bytes + plan.activation_bytes + plan.kv_bytes
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: needed + 1000)
    with pytest.raises(ConfigError, match="the model leaves only 1000 B; lower num_kv_blocks"):
        LLM(**options, speculative_config={"method": kind, "model": str(folder)})


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "mtp", "draft_model", "ngram"])
def test_default_pool_leaves_room_for_what_drafts(tiny_model, tmp_path, monkeypatch, kind):
    with_model = kind not in ("ngram", "draft_model")
    config = {"method": kind, "num_speculative_tokens": 3}
    if kind != "ngram":
        config["model"] = str(getattr(heads, kind)(tmp_path / "head") if with_model else tiny_model)
    options = {"model": str(tiny_model), "max_num_seqs": 2, "max_num_batched_tokens": 64}
    config = SpeculativeConfig.read(config)
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 1 << 40)
    roomy = inspect_model(EngineConfig(**options, speculative_config=config))
    assert roomy.memory == inspect_model(EngineConfig(**options)).memory
    taken = count_drafts(config, roomy, StepLimits(2, 64))
    needed = roomy.memory.weight_bytes + roomy.memory.activation_bytes + roomy.memory.kv_bytes
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: needed + taken.weights + taken.work)
    plan = inspect_model(EngineConfig(**options, speculative_config=config)).memory
    kv_bytes = plan.kv_bytes + taken.kv * plan.num_kv_blocks // roomy.memory.num_kv_blocks
    assert 1 < plan.num_kv_blocks < roomy.memory.num_kv_blocks
    left = plan.available_bytes - plan.weight_bytes - plan.activation_bytes - taken.weights - taken.work
    assert kv_bytes == pytest.approx(left / 2, rel=0.2)
    given = EngineConfig(**options, speculative_config=config, num_kv_blocks=33)
    assert inspect_model(given).memory.num_kv_blocks == 33


@pytest.mark.skipif(load_native() is None, reason="torch runs the model in blocks of 16 too")
def test_heads_of_a_model_that_torch_runs_have_a_cache_in_float16(tiny_model, tmp_path):
    """The native kernels have no float16, so that their caches have float32; torch writes float16 into its own."""
    drafts = SpeculativeConfig(method="eagle3", model=str(heads.eagle3(tmp_path / "head")), num_speculative_tokens=3)
    native, torch = (
        inspect_model(EngineConfig(model=str(tiny_model), dtype="float16", num_kv_blocks=num_blocks, block_size=block_size))
        for num_blocks, block_size in ((20, 16), (80, 4))
    )
    kv_bytes = [count_drafts(drafts, report, LIMITS).kv for report in (native, torch)]
    assert kv_bytes[0] == 2 * kv_bytes[1] > 0


def test_recurrent_states_are_not_left_for_drafts():
    kv = KvSpec(16, "float32", ((1, 8),), ((StateShape((100,), is_f32=True),),))
    plan = MemoryPlan(20_000, 1000, 1000, kv, num_kv_blocks=1, max_model_len=64, num_states=10)
    left = 20_000 - 2000 - 1024 - 10 * 400
    check_drafts_fit("some", DraftBytes(weights=left), plan)
    with pytest.raises(ConfigError, match="not enough memory for speculative decoding"):
        check_drafts_fit("some", DraftBytes(weights=left + 1), plan)
