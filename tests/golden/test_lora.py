"""LoRA adapters give the logits and tokens of a model of the transformers library into which they are merged."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from quire import LLM, LoRARequest, SamplingParams
from quire.contracts.kv_spec import KvSpec
from quire.kernels.native import load_native
from quire.kernels.reference.attention import AttentionMetadata
from quire.kv.pool import KvPool
from quire.model.build import build_model
from quire.model.checkpoint import load_parameters
from quire.model.config_reader import read_model_spec
from quire.model.decoder import Decoder
from quire.model.lora.adapter import AdapterReader
from quire.model.lora.deltas import LoraDeltas
from quire.model.native_decoder import NativeDecoder
from quire.model.token_runs import adapter_rows
from tests.golden.dense_cases import CASES, COMPOSED, CONVERTED, ORIGINAL, WRAPPED
from tests.golden.make_checkpoints import reference_model
from tests.lora_adapter import write_adapter, write_merged, write_pairs

pytestmark = pytest.mark.golden

VOCAB_SIZE, MAX_MODEL_LEN = 131, 64
PROMPTS = [
    torch.randint(3, VOCAB_SIZE, (size,), generator=torch.Generator().manual_seed(size)).tolist() for size in (23, 9, 17)
]
F32_TOLERANCE = 1e-4
QUICK = ("phi3", "gpt2", "gemma2", "glm", "minicpm3", "llama4-moe")
"""Layers that are stored joined, transposed or with interleaved heads, latent attention, a shared expert."""
_OTHERS = (*QUICK, *COMPOSED, "minimax-m3")
"""minimax-m3: transformers joins matrices that its files keep apart."""
SLOW = [case for case in (*CASES, *WRAPPED) if case not in _OTHERS]
FAMILIES = [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]
KINDS = ("torch", pytest.param("native", marks=pytest.mark.skipif(load_native() is None, reason="not built")))
STACKS = ["experts.gate_up_proj", "experts.down_proj"]
NOT_ADAPTED = re.compile(r"\.(router|experts)\b|(mlp|block_sparse_moe)\.gate$|vision")


def linear_shapes(model):
    """Return module -> [out, in] of the linear layers that can be adapted, but for the head."""
    found = {}
    for name, module in model.named_modules():
        is_adaptable = re.search(r"\.(layers|h)\.\d+\.", name) and not NOT_ADAPTED.search(name)
        if is_adaptable and isinstance(module, torch.nn.Linear | Conv1D):
            rows, columns = module.weight.shape
            found[name] = (columns, rows) if isinstance(module, Conv1D) else (rows, columns)
    return found


def merged_model(folder, merged):
    model = reference_model(folder)
    for name, delta in merged.items():
        module = model.get_submodule(name)
        module.weight.data += delta.t() if isinstance(module, Conv1D) else delta
    return model


def adapted_decoder(folder, adapter, kind):
    """Return a decoder of torch, or of the native kernels, with an adapter."""
    spec = read_model_spec(folder)
    if kind == "torch":
        decoder = Decoder(spec, load_parameters(folder, spec), MAX_MODEL_LEN, LoraDeltas())
    else:
        decoder = build_model(spec, load_parameters(folder, spec), MAX_MODEL_LEN, 16, has_adapters=True)
        if not isinstance(decoder, NativeDecoder):
            pytest.skip("the native kernels do not cover this family")
    decoder.adapters.load(adapter)
    return decoder


def logits_of_batch(decoder, prompts, keys):
    """Return the logits of all tokens of prompts in one step, each with its adapter."""
    starts = [0]
    for prompt in prompts:
        starts.append(starts[-1] + len(prompt))
    blocks = [-(-len(prompt) // 16) for prompt in prompts]
    kv = KvPool(KvSpec.of(decoder.spec, 16, decoder.spec.dtype), sum(blocks))
    tables = torch.zeros(len(prompts), max(blocks), dtype=torch.int64)
    slots, positions, first = [], [], 0
    for index, prompt in enumerate(prompts):
        tables[index, : blocks[index]] = torch.arange(first, first + blocks[index])
        positions.append(torch.arange(len(prompt)))
        slots.append(first * 16 + positions[-1])
        first += blocks[index]
    rows = adapter_rows(keys, starts)
    step = AttentionMetadata(torch.cat(slots), starts, [len(p) for p in prompts], tables, adapters=rows)
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    logits = decoder.step(tokens, torch.cat(positions), step, kv, list(range(len(tokens))), keeps_all=True)
    assert torch.equal(decoder.logits_at(0, len(tokens)), logits)
    return [logits[start:end] for start, end in pairwise(starts)]


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", FAMILIES)
def test_every_linear_layer_of_a_family_is_adapted(checkpoint, tmp_path, case, kind):
    folder = checkpoint(case, "v5")
    spec = read_model_spec(folder)
    merged = write_adapter(tmp_path / "adapter", linear_shapes(reference_model(folder)))
    adapter = AdapterReader(folder, spec, 16).read(str(tmp_path / "adapter"))
    decoder = adapted_decoder(folder, adapter, kind)
    found = logits_of_batch(decoder, PROMPTS[:2], [adapter.key, ""])
    for model, prompt, logits in (
        (merged_model(folder, merged), PROMPTS[0], found[0]),
        (reference_model(folder), PROMPTS[1], found[1]),
    ):
        with torch.inference_mode():
            want = model(torch.tensor([prompt])).logits[0]
        scale = max(1.0, float(want.abs().max()))
        assert (logits - want).abs().max() <= F32_TOLERANCE * scale


def engine(folder, **options):
    options = {"max_num_seqs": 4, "num_kv_blocks": 60, "enable_lora": True, **options}
    return LLM(model=str(folder), skip_tokenizer_init=True, device="cpu", **options)


def generate(llm, prompts, loras, **params):
    sampling = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=12, detokenize=False, logprobs=3, **params)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [output.outputs[0] for output in llm.generate(asked, sampling, use_tqdm=False, lora_request=loras)]


def is_equal(found, want):
    """Whether outputs have the same tokens, and log probabilities that differ by less than the tolerance."""
    pairs = zip(found, want, strict=True)
    return all(
        list(one.token_ids) == list(two.token_ids)
        and all(
            abs(ours[token].logprob - theirs[token].logprob) < F32_TOLERANCE
            for token, ours, theirs in zip(one.token_ids, one.logprobs, two.logprobs, strict=True)
        )
        for one, two in pairs
    )


@pytest.fixture
def adapted(checkpoint, tmp_path):
    """Return a base, the folders of two adapters, and the folders of the models into which they are merged."""
    pytest.importorskip("re2")
    folder = checkpoint("qwen3", "v5")
    shapes = linear_shapes(reference_model(folder))
    some = {name: shape for name, shape in shapes.items() if name.endswith(("q_proj", "v_proj", "down_proj"))}
    first = next(iter(shapes))
    deltas = (
        write_adapter(tmp_path / "one", shapes, rank=8, seed=1, use_rslora=True),
        write_adapter(tmp_path / "two", some, seed=2, rank_pattern={first: 2}, alpha_pattern={first: 3}),
    )
    names = ("merged-one", "merged-two")
    merged = tuple(write_merged(folder, tmp_path / name, delta) for name, delta in zip(names, deltas, strict=True))
    return folder, (tmp_path / "one", tmp_path / "two"), merged


def test_requests_of_different_adapters_share_a_batch(adapted):
    folder, (one, two), merged = adapted
    prompts = [PROMPTS[0]] * 3 + [PROMPTS[1]] * 2
    loras = [LoRARequest("one", 1, str(one)), None, LoRARequest("two", 2, str(two)), LoRARequest("two", 2, str(two)), None]
    llm = engine(folder)
    found = generate(llm, prompts, loras)
    again = generate(llm, prompts, loras)
    assert llm.llm_engine.scheduler.prefix_cache_hits > 0
    llm.close()
    want = []
    for model, indices in ((merged[0], (0,)), (folder, (1, 4)), (merged[1], (2, 3))):
        plain = engine(model, enable_lora=False)
        want += list(zip(indices, generate(plain, [prompts[index] for index in indices], None), strict=True))
        plain.close()
    expected = [output for _, output in sorted(want, key=lambda pair: pair[0])]
    assert is_equal(found, expected)
    assert is_equal(again, expected)
    assert len({tuple(found[index].token_ids) for index in (0, 1, 2)}) == 3


def test_prompt_logprobs_are_those_of_the_merged_model(adapted):
    folder, (one, _), merged = adapted
    told = []
    for model, lora in ((folder, LoRARequest("one", 1, str(one))), (merged[0], None)):
        llm = engine(model, enable_lora=lora is not None)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], params, use_tqdm=False, lora_request=lora)
        told.append([next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]])
        llm.close()
    assert torch.allclose(torch.tensor(told[0]), torch.tensor(told[1]), atol=F32_TOLERANCE)


@pytest.mark.parametrize("method", [{"method": "ngram"}, {"method": "self", "skipped_layers": [1]}], ids=["ngram", "self"])
def test_tokens_do_not_depend_on_drafts(adapted, method):
    folder, (one, two), _ = adapted
    loras = [LoRARequest("one", 1, str(one)), LoRARequest("two", 2, str(two)), None]
    told = []
    for drafts in (None, {**method, "num_speculative_tokens": 3}):
        llm = engine(folder, speculative_config=drafts)
        told.append([list(output.token_ids) for output in generate(llm, PROMPTS, loras)])
        llm.close()
    assert told[0] == told[1]


def test_adapters_take_turns_where_few_fit_in_memory(adapted):
    folder, (one, two), _ = adapted
    loras = [LoRARequest("one", 1, str(one)), LoRARequest("two", 2, str(two)), LoRARequest("one", 1, str(one))]
    wide, narrow = engine(folder), engine(folder, max_loras=1)
    found = generate(narrow, PROMPTS, loras)
    assert is_equal(found, generate(wide, PROMPTS, loras))
    assert wide.llm_engine.list_loras() == {1, 2}
    assert len(narrow.llm_engine.list_loras()) == 1
    wide.close()
    narrow.close()


def test_quantised_bases_take_adapters(adapted):
    folder, (one, _), _ = adapted
    lora = LoRARequest("one", 1, str(one))
    llm = engine(folder, quantization="int8")
    close, plain = generate(llm, PROMPTS[:1], lora), generate(llm, PROMPTS[:1], None)
    llm.close()
    exact = engine(folder)
    (want,) = generate(exact, PROMPTS[:1], lora)
    exact.close()
    first = want.token_ids[0]
    assert abs(close[0].logprobs[0][first].logprob - want.logprobs[0][first].logprob) < 0.2
    assert list(plain[0].token_ids) != list(close[0].token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_is_adapted(checkpoint, tmp_path, kind):
    folder = checkpoint("qwen2", "v5")
    spec = read_model_spec(folder)
    assert not spec.is_tied
    merged = write_adapter(tmp_path / "head", {"lm_head": (spec.vocab_size, spec.hidden_size)})
    adapter = AdapterReader(folder, spec, 16).read(str(tmp_path / "head"))
    decoder = adapted_decoder(folder, adapter, kind)
    found = logits_of_batch(decoder, PROMPTS[:2], ["", adapter.key])
    for model, prompt, logits in zip((reference_model(folder), merged_model(folder, merged)), PROMPTS[:2], found, strict=True):
        with torch.inference_mode():
            assert (logits - model(torch.tensor([prompt])).logits[0]).abs().max() <= F32_TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow) for case in CONVERTED])
def test_adapters_have_the_modules_of_a_familys_own_code(checkpoint, tmp_path, case, kind):
    """The folder stores other modules than transformers has; q, k and v of a layer share lora_A, as those of one matrix do."""
    folder = checkpoint(case, "v5")
    spec, change, rank = read_model_spec(folder), CONVERTED[case][3], 4
    shapes = linear_shapes(reference_model(folder))
    generator = torch.Generator().manual_seed(7)
    shared = {name: re.sub(r"[qkv]_proj", "qkv_proj", name) for name in shapes}
    a = {shared[name]: torch.randn(rank, columns, generator=generator) * 0.2 for name, (_, columns) in shapes.items()}
    b = {name: torch.randn(rows, rank, generator=generator) * 0.2 for name, (rows, _) in shapes.items()}
    plain = load_file(folder / ORIGINAL / "model.safetensors")
    marked = {f"{name}.weight": torch.cat([b[name], a[shared[name]].sum(1).expand(len(b[name]), rank)], 1) for name in shapes}
    pairs = {}
    for name, rows in change({**{key: torch.zeros(1, 2 * rank) for key in plain}, **marked}).items():
        module = name.removesuffix(".weight")
        is_adapted = rows.dim() == 2 and rows.shape[1] == 2 * rank and bool(rows.any())
        if is_adapted:
            own_a = next(one for one in a.values() if torch.equal(one.sum(1), rows[0, rank:]))
            pairs[module] = (own_a, rows[:, :rank].contiguous())
    write_pairs(tmp_path / "adapter", pairs, alpha=2 * rank)
    model = merged_model(folder, {name: 2.0 * b[name] @ a[shared[name]] for name in shapes})
    adapter = AdapterReader(folder, spec, 16).read(str(tmp_path / "adapter"))
    decoder = adapted_decoder(folder, adapter, kind)
    (found,) = logits_of_batch(decoder, PROMPTS[:1], [adapter.key])
    with torch.inference_mode():
        want = model(torch.tensor(PROMPTS[:1])).logits[0]
        unadapted = reference_model(folder)(torch.tensor(PROMPTS[:1])).logits[0]
    assert (found - want).abs().max() <= F32_TOLERANCE * max(1.0, float(want.abs().max()))
    assert (want - unadapted).abs().max() > 0.1


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("qwen3", {"target_modules": "all-linear", "r": 8, "lora_alpha": 12, "use_rslora": True}),
        ("llama", {"target_modules": ["q_proj", "v_proj"], "r": 4, "layers_to_transform": [1], "layers_pattern": "layers"}),
        ("phi3", {"target_modules": r".*\.(qkv_proj|down_proj)", "r": 4, "rank_pattern": {"layers.0.mlp.down_proj": 7}}),
        ("gpt2", {"target_modules": ["c_attn", "c_fc"], "r": 4, "fan_in_fan_out": True, "alpha_pattern": {"c_fc": 3}}),
        ("qwen3-moe", {"target_modules": ["q_proj"], "target_parameters": STACKS, "r": 4, "use_rslora": True}),
        ("qwen3-moe", {"target_modules": ["o_proj"], "target_parameters": STACKS[1:], "r": 3}),
        ("qwen3-moe", {"target_modules": "all-linear", "r": 4}),
        ("mixtral", {"target_modules": ["w1", "w2", "w3", "q_proj"], "r": 4, "lora_alpha": 5}),
        ("gpt-oss", {"target_modules": ["q_proj"], "target_parameters": STACKS, "r": 4}),
        ("llama4-moe", {"target_modules": ["q_proj"], "target_parameters": STACKS, "r": 3}),
        ("granitemoe", {"target_modules": "all-linear", "target_parameters": STACKS, "r": 3}),
        ("kimi-linear", {"target_modules": "all-linear", "r": 3}),
        ("qwen3-vl", {"target_modules": "all-linear", "r": 3}),
        ("gemma2", {"target_modules": ["o_proj", "gate_proj"], "exclude_modules": [r"layers.0.mlp.gate_proj"], "r": 4}),
    ],
)
def test_what_peft_saves_gives_what_peft_computes(checkpoint, tmp_path, case, options, kind):
    peft = pytest.importorskip("peft", reason="needs peft")
    folder = checkpoint(case, "v5")
    spec = read_model_spec(folder)
    torch.manual_seed(3)
    model = peft.get_peft_model(reference_model(folder), peft.LoraConfig(init_lora_weights=False, **options)).eval()
    model.save_pretrained(tmp_path / "adapter")
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    if saved["rank_pattern"] or saved["alpha_pattern"]:
        pytest.importorskip("re2")
    with torch.inference_mode():
        want = model(torch.tensor(PROMPTS[:1])).logits[0]
        merged = model.merge_and_unload()(torch.tensor(PROMPTS[:1])).logits[0]
        unadapted = reference_model(folder)(torch.tensor(PROMPTS[:1])).logits[0]
    adapter = AdapterReader(folder, spec, 16).read(str(tmp_path / "adapter"))
    decoder = adapted_decoder(folder, adapter, kind)
    (found,) = logits_of_batch(decoder, PROMPTS[:1], [adapter.key])
    scale = max(1.0, float(want.abs().max()))
    assert (want - unadapted).abs().max() > 100 * F32_TOLERANCE * scale
    assert (found - want).abs().max() <= F32_TOLERANCE * scale
    assert (found - merged).abs().max() <= F32_TOLERANCE * scale
