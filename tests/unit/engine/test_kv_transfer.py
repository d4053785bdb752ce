"""A decode engine whose prompts are computed by a prefill engine gives the tokens of one engine, whatever fails."""

import shutil
from dataclasses import replace

import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig
from quire.engine import remote_prefill
from quire.kernels.native import load_native
from quire.transfer import connection, page_client, page_server
from quire.worker import parallel_launch, pipeline_build
from quire.worker.inspect import inspect_model
from quire.worker.tiers import tier_fingerprint, transfer_fingerprint
from tests.no_threads import no_threads
from tests.prefill_thread import PrefillThread
from tests.ranks import wait_until
from tests.thread_workers import ThreadWorkers
from tests.unit.engine.test_kv_tiers import DRAFTS, OTHERS, PREFIX, make_llm, run

needs_native = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")

SIZES = {"num_threads": 1, "max_num_seqs": 4, "num_kv_blocks": 24, "max_model_len": 256}
PAGE_BYTES = 65536
PROMPTS = [PREFIX, *OTHERS[:2], PREFIX + OTHERS[0][:90]]


def prefill_engine(address="tcp://127.0.0.1:0", **options):
    return PrefillThread(**{"model": "demo", "prefill_listen": address, **SIZES, **options})


def decode_llm(*peers, **options):
    return make_llm(**{"role": "decode", "prefill_urls": peers, "prefill_min_tokens": 32, **options})


def outcomes(llm):
    return outcomes_of(llm.llm_engine)


def outcomes_of(engine):
    return engine.stats.tiers[-1].outcomes


def check_nothing_is_held(engine):
    """A thread may be about to let something go."""
    tier, pool = engine.scheduler.kv.host_tier, engine.scheduler.kv.pool
    assert wait_until(lambda: tier.num_pinned == 0 and pool.num_free == pool.num_blocks)
    assert tier.find_problem() is None


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """This machine may be busy, so that the peer is slow: it is preferred and waited for all the same."""
    monkeypatch.setattr(remote_prefill, "_MAX_SLOWDOWN", 1e9)
    monkeypatch.setattr(remote_prefill, "_MIN_WAIT_S", 60.0)
    monkeypatch.setattr(remote_prefill, "_UNKNOWN_WAIT_S", 60.0)


@pytest.mark.one_in(2)
@needs_native
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "turboquant_4bit"},
        {"kv_cache_dtype": "k8v4", "kv_cache_dtype_skip_layers": (0, -1)},
        {"dtype": "float32"},
        {"quantization": "int8"},
    ],
    ids=["bf16", "int8-kv", "fp8-kv", "4-bit-kv", "k8v4-kv", "f32", "int8-weights"],
)
def test_tokens_are_those_of_one_engine(tmp_path, options):
    with make_llm(enable_prefix_caching=False, **options) as cold:
        expected, _ = run(cold, PROMPTS)
    with prefill_engine(f"unix:{tmp_path}/pages", **options) as peer, decode_llm(peer.address, **options) as llm:
        found, cached = run(llm, PROMPTS)
        stats = llm.llm_engine.stats.tiers[-1]
        assert wait_until(lambda: peer.engine.prefill.tier_stats().num_pages == 0)
        check_nothing_is_held(peer.engine)
        check_nothing_is_held(llm.llm_engine)
    assert found == expected
    assert min(cached) >= 64
    assert stats.outcomes["complete"] >= 3
    assert stats.num_hits == stats.num_loaded > 12


RANKS, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("prefill", "decode", "transport"),
    [
        pytest.param(RANKS, RANKS, "unix", marks=pytest.mark.slow),
        (RANKS, {}, "tcp"),
        pytest.param({}, {"tensor_parallel_size": 3}, "tcp", marks=pytest.mark.slow),
        (STAGES, STAGES, "unix"),
        pytest.param({**RANKS, **STAGES}, {"pipeline_parallel_size": 3}, "tcp", marks=pytest.mark.slow),
        pytest.param(STAGES, {**RANKS, **STAGES}, "unix", marks=pytest.mark.slow),
    ],
    ids=["ranks-ranks", "ranks-one", "one-ranks", "stages-stages", "both-stages", "stages-both"],
)
@needs_native
def test_ranks_and_stages_of_either_side_give_the_tokens_of_one_engine(cold, monkeypatch, tmp_path, prefill, decode, transport):
    """Prompts that come one by one, and then others at once, so that stages have several steps in flight."""
    for module in (parallel_launch, pipeline_build):
        monkeypatch.setattr(module, "spawn_workers", ThreadWorkers)
    expected, _ = run(cold, PROMPTS[:2])
    prompts, params = (
        [OTHERS[2], OTHERS[3], PREFIX[50:]],
        SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True),
    )
    at_once = [cold.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    options = {"kv_host_bytes": 64 << 20, "max_num_batched_tokens": 64}
    address = f"unix:{tmp_path}/pages" if transport == "unix" else "tcp://127.0.0.1:0"
    with prefill_engine(address, **prefill, **options) as peer, decode_llm(peer.address, **decode, **options) as llm:
        found, cached = run(llm, PROMPTS[:2])
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert wait_until(lambda: peer.engine.prefill.tier_stats().num_pages == 0)
        check_nothing_is_held(peer.engine)
        check_nothing_is_held(llm.llm_engine)
        assert outcomes(llm)["complete"] == 5
    assert found == expected
    assert [output.outputs[0].token_ids for output in outputs] == at_once
    assert min([*cached, *(output.metrics.num_cached_tokens for output in outputs)]) >= 64


@needs_native
def test_tokens_are_those_of_one_engine_by_nixl(monkeypatch):
    pytest.importorskip("nixl", reason="the package nixl is not installed")
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    with make_llm(enable_prefix_caching=False) as cold:
        expected, _ = run(cold, PROMPTS)
    nixl = {"kv_transfer_backend": "nixl"}
    with prefill_engine(**nixl) as peer, decode_llm(peer.address, **nixl) as llm:
        found, cached = run(llm, PROMPTS)
        assert wait_until(lambda: peer.engine.prefill.tier_stats().num_pages == 0)
        check_nothing_is_held(llm.llm_engine)
        assert outcomes(llm)["complete"] >= 3
    assert found == expected
    assert min(cached) >= 64


@needs_native
def test_role_of_a_running_engine_decides_who_computes_the_prompt_and_tokens_are_those_of_one_engine(tmp_path, cold):
    listen = {"prefill_listen": f"unix:{tmp_path}/b"}
    with prefill_engine(f"unix:{tmp_path}/a", role="both") as peer, decode_llm(peer.address, **listen) as llm:
        ours, theirs = llm.llm_engine.transfer, peer.engine.transfer
        counts = ({"busy": 1}, {"busy": 1, "complete": 1}, {"busy": 1, "complete": 1}, {"busy": 1, "complete": 2})
        roles = (("both", "decode"), ("prefill", "decode"), ("prefill", "both"), ("prefill", "decode"))
        prompts = [f"{number} {prompt}" for number, prompt in enumerate(PROMPTS)]
        for prompt, (their_role, our_role), count in zip(prompts, roles, counts, strict=True):
            theirs.set_role(their_role)
            ours.set_role(our_role)
            assert run(llm, [prompt])[0] == run(cold, [prompt])[0]
            assert outcomes(llm) == count
        ours.set_role("prefill")
        with decode_llm(str(ours.prefill.server.address)) as other, pytest.raises(ConfigError, match="with prefill_listen"):
            other.llm_engine.transfer.set_role("prefill")
        assert wait_until(lambda: peer.engine.prefill.tier_stats().num_pages == 0)
        check_nothing_is_held(peer.engine)
        check_nothing_is_held(llm.llm_engine)


@pytest.fixture(scope="module")
def peer():
    with prefill_engine() as found:
        yield found


@pytest.fixture(scope="module")
def cold():
    with make_llm(enable_prefix_caching=False) as found:
        yield found


@pytest.fixture
def decode(peer):
    """A decode engine, which has no page yet."""
    with decode_llm(peer.address) as llm:
        yield llm
        check_nothing_is_held(llm.llm_engine)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
MODES = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 0.9, "seed": 7},
    "several": {"n": 3, "temperature": 0.9},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {100: 2.0}},
    "logprobs": {"logprobs": 5},
    "constrained": {"structured_outputs": StructuredOutputsParams(regex="(yes|no) [0-9]{3,9}")},
    "json": {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
}


@pytest.mark.one_in(2)
@needs_native
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_tokens_of_one_engine(cold, decode, mode):
    expected, _ = run(cold, PROMPTS[:2], **MODES[mode])
    found, cached = run(decode, PROMPTS[:2], **MODES[mode])
    assert found == expected
    assert min(cached) >= 64
    assert outcomes(decode) == {"complete": 2}


@pytest.mark.one_in(3)
@needs_native
@pytest.mark.parametrize("drafts", DRAFTS, ids=lambda drafts: drafts["method"])
def test_drafts_follow_a_prompt_that_was_computed_elsewhere(cold, peer, drafts):
    greedy = {"temperature": 0.0, "logprobs": None, "max_tokens": 16}
    expected, _ = run(cold, PROMPTS, **greedy)
    with decode_llm(peer.address, speculative_config=drafts) as llm:
        found, cached = run(llm, PROMPTS, **greedy)
        assert llm.llm_engine.stats.num_draft_tokens > 0
    assert found == expected
    assert min(cached) >= 64


@needs_native
def test_prompts_at_once_with_a_small_pool_and_preemptions(cold, peer):
    prompts = [PREFIX[:240], OTHERS[0][:240], OTHERS[1][:240], OTHERS[2][:240]]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)
    expected = [cold.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    with decode_llm(peer.address) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        assert outcomes(llm)["complete"] == 4
        check_nothing_is_held(llm.llm_engine)
    assert found == expected


@needs_native
def test_pages_are_pulled_while_the_prompt_is_computed(monkeypatch, cold):
    lent = []
    add_ready = page_server.PrefillJob.add_ready
    monkeypatch.setattr(
        page_server.PrefillJob, "add_ready", lambda job, pages: lent.append(len(pages)) or add_ready(job, pages)
    )
    with prefill_engine(max_num_batched_tokens=16, max_num_seqs=1) as peer, decode_llm(peer.address) as llm:
        assert run(llm, [PREFIX])[0] == run(cold, [PREFIX])[0]
    assert lent == [1] * len(lent)
    assert len(lent) >= 5


@needs_native
def test_short_prompts_and_those_with_prompt_logprobs_are_computed_here(cold, decode):
    for prompt, params in ((PREFIX[:60], {}), (PREFIX, {"prompt_logprobs": 1})):
        assert run(decode, [prompt], **params) == (run(cold, [prompt], **params)[0], [0])
    assert outcomes(decode) == {"short": 2}


@needs_native
def test_salts_keep_the_prompts_of_a_prefill_engine_apart(peer, decode):
    prompt = "A text that only this test has. " + PREFIX
    before = peer.engine.scheduler.prefix_cache_hits
    engine = decode.llm_engine
    for number, salt in enumerate(("one", "two", "one")):
        request = replace(engine.make_request(f"r{number}", prompt, SamplingParams(max_tokens=1)), cache_salt=salt)
        engine.submit(request)
        while engine.has_unfinished_requests():
            engine.step()
    assert peer.engine.scheduler.prefix_cache_hits == before
    assert outcomes(decode) == {"complete": 2, "short": 1}


@needs_native
def test_prompts_are_computed_here_while_the_peer_is_busy(cold):
    with prefill_engine(kv_host_bytes=4 * PAGE_BYTES) as peer, decode_llm(peer.address) as llm:
        assert peer.engine.prefill.max_lent_pages == 1
        assert run(llm, [PREFIX]) == (run(cold, [PREFIX])[0], [0])
        assert outcomes(llm) == {"refused": 1}


DIFFERENCES = {
    "kv-format": ({"kv_cache_dtype": "int8"}, "kv_cache_dtype: bfloat16 on the decode engine, int8 on the prefill engine"),
    "dtype": ({"dtype": "float32"}, "dtype: bfloat16 on the decode engine, float32 on the prefill engine"),
    "weights": ({"quantization": "int8"}, "quantization: None on the decode engine, int8 on the prefill engine"),
    "block-size": ({"block_size": 32, "num_kv_blocks": 12}, "block_size: 16 on the decode engine, 32 on the prefill engine"),
    "length": ({"max_model_len": 128}, "max_model_len: 256 on the decode engine, 128 on the prefill engine"),
    "model": ({"model": "demo-draft"}, "layers"),
}


@pytest.mark.one_in(3)
@needs_native
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_prompts_are_computed_here_if_the_peer_differs_and_both_values_are_named(monkeypatch, cold, difference):
    options, text = DIFFERENCES[difference]
    warnings = []
    for logger in (page_client.logger, page_server.logger):
        monkeypatch.setattr(logger, "warning", lambda message, *values: warnings.append(message % values))
    with prefill_engine(**options) as peer, decode_llm(peer.address) as llm:
        assert run(llm, PROMPTS[:3]) == (run(cold, PROMPTS[:3])[0], [0, 0, 0])
        assert outcomes(llm) == {"mismatch": 1, "no_peer": 2}
        problems = llm.llm_engine.stats.tiers[-1].problems
        assert text in problems[peer.address]
        assert problems[peer.address].startswith("mismatch: the engines differ in ")
        assert outcomes_of(peer.engine) == {"mismatch": 1}
    assert len(warnings) == 2  # one of each engine
    assert all(text in warning for warning in warnings)


@needs_native
def test_prompts_are_computed_here_if_the_peer_is_slower(monkeypatch, cold, decode):
    monkeypatch.setattr(remote_prefill, "_MAX_SLOWDOWN", 1.5)
    run(decode, PROMPTS[:1])
    remote = decode.llm_engine.remote_prefill
    remote.client.peers[0].load.s_per_page, remote.tokens_per_s = 1.0, 1e9
    assert run(decode, PROMPTS[1:2]) == (run(cold, PROMPTS[1:2])[0], [0])
    assert outcomes(decode) == {"complete": 1, "slower": 1}


@needs_native
def test_late_pages_are_not_waited_for(monkeypatch, cold):
    monkeypatch.setattr(remote_prefill, "_UNKNOWN_WAIT_S", 0.3)
    with prefill_engine() as peer, decode_llm(peer.address) as llm:
        peer.is_paused.set()
        assert run(llm, [PREFIX]) == (run(cold, [PREFIX])[0], [0])
        assert llm.llm_engine.stats.tiers[-1].num_late == 1
        peer.is_paused.clear()
        assert wait_until(lambda: outcomes_of(peer.engine) and not peer.engine.prefill.num_lendings)
        check_nothing_is_held(peer.engine)


@needs_native
def test_aborted_requests_leave_nothing_behind_and_others_get_their_tokens(cold):
    """Slots that were to take the pages of an aborted request take those of others: there are too few for all."""
    prompts = {f"r{number}": f"{number} {PREFIX}" for number in range(12)}
    params = SamplingParams(temperature=0.0, max_tokens=4)
    kept = list(prompts)[::4]
    expected = {name: cold.generate(prompts[name], params, use_tqdm=False)[0].outputs[0].token_ids for name in kept}
    with (
        prefill_engine(max_num_batched_tokens=16, max_num_seqs=1) as peer,
        decode_llm(peer.address, kv_host_bytes=10 * PAGE_BYTES) as llm,
    ):
        engine, found = llm.llm_engine, []
        for number, name in enumerate(prompts):
            engine.add_request(name, prompts[name], params)
            for _ in range(number % 4):
                found += engine.step()
            if name not in kept:
                assert engine.abort_request(name).finished
        while engine.has_unfinished_requests():
            found += engine.step()
        ended = {
            output.request_id: output.outputs[0].token_ids for output in found if output.request_id in kept and output.finished
        }
        assert ended == expected
        assert wait_until(lambda: not engine.remote_prefill.take_ready(0.0) and not engine.remote_prefill.num_under_way)
        check_nothing_is_held(engine)
        assert wait_until(lambda: not peer.engine.prefill.num_lendings and not peer.engine.scheduler.has_unfinished)
        check_nothing_is_held(peer.engine)


@needs_native
def test_prompts_are_computed_here_while_the_host_tier_has_no_room_for_their_pages(cold, peer):
    with decode_llm(peer.address, kv_host_bytes=2 * PAGE_BYTES, prefill_min_tokens=64) as llm:
        assert run(llm, [PREFIX]) == (run(cold, [PREFIX])[0], [0])
        assert outcomes(llm) == {"no_room": 1}


@needs_native
def test_prompts_are_computed_here_while_there_is_no_thread_for_a_transfer(cold, peer):
    with decode_llm(peer.address) as llm:
        with no_threads("kv-page-pull"):
            assert run(llm, [PREFIX]) == (run(cold, [PREFIX])[0], [0])
        assert outcomes(llm) == {"no_peer": 1}
        check_nothing_is_held(llm.llm_engine)


@needs_native
def test_pages_whose_lease_has_ended_are_never_used(cold, monkeypatch, tmp_path):
    """When they are copied from the shared slots of the prefill engine, these hold other bytes."""
    read, checksum = connection.MappedSlots.read, page_server.page_checksum
    with prefill_engine(f"unix:{tmp_path}/pages") as peer, decode_llm(peer.address) as llm:

        def lend_for_a_moment(*arguments):
            peer.engine.prefill.server.lease_s = 0.2
            return checksum(*arguments)

        def read_late(slots, *arguments):
            assert wait_until(lambda: not peer.engine.prefill.num_lendings)
            peer.engine.runner.host_slab.slots()[:] ^= 1
            read(slots, *arguments)

        monkeypatch.setattr(connection.MappedSlots, "read", read_late)
        monkeypatch.setattr(page_server, "page_checksum", lend_for_a_moment)
        assert run(llm, [PREFIX]) == (run(cold, [PREFIX])[0], [0])
        assert outcomes(llm) == {"damaged": 1}
        assert outcomes_of(peer.engine) == {"expired": 1}
        check_nothing_is_held(llm.llm_engine)


@needs_native
def test_failed_step_of_the_prefill_engine_is_no_failure_of_the_request(monkeypatch, cold):
    with prefill_engine(max_num_batched_tokens=32) as peer, decode_llm(peer.address) as llm:
        runner = peer.engine.runner
        execute, calls = runner.execute, []

        def fail_second(plan):
            calls.append(plan)
            if len(calls) == 2:
                raise RuntimeError("the step failed on purpose")
            return execute(plan)

        peer.engine.step_loop.use_runner(type("Runner", (), {"execute": staticmethod(fail_second)}))
        found, cached = run(llm, [PREFIX])
        assert found == run(cold, [PREFIX])[0]
        assert outcomes(llm) == {"partial": 1}
        assert wait_until(lambda: not peer.engine.prefill.num_lendings)
        check_nothing_is_held(peer.engine)
    assert cached[0] < 96


@needs_native
def test_fingerprint_of_a_copied_model_is_the_same(tmp_path):
    config = EngineConfig(model="demo", **SIZES)
    report = inspect_model(config)
    shutil.copytree(report.folder, tmp_path / "copy", copy_function=shutil.copyfile)
    copied = EngineConfig(model=str(tmp_path / "copy"), **SIZES)
    assert transfer_fingerprint(config, report) == transfer_fingerprint(copied, inspect_model(copied))
    weights = next((tmp_path / "copy").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1000] ^= 1
    weights.write_bytes(data)
    assert transfer_fingerprint(config, report) != transfer_fingerprint(copied, inspect_model(copied))


def test_fingerprints_differ_where_experts_are_chosen_in_other_ways():
    exact = EngineConfig(model="demo-moe", num_kv_blocks=8)
    report = inspect_model(exact)
    for fingerprint in (transfer_fingerprint, tier_fingerprint):
        prints = [fingerprint(config, report) for config in (exact, *(replace(exact, expert_min_share=x) for x in (0.1, 0.2)))]
        assert prints[0].keys() != prints[1].keys()
        assert prints[1]["lossy_routing"] != prints[2]["lossy_routing"]


@needs_native
def test_a_request_that_goes_on_has_its_output_computed_elsewhere_too(cold, decode):
    """Its pages go beyond the prompt, and its cached tokens are at most those of the prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    expected = list(cold.generate(PREFIX, params, use_tqdm=False)[0].outputs[0].token_ids)
    engine = decode.llm_engine
    request = replace(engine.make_request("on", PREFIX, params), output_token_ids=tuple(expected[:36]))
    num_prompt = len(request.prompt_token_ids)
    assert (num_prompt + 35) // 16 > num_prompt // 16
    engine.submit(request, "final")
    (output,) = [output for _ in range(1000) if engine.has_unfinished_requests() for output in engine.step()]
    assert list(output.outputs[0].token_ids) == expected
    assert outcomes(decode) == {"complete": 1}
    assert output.metrics.num_cached_tokens == num_prompt


@needs_native
def test_a_prefill_engine_keeps_no_timelines_of_its_jobs(tmp_path):
    with prefill_engine(f"unix:{tmp_path}/pages") as peer, decode_llm(peer.address) as llm:
        peer.engine.records_timelines = True
        run(llm, PROMPTS[:2])
        assert outcomes(llm) == {"complete": 2}
        assert wait_until(lambda: peer.engine.prefill.tier_stats().num_pages == 0)
        assert peer.engine.scheduler.timelines.num_held == 0


@needs_native
def test_fingerprints_differ_where_torch_runs_the_model():
    """The native kernels lay out a page in their own way: one that torch has written is not to be read."""
    native = EngineConfig(model="demo", **SIZES)
    torch = replace(native, block_size=4)
    for fingerprint in (transfer_fingerprint, tier_fingerprint):
        ours, theirs = (fingerprint(config, inspect_model(config)) for config in (native, torch))
        assert "kernels" in {name for name in ours if ours[name] != theirs[name]}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"role": "some"}, "role must be one of"),
        ({"role": "prefill"}, "prefill_listen is missing"),
        ({"prefill_urls": ("unix:/y",)}, "role is 'both', and prefill_urls is .'unix:/y',.*engines with prefill_listen"),
        ({"role": "decode", "prefill_urls": ()}, "prefill_urls must be"),
        (
            {"role": "decode", "prefill_urls": ("http://x",)},
            "prefill_urls must be tcp://HOST:PORT or unix:PATH, got 'http://x'",
        ),
        ({"role": "decode", "prefill_urls": ("tcp://10.0.0.1:7",)}, "need transfer_secret_file"),
        ({"role": "prefill", "prefill_listen": "tcp://0.0.0.0:7"}, "need transfer_secret_file"),
        ({"role": "decode", "prefill_urls": ("unix:/x",), "prefill_min_tokens": 0}, "prefill_min_tokens must be"),
        ({"transfer_secret_file": "/x"}, "transfer_secret_file is '/x': it is for the roles"),
        (
            {"role": "decode", "prefill_urls": ("unix:/x",), "transfer_secret_file": "/no/such"},
            "transfer_secret_file /no/such: No",
        ),
        ({"role": "decode", "prefill_urls": ("unix:/x",), "enable_prefix_caching": False}, "role.*needs enable_prefix_caching"),
        (
            {"role": "prefill", "prefill_listen": "unix:/x", "data_parallel_size": 2},
            "prefill_listen is 'unix:/x' and data_parallel_size 2",
        ),
        ({"role": "prefill", "prefill_listen": "unix:/no/such/folder/x"}, "prefill_listen is unix:.*cannot listen"),
    ],
)
def test_unsupported_options_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        LLM(**{"model": "demo", **SIZES, **options})


def test_secret_of_a_file_is_shared_and_must_be_private(tmp_path):
    path = tmp_path / "secret"
    options = {"transfer_secret_file": str(path)}
    with prefill_engine(**options) as peer, decode_llm(peer.address, **options) as llm:
        assert path.stat().st_mode & 0o777 == 0o600
        run(llm, [PREFIX])
        assert outcomes(llm) == {"complete": 1}
        with decode_llm(peer.address) as other:
            run(other, [PREFIX])
            assert outcomes(other) == {"auth": 1}
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="has mode 644, so others may read it"):
        LLM("demo", **SIZES, **options, role="decode", prefill_urls=("unix:/x",))
