"""The engine on tensor-parallel ranks and pipeline stages, interpreted, over gloo: workers are threads, in some tests
processes."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from quire import LLM, LoRARequest, PoolingParams, SamplingParams
from quire.base.environment import environment_with_quire
from quire.base.errors import ConfigError, DeviceLostError, ModelFormatError, RequestError
from quire.kernels.native import load_native
from quire.model import device_decoder, device_experts
from quire.parallel.expert_files import read_loads, read_pairs
from quire.worker import parallel_launch
from quire.worker.device import gpu_group
from quire.worker.device.gpu_group import RankConfig
from tests.device_ranks import one_launch_at_a_time
from tests.golden.make_checkpoints import make_checkpoint
from tests.lora_adapter import write_adapter
from tests.ports import free_port
from tests.thread_workers import ThreadWorkers
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.kernels.gpu.conftest import HAS_GPU
from tests.unit.kernels.gpu.test_device_heads import CUT, GREEDY, HEADS, drafting, said
from tests.unit.speculate.proposers import PROPOSERS, install

pytestmark = [
    pytest.mark.skipif(HAS_GPU, reason="several ranks on one machine are interpreted, over gloo"),
    pytest.mark.skipif(load_native() is None, reason="the shared memory of ranks needs the native extension"),
    pytest.mark.usefixtures("few_programs"),
]
OPTIONS = {
    "device": "interpreter",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 16,
    "num_kv_blocks": 40,
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
}
PROMPTS = [[5, 9, 31, 7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [200, 3]]
SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
MIXED = {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": (1,)}
TREES = {"suffix_decoding_use_tree_spec": True, "adaptive": False}
CHECKED = "tests.unit.kernels.gpu.checked_worker"
COMMON = {"ignore_eos": True, "detokenize": False, "seed": 5}


@pytest.fixture
def threads(monkeypatch):
    """Let workers be threads."""
    one_launch_at_a_time(monkeypatch)
    monkeypatch.setattr(parallel_launch, "spawn_workers", ThreadWorkers)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("ranks") / "qwen3", "qwen3")


def engine(folder, size=1, **options):
    return LLM(str(folder), tensor_parallel_size=size, **(OPTIONS | options))


def greedy(max_tokens):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **COMMON)


def outputs_of(llm, prompts, params, loras=None):
    """Return tokens and log probabilities."""
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False, lora_request=loras):
        assert output.error is None
        prompt_logprobs = [None if entry is None else entry.items() for entry in output.prompt_logprobs or ()]
        found.append((prompt_logprobs, [(list(c.token_ids), [e.items() for e in c.logprobs or ()]) for c in output.outputs]))
    return repr(found)


def tokens_of(llm, prompts, params, loras=None):
    found = llm.generate(prompts, params, use_tqdm=False, lora_request=loras)
    return [choice.token_ids for output in found for choice in output.outputs]


def executor_of(llm):
    return llm.llm_engine.runner.executor


def test_statistics_have_the_collectives_and_the_share_of_each_rank(qwen, threads):
    llm = engine(qwen, 2, tensor_parallel_shares=(1, 1))
    assert llm.llm_engine.stats.ranks[0].collectives == {}
    tokens_of(llm, PROMPTS[:1], greedy(2))
    first, second = llm.llm_engine.stats.ranks
    assert (first.rank, second.rank, first.share, second.share) == (0, 1, 0.5, 0.5)
    gathered = first.collectives["all_gather"]
    assert gathered.num_calls > llm.llm_engine.stats.num_steps
    assert gathered.num_bytes > 0
    assert second.state == "ready"
    llm.close()


def test_deterministic_outputs_have_the_bits_of_one_rank_for_every_way_of_sampling(qwen, threads):
    params = [
        SamplingParams(temperature=0.0, max_tokens=3, **COMMON),
        SamplingParams(temperature=1.2, min_p=0.05, logprobs=2, prompt_logprobs=1, max_tokens=3, **COMMON),
        SamplingParams(temperature=0.9, top_k=7, top_p=0.8, max_tokens=3, **COMMON),
    ]
    found, pooled = [], []
    for more in ({}, {"size": 2}, HOMES):
        llm = engine(qwen, deterministic=True, **more)
        found.append(outputs_of(llm, PROMPTS, params))
        pooled.append(llm.embed(PROMPTS[:1], PoolingParams(pooling="mean"), use_tqdm=False)[0].outputs.embedding)
        llm.close()
    assert found[0] == found[1] == found[2]
    assert pooled[0] == pooled[1] == pooled[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options", "placement"),
    [
        ("qwen3", {"quantization": "int4", **MIXED}, {}),
        ("qwen3_moe", {}, {"enable_expert_parallel": True, "num_redundant_experts": 2, "enable_eplb": True}),
        ("qwen3_moe", {}, {"enable_expert_parallel": True, "decode_context_parallel_size": 2, "num_kv_blocks": 64}),
    ],
)
def test_deterministic_outputs_have_the_bits_of_one_rank_on_uneven_stages_of_two_ranks(
    tmp_path, threads, family, options, placement
):
    folder = write_checkpoint(tmp_path / "three", family, num_hidden_layers=3)
    params = [
        SamplingParams(temperature=0.9, top_k=7, logprobs=2, prompt_logprobs=1, max_tokens=2, **COMMON),
        SamplingParams(temperature=1.2, repetition_penalty=1.3, logprobs=1, max_tokens=2, **COMMON),
    ]
    found = []
    for more in ({}, STAGES | {"size": 2, "pipeline_layers": (2, 1)} | placement):
        llm = engine(folder, deterministic=True, **options, **more)
        found.append(outputs_of(llm, PROMPTS[1:], params))
        if "enable_eplb" in more:
            move_experts(llm)
        found.append(outputs_of(llm, PROMPTS[:1], params[0]))
        ranks, experts = llm.llm_engine.stats.ranks, llm.llm_engine.stats.experts
        llm.close()
    assert found[:2] == found[2:]
    assert [each.layer for each in experts] == ([0, 1, 2] if placement else [])
    assert len({sum(each.tokens) for each in experts}) <= 1  # as many in layers of each stage
    assert [round(6 * rank.share) for rank in ranks] == [1, 1, 2, 2]  # the last stage comes first
    assert ranks[3].part == "stage 0 (layers 0 to 1), tensor-parallel rank 1"
    assert ranks[0].collectives["recv"].num_calls > 0


@pytest.mark.slow
def test_layers_are_on_the_stage_whose_indexer_chooses_their_keys(tmp_path, threads):
    make_checkpoint("glm-moe-dsa", tmp_path / "glm")
    found, params = [], SamplingParams(temperature=0.9, logprobs=2, max_tokens=2, **COMMON)
    for more in ({}, STAGES):
        llm = engine(tmp_path / "glm", deterministic=True, **more)
        found.append(outputs_of(llm, [list(range(3, 15))], params))
        parts = [rank.part for rank in llm.llm_engine.stats.ranks]
        llm.close()
    assert found[0] == found[1]
    assert parts == ["stage 1 (layers 3 to 3)", "stage 0 (layers 0 to 2)"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bytes_of_all_rows", "ranks"),
    [(0, {"size": 2}), (1 << 20, {"size": 2}), (0, {"size": 3, "enable_dp_attention": True, "num_kv_blocks": 42})],
    ids=["sent", "all-rows", "sent-homes"],
)
def test_deterministic_outputs_have_the_bits_of_one_rank_when_each_has_whole_experts(
    tmp_path, threads, bytes_of_all_rows, ranks, monkeypatch
):
    monkeypatch.setattr(device_experts, "ORDERED_BYTES", bytes_of_all_rows)
    folder = write_checkpoint(tmp_path / "moe", "qwen3_moe")
    params = SamplingParams(temperature=0.9, logprobs=2, max_tokens=3, **COMMON)
    monkeypatch.setattr(device_experts, "HALVES_ROWS", 1)
    monkeypatch.setattr(gpu_group, "hosts_of", lambda store, rank, size: list(range(size)))  # so that pairs are counted
    found, tokens, path = [], [], tmp_path / "load.json"
    common = {"deterministic": True, "quantization": "int8" if bytes_of_all_rows else None}
    placed = ranks | {
        "save_expert_load": str(tmp_path / "pairs.json"),
        "enable_expert_parallel": True,
        "num_redundant_experts": 1,
        "enable_eplb": True,
    }
    for options in ({"size": 1, "save_expert_load": str(path)}, placed):
        llm = engine(folder, **common, **options)
        found.append(outputs_of(llm, PROMPTS, params))
        if options["size"] > 1:
            move_experts(llm)
        found.append(outputs_of(llm, PROMPTS[1:2], params))
        stats = llm.llm_engine.stats.experts
        tokens.append([layer.tokens for layer in stats])
        assert [sum(layer.rank_tokens) for layer in stats] == [sum(layer.tokens) * (options["size"] > 1) for layer in stats]
        if options["size"] > 1:
            counts = llm.llm_engine.stats.ranks[0].collectives
            assert ("all_to_all" in counts) == (bytes_of_all_rows == 0)
        llm.close()
    assert found[:2] == found[2:]
    assert tokens[0] == tokens[1] == list(read_loads(str(path), {0: 4, 1: 4}).values())
    pairs = read_pairs(placed["save_expert_load"], read_loads(placed["save_expert_load"]))
    for counts, layer in zip(pairs.values(), tokens[1], strict=True):
        assert counts.diagonal().tolist() == layer
        assert counts.sum() == 2 * sum(layer)  # a token chooses two experts, so it counts for four places
    with pytest.raises(ConfigError, match="has no pairs of experts"):
        read_pairs(str(path), read_loads(str(path)))


def move_experts(llm):
    """Balance the experts, and return when one has moved."""
    assert llm.llm_engine.rebalance_experts()
    end_s = time.monotonic() + 60
    while not any(layer.num_moved for layer in llm.llm_engine.stats.experts):
        assert time.monotonic() < end_s
        executor_of(llm).check_health()
        time.sleep(0.02)


def adapters_of(model, folder):
    """Return adapters of the requests: of all layers, none, and of some, and one of a rank above the limit."""
    shapes = {
        name.removesuffix(".weight"): tuple(weight.shape)
        for name, weight in load_file(model / "model.safetensors").items()
        if name.endswith(("proj.weight", "mlp.gate.weight")) or name == "lm_head.weight"
    }
    some = {name: shape for name, shape in shapes.items() if ".1." in name or "o_proj" in name}
    for number, own in enumerate((shapes, some, some), start=1):
        write_adapter(folder / str(number), own, rank=3 * number, seed=number)
    one, two, wide = (LoRARequest(name, number, str(folder / str(number))) for number, name in enumerate("abc", start=1))
    return [one, None, two], wide


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "is_deterministic", "options"),
    [
        ("qwen3", False, {}),
        ("qwen3_moe", True, {}),
        ("qwen3_moe", True, {"enable_expert_parallel": True}),
        ("qwen3_moe", False, {"enable_expert_parallel": True}),
        ("qwen3", True, {"decode_context_parallel_size": 2, "num_kv_blocks": 64}),
    ],
    ids=["sums", "columns", "whole-experts", "divided-rows", "shared-tokens"],
)
def test_adapters_on_ranks_give_what_they_give_on_one(tmp_path, threads, family, is_deterministic, options, monkeypatch):
    monkeypatch.setattr(device_experts, "ORDERED_BYTES", 0)  # rows are sent to the ranks of their experts
    monkeypatch.setattr(device_decoder, "ORDERED_BYTES", 0)  # and divided among the ranks, if not deterministic
    model = write_checkpoint(tmp_path / "model", family)
    loras, wide = adapters_of(model, tmp_path)
    limits = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 6, "enable_lora_experts": family == "qwen3_moe"}
    counts = (1, None, None)
    params = [SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=count, max_tokens=2, **COMMON) for count in counts]
    prompts, say, found = [prompt[:3] for prompt in PROMPTS], outputs_of if is_deterministic else tokens_of, []
    for size, more in ((1, {}), (2, options)):
        llm = engine(model, size, deterministic=is_deterministic, **limits, **more)
        found.append([say(llm, prompts, params, loras)])
        assert llm.llm_engine.remove_lora(1)
        with pytest.raises(RequestError, match="max_lora_rank"):
            llm.llm_engine.add_lora(wide)
        found[-1].append(say(llm, prompts[:1], params[:1], loras[2:]))
        llm.close()
    assert found[0] == found[1]


STAGES = {"size": 1, "pipeline_parallel_size": 2}
HOMES = {"size": 2, "enable_dp_attention": True}


@pytest.mark.parametrize(
    "ranks",
    [
        {"size": 2},
        pytest.param(STAGES, marks=pytest.mark.slow),
        pytest.param(HOMES | {"num_kv_blocks": 10}, marks=pytest.mark.slow),
    ],
    ids=["ranks", "stages", "homes"],
)
def test_tokens_are_those_of_the_cpu_when_blocks_are_copied_and_sequences_preempted(qwen, threads, ranks):
    options = {"block_size": 4, "num_kv_blocks": 8, "max_model_len": 24}
    shared = SamplingParams(temperature=1.3, n=2, max_tokens=3, **COMMON)
    found = []
    for more in ({"device": "cpu"}, ranks):
        llm = engine(qwen, **(options | more))
        found.append([tokens_of(llm, PROMPTS[:1], shared), tokens_of(llm, [*PROMPTS, [*range(40, 44)]], greedy(6))])
        assert llm.llm_engine.scheduler.num_preemptions > 0
        llm.close()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("kind", "homes"),
    [
        ("fickle tree", {}),
        pytest.param("fickle", {}, marks=pytest.mark.slow),
        pytest.param("fickle tree", {"enable_dp_attention": True}, marks=pytest.mark.slow),
    ],
)
def test_tokens_with_drafts_are_those_of_the_cpu_without_when_ranks_share_a_kv_head(tmp_path, threads, kind, homes):
    folder = write_checkpoint(tmp_path / "shared", "qwen3", **SHAPE)
    one = engine(folder, device="cpu")
    outputs = one.generate(PROMPTS, greedy(5), use_tqdm=False)
    one.close()
    by_prompt = {(tuple(output.prompt_token_ids), 0): output.outputs[0].token_ids for output in outputs}
    ranks = engine(folder, 2, max_num_batched_tokens=24, speculative_config={"method": "suffix"} | TREES, **homes)
    install(ranks, PROPOSERS[kind](4, by_prompt), 4)
    assert tokens_of(ranks, PROMPTS, greedy(5)) == [output.outputs[0].token_ids for output in outputs]
    assert ranks.llm_engine.stats.num_draft_tokens > 0
    ranks.close()


def test_a_launchers_processes_give_the_tokens_of_the_cpu_share_pages_and_end_with_the_leader(qwen, monkeypatch):
    one, options = engine(qwen, device="cpu"), OPTIONS | {"kv_host_bytes": 1 << 20, "kv_save": "write_through"}
    prompts = [PROMPTS[1] * 2]
    expected = tokens_of(one, prompts, greedy(2))
    one.close()
    told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    code = f"from {CHECKED} import install\ninstall()\nfrom quire import LLM\n"
    code += f"LLM({str(qwen)!r}, tensor_parallel_size=2, **{options!r})"
    environment = environment_with_quire() | told | {"RANK": "1", "LOCAL_RANK": "1"}
    worker = subprocess.Popen([sys.executable, "-c", code], env=environment)
    for name, value in (told | {"RANK": "0", "LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    ranks = engine(qwen, 2, **options)
    for num_loaded in (0, 1):
        assert tokens_of(ranks, prompts, greedy(2)) == expected
        assert ranks.llm_engine.stats.tiers[0].num_loaded == num_loaded
        ranks.sleep(1)  # empties the prefix cache
        ranks.wake_up()
    ranks.close()
    assert worker.wait(timeout=60) == 0


def test_requests_end_with_the_reason_when_the_process_of_a_stage_is_killed(qwen, monkeypatch):
    monkeypatch.setattr("quire.worker.device.build.WORKER_MODULE", CHECKED)
    one = engine(qwen, device="cpu")
    expected = tokens_of(one, PROMPTS[:1], greedy(2))
    one.close()
    ranks = engine(qwen, **STAGES)
    assert tokens_of(ranks, PROMPTS[:1], greedy(2)) == expected
    executor = executor_of(ranks)
    (pid,) = executor.worker_pids.values()
    os.kill(pid, signal.SIGKILL)
    began_s = time.monotonic()
    with pytest.raises(DeviceLostError, match=rf"pipeline stage 0 \(layers 0 to 0\): rank 1 .*{pid}.*SIGKILL"):
        ranks.generate(PROMPTS[:1], greedy(20), use_tqdm=False)
    assert time.monotonic() - began_s < 30
    ranks.close()
    assert executor.frames == {}  # and no CUDA graph is left, for which NCCL would wait


def test_what_a_worker_fails_with_while_it_loads_is_raised(qwen, monkeypatch):
    told = RankConfig.to_json
    monkeypatch.setattr(RankConfig, "to_json", lambda own: told(replace(own, config=replace(own.config, model="/nowhere"))))
    with pytest.raises(ModelFormatError, match="rank 1 failed in inspecting the model: .*/nowhere"):
        engine(qwen, 2)


TREE = {"draft_top_k": 2, "num_speculative_tokens": 5}
DRAFTS = [("eagle3", True, {}), ("medusa", False, {}), ("mtp", False, {}), ("eagle", True, {}), ("mtp", True, {}),
          ("medusa", True, {"draft_top_k": 1}), ("eagle3", False, TREE), ("draft_model", True, {}),
          ("draft_model", False, {})]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "is_deterministic", "drafts"),
    [
        each if each[:2] in (("eagle3", True), ("medusa", False)) else pytest.param(*each, marks=pytest.mark.slow)
        for each in DRAFTS
    ],
)
def test_what_drafts_with_weights_drafts_on_ranks_what_it_drafts_on_the_cpu(
    qwen, tmp_path, threads, method, is_deterministic, drafts
):
    folder = qwen if method == "draft_model" else HEADS[method](tmp_path / method)
    params = [replace(GREEDY, max_tokens=4), replace(CUT, max_tokens=4)]
    on_cpu, wanted = drafting(qwen, folder, method, "cpu", drafts)
    expected = said(on_cpu.generate(PROMPTS[::2], params, use_tqdm=False))
    there = on_cpu.llm_engine.stats
    on_cpu.close()
    options = {"tensor_parallel_size": 2, "deterministic": is_deterministic}
    ranks, noted = drafting(qwen, folder, method, "interpreter", drafts, **options)
    assert said(ranks.generate(PROMPTS[::2], params, use_tqdm=False)) == expected
    assert noted == wanted
    stats = ranks.llm_engine.stats
    assert stats.num_draft_tokens == there.num_draft_tokens > 0
    assert stats.num_accepted_tokens == there.num_accepted_tokens
    ranks.close()


def test_more_ranks_than_heads_are_refused(qwen):
    with pytest.raises(ConfigError, match="at most 4 for a model of 4 attention heads, got 8"):
        engine(qwen, 8)


@pytest.mark.slow
def test_tokens_are_the_same_when_all_ranks_have_slept(qwen, threads):
    llm = engine(qwen, 2)
    executor, expected = executor_of(llm), tokens_of(llm, PROMPTS[:1], greedy(2))
    llm.sleep(1)
    assert executor.sleeping.weights.num_bytes > 0
    llm.wake_up()
    assert tokens_of(llm, PROMPTS[:1], greedy(2)) == expected
    llm.close()
