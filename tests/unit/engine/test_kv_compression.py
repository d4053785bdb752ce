"""KV compression: the tokens are those of an oracle, however they are computed, and blocks are given back."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from quire import LLM, RequestError, SamplingParams
from quire.contracts.kv_compression import KvCompression
from quire.kernels.native import load_native
from tests.tiny_checkpoint import write_checkpoint

PROMPTS = [[(7 * n + 3 * n * n) % 290 for n in range(start, start + length)] for start, length in ((3, 110), (90, 133))]
NUM_TOKENS = 36
METHODS = {
    "streaming": {"method": "streaming", "budget_tokens": 64},
    "streaming in the prompt": {"method": "streaming", "budget_tokens": 64, "after_tokens": 70},
    "key norms": {"method": "key_norm", "budget_tokens": 80, "recent_tokens": 20},
    "key norms once": {"method": "key_norm", "compression_ratio": 0.5, "recent_tokens": 20},
    "snapkv": {"method": "snapkv", "budget_tokens": 80, "recent_tokens": 24},
    "snapkv in the prompt": {"method": "snapkv", "compression_ratio": 0.3, "recent_tokens": 24, "after_tokens": 90},
    "adaptive": {"method": "adaptive", "attention_mass": 0.7, "recent_tokens": 24},
}
OPTIONS = {
    "native": {"block_size": 16},
    "torch": {"block_size": 4, "num_kv_blocks": 400},
}
if load_native() is None:
    del OPTIONS["native"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("compression") / "qwen3", "qwen3")


@pytest.fixture(scope="module", params=OPTIONS)
def kind(request):
    return request.param


def start(folder, kind, **options):
    options = {"max_num_seqs": 4, "num_kv_blocks": 100, "max_model_len": 256, "dtype": "float32", **OPTIONS[kind], **options}
    return LLM(str(folder), skip_tokenizer_init=True, device="cpu", **options)


def generate(llm, name, prompts=PROMPTS, **fields):
    params = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False, **fields}
    compression = None if name is None else METHODS[name]
    params = SamplingParams(kv_compression=compression, **params)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


class Oracle:
    """The transformers library, whose cache loses the blocks that a method evicts."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.inference_mode()
    def generate(self, prompt, fields, size):
        compression = KvCompression(**fields)
        first, budget = compression.first_len(len(prompt)), compression.budget(len(prompt), size)
        token_ids, cache, attentions = list(prompt), DynamicCache(), None
        num_kept, begin = 0, 0
        while True:
            end = first if begin == 0 else begin + 1
            out = self.model(
                torch.tensor([token_ids[begin:end]]),
                past_key_values=cache,
                position_ids=torch.arange(begin, end)[None],
                output_attentions=begin == 0,
            )
            num_kept += end - begin
            attentions = out.attentions if begin == 0 else attentions
            begin = end
            if end == len(token_ids):
                token_ids.append(int(out.logits[0, -1].argmax()))
                if len(token_ids) == len(prompt) + NUM_TOKENS:
                    return token_ids[len(prompt) :]
            if end == first or (compression.is_continuing and num_kept > budget and end > first):
                num_kept = self.evict(cache, compression, budget, num_kept, size, attentions)

    def evict(self, cache, compression, budget, num_kept, size, attentions):
        recent = 1 if compression.method == "streaming" else compression.recent_tokens
        blocks = list(range(-(-compression.sink_tokens // size), (num_kept - recent) // size))
        if compression.method == "key_norm":
            norms = torch.stack([layer.keys[0].norm(dim=-1).sum(0) for layer in cache.layers]).sum(0)
            blocks.sort(key=lambda b: -float(norms[b * size : (b + 1) * size].sum()))
        elif compression.method != "streaming":
            mass = torch.stack([one[0][:, -compression.recent_tokens :].sum((0, 1)) for one in attentions]).sum(0)
            blocks.sort(key=lambda b: float(mass[b * size : (b + 1) * size].sum()))
        if budget is None:
            left = float(mass.sum()) * (1 - compression.attention_mass)
            evicted = []
            for block in blocks:
                left -= float(mass[block * size : (block + 1) * size].sum())
                if left < 0:
                    break
                evicted.append(block)
        else:
            evicted = blocks[: -(-max(0, num_kept - budget) // size)]
        kept = torch.tensor([n for n in range(num_kept) if n // size not in evicted])
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        return len(kept)


@pytest.fixture(scope="module")
def oracle(folder):
    return Oracle(folder)


@pytest.fixture(scope="module")
def llm(folder, kind):
    llm = start(folder, kind)
    yield llm
    llm.close()


@pytest.mark.covering
@pytest.mark.parametrize("name", METHODS)
def test_tokens_are_those_of_the_oracle(llm, oracle, kind, name):
    expected = [oracle.generate(prompt, METHODS[name], OPTIONS[kind]["block_size"]) for prompt in PROMPTS]
    num_evicted = llm.llm_engine.scheduler.num_evicted_blocks
    assert [generate(llm, name, [prompt])[0] for prompt in PROMPTS] == expected  # alone
    assert llm.llm_engine.scheduler.num_evicted_blocks > num_evicted
    assert generate(llm, name) == expected  # batched, and with cached prefixes


SAME = {
    "chunks of 1": {"long_prefill_token_threshold": 1},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "no prefix cache": {"enable_prefix_caching": False},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}},
    "draft trees": {"speculative_config": {"method": "suffix", "suffix_decoding_use_tree_spec": True, "adaptive": False}},
}
CHECKED = ("streaming in the prompt", "key norms", "snapkv", "adaptive")


@pytest.fixture(scope="module")
def plain(llm):
    """Tokens of each method, and of sampling with the first, one prompt at a time."""
    found = {name: [generate(llm, name, [prompt])[0] for prompt in PROMPTS] for name in CHECKED}
    return found, generate(llm, CHECKED[0], temperature=1.0, seed=7)


@pytest.mark.covering
@pytest.mark.parametrize("setting", SAME)
def test_tokens_do_not_depend_on_the_step(folder, kind, plain, setting):
    llm = start(folder, kind, **SAME[setting])
    scheduler = llm.llm_engine.scheduler
    for name in CHECKED:
        assert generate(llm, name) == plain[0][name], name
    assert generate(llm, CHECKED[0], temperature=1.0, seed=7) == plain[1]
    assert ("draft" in setting) == (llm.llm_engine.stats.num_draft_tokens > 0)
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
    llm.close()


@pytest.mark.covering
@pytest.mark.parametrize("name", CHECKED)
def test_tokens_are_the_same_after_preemptions(llm, plain, name):
    engine = llm.llm_engine
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, kv_compression=METHODS[name]
    )
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(f"{name} {index}", {"prompt_token_ids": prompt}, params)
    found, num_steps = {}, 0
    while engine.has_unfinished_requests():
        found.update({output.request_id: output.outputs[0].token_ids for output in engine.step()})
        num_steps += 1
        if num_steps % 11 == 0 and num_steps < 50:
            engine.scheduler.preempt(engine.scheduler.running.last, "kv_blocks")
    assert [list(found[f"{name} {index}"]) for index in range(len(PROMPTS))] == plain[0][name]


def test_streaming_gives_blocks_back_while_it_runs_and_goes_beyond_the_pool(folder, kind):
    size = OPTIONS[kind]["block_size"]
    llm = start(folder, kind, num_kv_blocks=8 * 16 // size, max_num_seqs=1)  # 128 tokens
    engine, params = llm.llm_engine, {"temperature": 0.0, "max_tokens": 140, "ignore_eos": True, "detokenize": False}
    compression = KvCompression(method="streaming", budget_tokens=64)
    engine.add_request("long", {"prompt_token_ids": PROMPTS[0]}, SamplingParams(kv_compression=compression, **params))
    held, pool, outputs = [], engine.scheduler.kv.pool, []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        held.append(pool.num_blocks - pool.num_free)
    assert len(outputs[-1].outputs[0].token_ids) == 140  # 110 + 140 tokens, of which the pool holds 128
    assert max(held) <= -(-65 // size)
    assert outputs[-1].metrics.num_evicted_tokens == -(-(110 + 138 - 64) // size) * size
    with pytest.raises(RequestError, match="max_tokens"):
        llm.generate([{"prompt_token_ids": PROMPTS[0]}], SamplingParams(**params), use_tqdm=False)
    llm.close()


def test_ratio_of_nothing_keeps_the_tokens_and_a_plain_request_is_not_touched(llm, monkeypatch):
    plain = generate(llm, None)
    monkeypatch.setitem(METHODS, "nothing", {"method": "snapkv", "compression_ratio": 0.0})
    evicted = llm.llm_engine.scheduler.num_evicted_blocks
    assert generate(llm, "nothing") == plain
    assert llm.llm_engine.scheduler.num_evicted_blocks == evicted
    generate(llm, "streaming")
    assert generate(llm, None) == plain  # nothing that was computed after an eviction is in the prefix cache


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"method": "h2o", "budget_tokens": 64},
            "method must be one of streaming, key_norm, snapkv, adaptive, bounds, got 'h2o'",
        ),
        ({"method": "streaming"}, "method 'streaming' needs budget_tokens, got neither"),
        ({"method": "streaming", "budget_tokens": 8}, "budget_tokens must be at least"),
        ({"method": "snapkv", "budget_tokens": 64, "compression_ratio": 0.5}, "got budget_tokens and compression_ratio"),
        ({"method": "adaptive", "attention_mass": 0}, "attention_mass must be a number > 0 and <= 1, got 0"),
        ({"method": "key_norm", "compression_ratio": "half"}, "compression_ratio must be a number >= 0 and < 1, got 'half'"),
        ({"method": "bounds", "budget_tokens": 64}, "method 'bounds' evicts nothing: leave out budget_tokens"),
        ({"method": "bounds", "gap": 0}, "gap must be a number > 0, got 0"),
        ({"method": "bounds", "recent_tokens": 64}, "method 'bounds' has no sink_tokens and recent_tokens"),
        ({"method": "streaming", "budget_tokens": 64, "gap": 9.0}, "gap is of method 'bounds' only: leave it out, got 9.0"),
        ({"method": "key_norm", "budget": 64}, "does not have 'budget': its fields are method"),
        (64, "must be a KvCompression or a dict of its fields"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value),
)
def test_bad_compression_is_refused_with_the_field(llm, fields, message):
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate([{"prompt_token_ids": [1]}], SamplingParams(kv_compression=fields), use_tqdm=False)
    assert caught.value.param == "kv_compression"


def test_several_choices_are_refused():
    with pytest.raises(RequestError, match="n and best_of must be 1, got 2") as caught:
        SamplingParams(kv_compression=METHODS["streaming"], n=2)
    assert caught.value.param == "kv_compression"
