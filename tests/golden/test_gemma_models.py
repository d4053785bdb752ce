"""Gemma 3n and 4 against transformers: logits, and greedy tokens however a sequence is computed."""

from __future__ import annotations

import json
import logging
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base.errors import ConfigError, ModelFormatError, UnsupportedError
from quire.contracts.config import EngineConfig
from quire.contracts.kv_spec import KvSpec
from quire.kernels.native import load_native
from quire.model.build import load_model, whole_prompt_logits
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.device_refusal import device_refusal
from quire.model.native_decoder import NativeDecoder
from quire.model.native_model import native_refusal
from quire.worker.inspect import inspect_model
from tests.golden.engines import cpu_engine, generate_tokens
from tests.golden.gemma_cases import CASES, WRAPPED
from tests.golden.greedy import greedy_choices
from tests.golden.make_checkpoints import reference_model

pytestmark = pytest.mark.golden

VOCAB_SIZE, NUM_TOKENS = 131, 64
TOLERANCE, NATIVE_TOLERANCE = 3e-5, 5e-5
NATIVE_CASES = (*CASES, "gemma4-wrapped")
_DEFAULT_CASES = ("gemma4", "gemma4-moe", "gemma3n")
GENERATED_CASES = [
    pytest.param(kernels, case, marks=[] if case in _DEFAULT_CASES else pytest.mark.slow, id=f"{kernels}-{case}")
    for kernels in ("torch", "native")
    for case in ("gemma4", "gemma4-dense", "gemma4-moe", "gemma4-moe-shared", "gemma3n", "gemma3n-plain")
]
# More than a KV block and the window (11), less than a block, and just one token.
PROMPTS = [torch.randint(3, VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (37, 1, 16, 50)]
_NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False, "prompt_lookup_min": 1}
OPTIONS = {
    "batched": {},
    "alone": {"max_num_seqs": 1},
    "chunks of 1": {"long_prefill_token_threshold": 1},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "preempted": {"num_kv_blocks": 14},
    "preempted without a cache": {"num_kv_blocks": 14, "enable_prefix_caching": False},
    "drafts": {"speculative_config": _NGRAM},
}


@pytest.mark.covering
@pytest.mark.parametrize("style", ["v5", "v4"])
@pytest.mark.parametrize("case", [*CASES, *WRAPPED])
def test_f32_logits_are_those_of_transformers(checkpoint, case, style):
    folder = checkpoint(case, style)
    prompt = torch.randint(0, VOCAB_SIZE, (70,), generator=torch.Generator().manual_seed(70)).tolist()
    with torch.inference_mode():
        want = reference_model(checkpoint(case))(torch.tensor([prompt])).logits[0]
    found = whole_prompt_logits(load_model(folder), prompt)
    assert (found - want).abs().max() <= TOLERANCE


@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
@pytest.mark.parametrize("case", NATIVE_CASES)
def test_native_logits_are_those_of_transformers(checkpoint, case):
    folder = checkpoint(case)
    spec = read_model_spec(folder)
    assert native_refusal(spec, 16) is None
    with torch.inference_mode():
        want = reference_model(folder)(torch.tensor([PROMPTS[3]])).logits[0]
    found = whole_prompt_logits(NativeDecoder(load_native(), spec, open_parameters(folder, spec), 128), PROMPTS[3])
    assert (found - want).abs().max() <= NATIVE_TOLERANCE


@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
@pytest.mark.parametrize("case", NATIVE_CASES)
def test_native_bfloat16_is_near_that_of_torch(checkpoint, case):
    folder = checkpoint(case)
    spec = read_model_spec(folder, "bfloat16")
    found = whole_prompt_logits(NativeDecoder(load_native(), spec, open_parameters(folder, spec), 128), PROMPTS[3])
    exact = whole_prompt_logits(load_model(folder), PROMPTS[3])
    near = whole_prompt_logits(load_model(folder, "bfloat16"), PROMPTS[3])
    assert (found - exact).abs().mean() <= 1.2 * (near - exact).abs().mean()


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_is_rounded_in_the_same_places(checkpoint, case):
    folder = checkpoint(case)
    with torch.inference_mode():
        want = reference_model(folder, torch.bfloat16)(torch.tensor([PROMPTS[0]])).logits[0]
    assert torch.equal(whole_prompt_logits(load_model(folder, "bfloat16"), PROMPTS[0]), want)


@pytest.mark.parametrize("case", [*CASES, *WRAPPED])
def test_both_config_styles_give_one_spec(checkpoint, case):
    assert read_model_spec(checkpoint(case, "v5")) == read_model_spec(checkpoint(case, "v4"))


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_gemma3n_in_its_wrapper_is_its_text(checkpoint, tmp_path, caplog, prefix):
    source = checkpoint("gemma3n")
    text = json.loads((source / "config.json").read_text())
    config = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float32", "vision_config": {}, "audio_config": {}}))
    tensors = {prefix + name.removeprefix("model."): x for name, x in load_file(source / "model.safetensors").items()}
    others = (
        "model.vision_tower.timm_model.conv.weight",
        "model.audio_tower.conformer.0.weight",
        "model.embed_audio.norm.weight",
    )
    save_file(
        {**tensors, **{name: torch.zeros(3) for name in (*others, "model.embed_vision.embedding.weight")}},
        tmp_path / "model.safetensors",
    )
    with caplog.at_level(logging.INFO, logger="quire"):
        found = whole_prompt_logits(load_model(tmp_path), PROMPTS[0])
    assert torch.equal(found, whole_prompt_logits(load_model(source), PROMPTS[0]))
    assert any("4 tensors of images are skipped" in record.message for record in caplog.records)


@pytest.fixture
def kernels(request, monkeypatch):
    """Let engines run native kernels where they cover a model, or torch only."""
    load_native.cache_clear()
    monkeypatch.setenv("QUIRE_NATIVE", "1" if request.param == "native" else "0")
    yield request.param
    monkeypatch.undo()
    load_native.cache_clear()


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Return a function: case -> the greedy output of each prompt, each of whose tokens transformers chooses too."""
    found = {}

    def find(case):
        if case not in found:
            llm = cpu_engine(checkpoint(case))
            found[case] = [choices[0] for choices in generate_tokens(llm, PROMPTS, NUM_TOKENS)]
            llm.close()
            model = reference_model(checkpoint(case))
            for prompt, output in zip(PROMPTS, found[case], strict=True):
                assert greedy_choices(model, prompt, output, allows_end=False) == output
        return found[case]

    return find


@pytest.mark.covering
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize(("kernels", "case"), GENERATED_CASES, indirect=["kernels"])
def test_greedy_tokens_are_the_same_however_they_are_computed(checkpoint, expected, case, how):
    llm = cpu_engine(checkpoint(case), **OPTIONS[how])
    assert [choices[0] for choices in generate_tokens(llm, PROMPTS, NUM_TOKENS)] == expected(case)
    scheduler = llm.llm_engine.scheduler
    assert (scheduler.num_preemptions > 0) == ("preempted" in how)
    if "drafts" in how:
        assert llm.llm_engine.stats.num_accepted_tokens > 0
    llm.close()


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("kernels", "case"), GENERATED_CASES, indirect=["kernels"])
def test_cached_prefixes_and_forks_give_the_same_tokens(checkpoint, expected, case):
    llm, outputs = cpu_engine(checkpoint(case)), expected(case)
    generate_tokens(llm, PROMPTS, NUM_TOKENS)
    scheduler = llm.llm_engine.scheduler
    num_hits = scheduler.prefix_cache_hits
    assert [choices[0] for choices in generate_tokens(llm, PROMPTS, NUM_TOKENS)] == outputs
    assert scheduler.prefix_cache_hits - num_hits == 32 + 48  # whole blocks before the last token
    llm.close()
    fresh = cpu_engine(checkpoint(case), enable_prefix_caching=False)
    forks = generate_tokens(fresh, PROMPTS, 20, n=3, temperature=1.0, top_k=1)
    assert forks == [[output[:20]] * 3 for output in outputs]
    fresh.close()


@pytest.mark.parametrize("case", ["gemma4", "gemma3n"])
def test_layers_that_read_the_keys_of_others_have_no_cache(checkpoint, case):
    spec = read_model_spec(checkpoint(case))
    assert [layer.attention.kv_source for layer in spec.layers] == [None, None, None, None, 3, 2]
    kv = KvSpec.of(spec, 16, "float32")
    assert kv.layer_shapes[4:] == ((0, 0), (0, 0))
    sizes = [12, 12, 24, 12] if case == "gemma4" else [16] * 4
    assert kv.bytes_per_token == sum(2 * 2 * size * 4 for size in sizes)
    assert inspect_model(engine_config(checkpoint(case))).memory.kv.bytes_per_token == kv.bytes_per_token


def test_what_is_stored_for_layers_that_need_no_keys_is_left(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("gemma4"), tmp_path / "model")
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    spare = {name.replace("layers.3.", "layers.4."): x.clone() for name, x in tensors.items() if ".3.self_attn.k_" in name}
    assert len(spare) == 2
    file.unlink()
    save_file({**tensors, **spare}, file)
    found = whole_prompt_logits(load_model(folder), PROMPTS[0])
    assert torch.equal(found, whole_prompt_logits(load_model(checkpoint("gemma4")), PROMPTS[0]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", ["gemma4", "gemma4-dense", "gemma4-moe", "gemma3n"])
def test_missing_tensor_is_named(checkpoint, tmp_path, case):
    folder = shutil.copytree(checkpoint(case), tmp_path / case)
    file = folder / "model.safetensors"
    whole = {name: tensor.clone() for name, tensor in load_file(file).items()}
    names = {re.sub(r"\d+", "N", name): name for name in whole}  # one of each kind
    for name in names.values():
        file.unlink()
        save_file({other: tensor for other, tensor in whole.items() if other != name}, file)
        with pytest.raises(ModelFormatError, match="missing") as caught:
            open_parameters(folder, read_model_spec(folder))
        assert name.removeprefix("model.") in str(caught.value)


@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
@pytest.mark.parametrize(
    ("case", "options", "named"),
    [
        ("gemma4", {"tensor_parallel_size": 2}, "tensor_parallel_size is 2.*run on one rank"),
        ("gemma4", {"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2.*run on one stage"),
        ("gemma3n", {"tensor_parallel_size": 2}, "tensor_parallel_size is 2.*run on one rank"),
        ("gemma3n", {"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2.*run on one stage"),
    ],
)
def test_what_does_not_run_on_several_ranks_is_refused_by_name(checkpoint, case, options, named):
    with pytest.raises(ConfigError, match=named):
        inspect_model(engine_config(checkpoint(case), **options))


@pytest.mark.parametrize(
    ("case", "native", "device"),
    [
        ("gemma4", None, None),
        ("gemma4-dense", None, None),
        ("gemma4-moe", None, None),
        ("gemma3n", None, None),
    ],
)
def test_gpu_and_native_kernels_say_what_they_do_not_run(checkpoint, case, native, device):
    spec = read_model_spec(checkpoint(case))
    assert native_refusal(spec, 16) == native
    assert device_refusal(spec) == device


@pytest.mark.parametrize(
    ("case", "changes", "error", "named"),
    [
        ("gemma4", {"num_kv_shared_layers": 6}, ModelFormatError, "num_kv_shared_layers must be such that"),
        ("gemma4", {"num_kv_shared_layers": 4}, ModelFormatError, "num_kv_shared_layers must be such that"),
        ("gemma4", {"num_kv_shared_layers": 7}, ModelFormatError, "num_kv_shared_layers must be such that"),
        ("gemma4", {"use_bidirectional_attention": "all"}, UnsupportedError, "use_bidirectional_attention 'all'"),
        ("gemma4", {"per_layer_config": {"9": {}}}, ModelFormatError, "per_layer_config must be"),
        ("gemma4", {"per_layer_config": {"1": {"sliding_window": 3}}}, UnsupportedError, "per_layer_config.1.*sliding_window"),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": "x"}}}, ModelFormatError, "per_layer_config.1 must be"),
        ("gemma4", {"per_layer_config": {"1": {"num_key_value_heads": 3}}}, ModelFormatError, "num_attention_heads must be"),
        ("gemma4-moe", {"top_k_experts": 7}, ModelFormatError, "top_k_experts must be"),
        ("gemma4-moe", {"num_experts": None}, ModelFormatError, "num_experts must be"),
        ("gemma3n", {"altup_active_idx": 3}, ModelFormatError, "altup_active_idx must be"),
        ("gemma3n", {"activation_sparsity_pattern": [0.5]}, ModelFormatError, "activation_sparsity_pattern must be"),
        ("gemma3n", {"activation_sparsity_pattern": [1.0] * 6}, ModelFormatError, "activation_sparsity_pattern must be"),
        ("gemma3n", {"intermediate_size": [80, 80]}, ModelFormatError, "intermediate_size must be"),
        ("gemma3n", {"hidden_size_per_layer_input": 0}, ModelFormatError, "hidden_size_per_layer_input must be"),
    ],
)
def test_bad_configs_are_refused_by_name(checkpoint, tmp_path, case, changes, error, named):
    config = {**json.loads((checkpoint(case) / "config.json").read_text()), **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=named):
        read_model_spec(tmp_path)


def test_attention_in_both_directions_of_images_only_is_none_of_text(checkpoint, tmp_path):
    spec = read_model_spec(checkpoint("gemma4"))
    config = json.loads((checkpoint("gemma4") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "use_bidirectional_attention": "vision"}))
    assert read_model_spec(tmp_path) == spec


def engine_config(folder, **options):
    return EngineConfig(model=str(folder), skip_tokenizer_init=True, device="cpu", **options)
