"""The method bounds of kv_compression: runs of keys are not read, and the output depends on nothing else."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.contracts.model_spec import AttentionSpec
from quire.kernels.native import load_native
from quire.kernels.reference.run_skips import RunSkips
from tests.tiny_checkpoint import write_checkpoint

# Runs of equal tokens, whose keys differ by the rope only.
PROMPTS = [[token for token in tokens for _ in range(48)] for tokens in ((5, 9, 100, 201, 33, 77, 140), (9, 5, 61, 12, 250))]
EXACT, LOSSY = {"method": "bounds"}, {"method": "bounds", "gap": 0.1}
OPTIONS = {"native": {"block_size": 16}, "torch": {"block_size": 4, "num_kv_blocks": 400}}
if load_native() is None:
    del OPTIONS["native"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose first layer has scores so large that runs can be skipped without a change of bits."""
    path = write_checkpoint(tmp_path_factory.mktemp("bounds") / "qwen3", "qwen3", max_position_embeddings=512)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_norm.weight"] *= 600
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def start(folder, kind, **options):
    options = {"max_num_seqs": 4, "num_kv_blocks": 100, "dtype": "float32", "num_threads": 1, **OPTIONS[kind], **options}
    return LLM(str(folder), skip_tokenizer_init=True, device="cpu", **options)


def params_of(fields, **options):
    options = {"max_tokens": 16, "logprobs": 0, "temperature": 0.0, **options}
    return SamplingParams(ignore_eos=True, detokenize=False, kv_compression=fields, **options)


def generate(llm, fields, prompts=PROMPTS, **options):
    """Return the tokens of each prompt, with their log probabilities where these do not depend on the batch (torch), and how
    many runs were looked at and skipped."""
    before, is_native = llm.llm_engine.scheduler.run_counts, llm.llm_engine.scheduler.config.block_size == 16
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params_of(fields, **options), use_tqdm=False)
    found = [
        [(key, one.logprob * is_native) for step in out.logprobs for key, one in step.items()]
        for all in outputs
        for out in all.outputs
    ]
    return found, [new - old for new, old in zip(llm.llm_engine.scheduler.run_counts, before, strict=True)]


@pytest.fixture(scope="module", params=OPTIONS)
def llm(folder, request):
    llm = start(folder, request.param)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def lossy(llm):
    return [generate(llm, LOSSY, [prompt])[0][0] for prompt in PROMPTS]


def test_runs_are_skipped_without_a_change_of_bits(llm):
    plain, counts = generate(llm, None)
    assert counts == [0, 0]
    found, (looked, skipped) = generate(llm, EXACT)
    assert found == plain
    assert 0 < skipped < looked / 2
    several = {"temperature": 1.0, "seed": 7, "n": 2}
    assert generate(llm, EXACT, PROMPTS[:1], **several)[0] == generate(llm, None, PROMPTS[:1], **several)[0]


def test_a_small_gap_changes_the_output_and_nothing_of_it_is_cached(llm, lossy):
    plain = generate(llm, None)[0]
    assert all(one != other for one, other in zip(lossy, plain, strict=True))
    assert generate(llm, LOSSY)[0] == lossy  # batched, and with cached prompts
    longer = [[*prompt, *(token for token, _ in tokens)] for prompt, tokens in zip(PROMPTS, lossy, strict=True)]
    after = generate(llm, None, longer)[0]
    llm.llm_engine.scheduler.reset_cache()
    assert generate(llm, None, longer)[0] == after


def test_tokens_are_the_same_after_preemptions(llm, lossy):
    engine, found = llm.llm_engine, {}
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(f"bounds {index}", {"prompt_token_ids": prompt}, params_of(LOSSY))
    for step in range(1000):
        if not engine.has_unfinished_requests():
            break
        found.update({output.request_id: output.outputs[0].token_ids for output in engine.step()})
        if step in (9, 17):
            engine.scheduler.preempt(engine.scheduler.running.last, "kv_blocks")
    assert [list(found[f"bounds {index}"]) for index in (0, 1)] == [[token for token, _ in one] for one in lossy]


@pytest.mark.skipif(len(OPTIONS) < 2, reason="the native kernels are not built")
def test_native_kernels_skip_the_runs_of_the_reference(folder, monkeypatch):
    counts = []
    for kind in OPTIONS:
        monkeypatch.setenv("QUIRE_NATIVE", str(int(kind == "native")))
        llm = start(folder, kind)
        counts += [generate(llm, fields, [prompt])[1] for prompt in PROMPTS for fields in (EXACT, LOSSY)]
        llm.close()
    assert counts[:4] == counts[4:]


@pytest.mark.parametrize(
    "setting",
    [
        {"long_prefill_token_threshold": 37, "enable_prefix_caching": False},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"num_threads": 2, "max_num_batched_tokens": 16}, marks=pytest.mark.slow),
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_tokens_do_not_depend_on_the_step(folder, llm, lossy, setting):
    if llm.llm_engine.scheduler.config.block_size == 4 and "long_prefill_token_threshold" not in setting:
        pytest.skip("one setting is enough where torch runs the model")
    other = start(folder, "torch" if llm.llm_engine.scheduler.config.block_size == 4 else "native", **setting)
    assert generate(other, LOSSY)[0] == lossy
    assert generate(other, EXACT)[0] == generate(llm, None)[0]
    assert ("speculative_config" in setting) == (other.llm_engine.stats.num_draft_tokens > 0)
    other.close()


def test_bounds_are_never_below_the_scores_nor_floors_above_the_highest_one():
    torch.manual_seed(3)
    for softcap, spread in ((None, 0.3), (20.0, 0.1), (None, 2.0)):
        spec = AttentionSpec(4, 2, 8, 1.5, softcap=softcap)
        centres = torch.randn(2, 1, 20, 1, 8) * 4
        q, k = torch.randn(2, 2, 3, 8) * 3, (centres + spread * torch.randn(2, 1, 20, 16, 8)).flatten(2, 3)
        scores = q @ k.transpose(-1, -2) * spec.scale
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        ends = torch.tensor([250, 300, 320])
        scores = scores.masked_fill(torch.arange(320) >= ends[:, None], -torch.inf)
        skips = RunSkips(torch.tensor([2.0, 9.0, torch.inf]))
        hidden = skips.hide(scores, q, k, torch.arange(3), ends, spec) == -torch.inf
        hidden &= scores > -torch.inf
        assert not (hidden & (scores >= scores.amax(-1, keepdim=True) - skips.gaps[:, None])).any()
        assert not hidden[..., :16].any()
        assert not (hidden & (torch.arange(320) >= ends[:, None] - 64)).any()
        assert hidden[..., 0, :].any()
        assert not hidden[..., 2, :].any()
