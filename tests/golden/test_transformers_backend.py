"""Models that the transformers library computes over our paged KV cache, against that library by itself."""

from __future__ import annotations

import json
import logging
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, ModelFormatError, RequestError, UnsupportedError
from quire.cli.main import main
from quire.contracts.config import EngineConfig
from quire.contracts.constraint import StructuredOutputsParams
from quire.contracts.kv_spec import KvSpec
from quire.kv.pool import KvPool
from quire.model.build import whole_prompt_logits
from quire.model.families import find_family
from quire.model.transformers_backend.decoder import load_transformers_model
from quire.model.transformers_backend.probe import read_transformers_model
from quire.worker.inspect import inspect_model
from tests.golden.greedy import greedy_choices
from tests.golden.transformers_cases import OTHER_TYPES, OWN_TYPES, VOCAB_SIZE, make_model

pytestmark = pytest.mark.golden

F32_TOLERANCE = 3e-5
# Longer and shorter than a window (11) and a block (16); the last one begins as the third does.
PROMPTS = [torch.randint(3, VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 17, 40)]
PROMPTS.append([*PROMPTS[2][:33], 7, 8])
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
EAGER_DRAFTS = {"adaptive": False, "prompt_lookup_min": 1}
SETTINGS = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "preempted": {"num_kv_blocks": 6, "max_num_seqs": 4, "enable_prefix_caching": False},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, **EAGER_DRAFTS}},
    "draft trees": {"speculative_config": {"method": ["ngram", "lookahead", "suffix"], **EAGER_DRAFTS}},
}


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Return a function: model type -> (folder of a checkpoint, the model in transformers)."""
    root, found = tmp_path_factory.mktemp("transformers"), {}

    def find(model_type):
        if model_type not in found:
            found[model_type] = (root / model_type, make_model(model_type, root / model_type))
        return found[model_type]

    return find


def start(folder, **options):
    return LLM(str(folder), **{"model_impl": "transformers", "skip_tokenizer_init": True, "block_size": 16, **options})


def tokens_of(llm, prompts=PROMPTS, params=GREEDY):
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_greedy(model, outputs, prompts=PROMPTS):
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == NUM_TOKENS
        assert output == greedy_choices(model, prompt, output)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model_type", [*OTHER_TYPES, *OWN_TYPES])
def test_f32_logits_are_those_of_transformers(made, model_type):
    folder, model = made(model_type)
    decoder = load_transformers_model(folder, read_transformers_model(folder))
    with torch.inference_mode():
        want = model(torch.tensor([PROMPTS[2]])).logits[0]
    assert (whole_prompt_logits(decoder, PROMPTS[2]) - want).abs().max() <= F32_TOLERANCE


@pytest.mark.one_in(4)
@pytest.mark.parametrize("model_type", [*OTHER_TYPES, *OWN_TYPES])
def test_greedy_tokens_are_equal_alone_cached_and_in_a_batch(made, model_type):
    folder, model = made(model_type)
    llm = start(folder)
    alone = [tokens_of(llm, [prompt])[0] for prompt in PROMPTS]
    assert_greedy(model, alone)
    assert tokens_of(llm) == alone  # from the prefix cache
    assert tokens_of(start(folder, enable_prefix_caching=False)) == alone


@pytest.mark.covering
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("model_type", ["persimmon", "diffllama", "jetmoe", "vaultgemma", "gpt_oss"])
def test_greedy_tokens_are_equal_in_every_setting(made, model_type, setting):
    folder, model = made(model_type)
    llm = start(folder, **SETTINGS[setting])
    # A text that repeats itself gives drafts.
    prompts = [(prompt[:20] * 8)[:60] for prompt in PROMPTS] if setting.startswith("draft") else PROMPTS
    assert_greedy(model, tokens_of(llm, prompts), prompts)
    if setting == "preempted":
        assert llm.llm_engine.scheduler.num_preemptions > 0
    if setting.startswith("draft"):
        assert llm.llm_engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize("model_type", OWN_TYPES)
def test_both_implementations_give_the_same_tokens(made, model_type):
    folder, _ = made(model_type)
    assert tokens_of(start(folder)) == tokens_of(start(folder, model_impl="quire", device="cpu"))


def test_bfloat16_runs_with_a_cache_in_bfloat16(made):
    folder, _ = made("persimmon")
    llm = start(folder, dtype="bfloat16")
    assert llm.llm_engine.report.memory.kv.dtype == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    decoder = load_transformers_model(folder, read_transformers_model(folder, "bfloat16"))
    with torch.inference_mode():
        want = model(torch.tensor([PROMPTS[2]])).logits[0].float()
    found = whole_prompt_logits(decoder, PROMPTS[2]).float()
    assert (found - want).norm() <= 0.02 * want.norm()
    assert [len(output) for output in tokens_of(llm)] == [NUM_TOKENS] * len(PROMPTS)


def test_log_probabilities_of_the_prompt_are_those_of_the_model(made):
    folder, model = made("bitnet")
    prompt = PROMPTS[1]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    output = start(folder).generate([{"prompt_token_ids": prompt}], params)[0]
    with torch.inference_mode():
        want = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), -1)
    found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
    assert found == pytest.approx([float(want[i, token]) for i, token in enumerate(prompt[1:])], abs=1e-4)


def test_embeddings_are_the_hidden_states_after_the_final_norm(made):
    folder, model = made("bitnet")
    with torch.inference_mode():
        want = model.model(torch.tensor([PROMPTS[1]])).last_hidden_state[0, -1]
    found = torch.tensor(start(folder).embed([{"prompt_token_ids": PROMPTS[1]}])[0].outputs.embedding)
    assert torch.nn.functional.cosine_similarity(found, want, dim=0) > 0.99999


def test_text_and_constraints_work_with_a_tokenizer():
    options = {"device": "cpu", "dtype": "float32"}
    params = [
        SamplingParams(temperature=0, max_tokens=16),
        SamplingParams(temperature=0, max_tokens=16, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}-[0-9]{2}")),
    ]
    texts = [
        [output.outputs[0].text for output in LLM("demo", model_impl=impl, **options).generate(["Once upon"] * 2, params)]
        for impl in ("transformers", "quire")
    ]
    assert texts[0] == texts[1]


def test_a_draft_model_drafts_for_it():
    options = {"device": "cpu", "dtype": "float32"}
    drafts = {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3}
    llm = LLM("demo", model_impl="transformers", speculative_config=drafts, **options)
    params = SamplingParams(temperature=0, max_tokens=24)
    found = llm.generate(["Once upon a time"], params)[0].outputs[0].text
    assert found == LLM("demo", **options).generate(["Once upon a time"], params)[0].outputs[0].text
    assert llm.llm_engine.stats.num_accepted_tokens > 0


def test_memory_plan_counts_what_the_model_has(made):
    folder, model = made("diffllama")
    report = inspect_model(EngineConfig(model=str(folder), model_impl="transformers", max_model_len=64))
    assert report.memory.weight_bytes >= sum(p.numel() * 4 for p in model.parameters())
    assert report.memory.weight_bytes <= 1.01 * sum(p.numel() * 4 for p in model.parameters())
    assert report.num_parameters == sum(p.numel() for p in model.parameters())
    # Every layer attends twice, with other values each time: 3 layers, 2 calls, K and V of 2 heads of 16 in float32.
    heads = {(call.attention.num_kv_heads, call.attention.head_dim) for call in read_transformers_model(folder).calls}
    num_kv_heads, head_dim = heads.pop()
    assert not heads
    assert report.memory.kv.bytes_per_token == 3 * 2 * 2 * num_kv_heads * head_dim * 4


def test_windows_sinks_and_caps_are_found(made):
    calls = read_transformers_model(made("gpt_oss")[0]).calls
    assert [call.attention.window for call in calls] == [11, None, 11]
    assert all(call.attention.has_sinks for call in calls)
    assert {call.attention.softcap for call in read_transformers_model(made("vaultgemma")[0]).calls} == {5.0}


def test_log_says_once_that_it_is_slower(made, caplog):
    with caplog.at_level(logging.WARNING, logger="quire"):
        start(made("bitnet")[0])
    lines = [record.message for record in caplog.records if "slower" in record.message]
    assert len(lines) == 1
    assert "transformers" in lines[0]


REFUSED = {
    "doge": ({}, "mask of its attention by itself"),
    "llama4_text": (
        {"head_dim": 16, "attention_chunk_size": 16, "num_local_experts": 2},
        "a mask of its attention is not causal",
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv"]}, "a convolution over tokens"),
    "bert": ({}, "is an encoder"),
    "bloom": ({}, "does not send its attention through the attention interface"),
    "dory": ({}, "runs its layers more than once"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_run_is_refused_with_the_reason(tmp_path, model_type):
    changes, reason = REFUSED[model_type]
    make_model(model_type, tmp_path, **changes)
    with pytest.raises(UnsupportedError, match=reason) as caught:
        start(tmp_path)
    assert repr(model_type) in str(caught.value)


def change_config(made, tmp_path, **changes):
    folder = shutil.copytree(made("bitnet")[0], tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "an encoder and a decoder"),
        ({"model_type": "never_seen"}, "cannot read its config.json"),
        ({"architectures": ["BitNetForSequenceClassification"]}, "is no causal language model"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes|quantised"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}, "does not run quantised checkpoints"),
    ],
)
def test_other_configurations_are_refused(made, tmp_path, changes, reason):
    with pytest.raises(UnsupportedError, match=reason):
        start(change_config(made, tmp_path, **changes))


def test_code_in_a_checkpoint_is_not_executed(made, tmp_path):
    folder = change_config(made, tmp_path, model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    (folder / "own.py").write_text("raise SystemExit('executed')")
    with pytest.raises(UnsupportedError, match="does not execute"):
        start(folder)


def test_frequencies_that_depend_on_the_batch_limit_the_length(made, tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    folder = change_config(made, tmp_path, rope_parameters=rope)
    assert read_transformers_model(folder).spec.max_positions == 64
    with pytest.raises(ConfigError, match="takes at most 64 positions"):
        start(folder, max_model_len=100)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj.weight", "model.norm.weight"])
def test_missing_tensor_is_named(made, tmp_path, name):
    folder = shutil.copytree(made("bitnet")[0], tmp_path / "short")
    tensors = {key: tensor.clone() for key, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFormatError, match=f"missing .*{name}"):
        start(folder)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"quantization": "int8"}, "quantization"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"deterministic": True}, "deterministic"),
        ({"device": "interpreter"}, "device"),
        ({"allow_missing_head": True}, "allow_missing_head"),
        ({"speculative_config": {"method": "mtp"}}, "method 'mtp'"),
        ({"speculative_config": {"method": "self", "skipped_layers": [1]}}, "method 'self'"),
    ],
)
def test_options_that_it_does_not_have_are_refused(options, name):
    with pytest.raises(ConfigError, match=name) as caught:
        EngineConfig(model="demo", model_impl="transformers", **options)
    assert "model_impl 'transformers'" in str(caught.value)


def test_unknown_implementation_is_refused():
    with pytest.raises(ConfigError, match="model_impl must be one of .*, got 'vllm'"):
        EngineConfig(model="demo", model_impl="vllm")


def test_type_that_quire_does_not_have_is_refused_with_a_hint(made):
    with pytest.raises(UnsupportedError, match="nearest supported type is .*--model-impl transformers"):
        start(made("bitnet")[0], model_impl="auto", device="cpu")


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("zaya", "keeps a recurrent state"),
        ("xglm", "does not send its attention through the attention interface"),
        ("roberta", "is an encoder"),
        ("mistral_large5", "is not known to transformers"),
    ],
)
def test_type_that_the_library_does_not_run_either_has_no_hint_at_it(model_type, reason):
    with pytest.raises(UnsupportedError, match=f"nor does --model-impl transformers run it, as it .*{reason}"):
        find_family({"model_type": model_type})


def test_configuration_on_which_the_library_fails_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "dbrx", "architectures": ["DbrxForCausalLM"]}))
    with pytest.raises(UnsupportedError, match="cannot run model_type 'dbrx': the library fails on this config.json"):
        read_transformers_model(tmp_path, "float32")


def test_missing_library_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[transformers\]'"):
        inspect_model(EngineConfig(model="demo", model_impl="transformers"))


def test_old_library_is_an_error(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "4.57.1")
    with pytest.raises(ConfigError, match=r"or later, got 4.57.1"):
        inspect_model(EngineConfig(model="demo", model_impl="transformers"))


def test_tokens_beyond_the_vocabulary_are_refused(made):
    with pytest.raises(RequestError):
        tokens_of(start(made("bitnet")[0]), [[VOCAB_SIZE]])


def test_inspect_shows_how_it_attends(made, capsys):
    assert main(["inspect", str(made("vaultgemma")[0]), "--model-impl", "transformers"]) == 0
    shown = capsys.readouterr().out
    assert "computed by transformers" in shown
    assert "window=11" in shown
    assert "softcap=5.0" in shown


def test_model_with_a_device_gives_the_same_logits(made):
    """The path of a GPU, whose tensors are moved to the device and back, with the CPU as the device."""
    folder, _ = made("gpt_oss")
    info = read_transformers_model(folder)
    moved = load_transformers_model(folder, info, torch.device("cpu"))
    assert torch.equal(
        whole_prompt_logits(moved, PROMPTS[2]), whole_prompt_logits(load_transformers_model(folder, info), PROMPTS[2])
    )
    kv = KvPool(KvSpec.of(info.spec, 16, "float32"), 4, moved.device)
    assert all(tensor.device == moved.device and not tensor.any() for tensor in kv.arrays())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_that_is_not_there_is_refused(made):
    with pytest.raises(ConfigError, match="device is 'cuda'.*finds no CUDA device"):
        start(made("bitnet")[0], device="cuda")
