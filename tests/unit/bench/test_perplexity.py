"""Perplexity against the logits of whole windows, computed one by one."""

import json
import math
import re

import pytest
import torch

from quire import EngineConfig
from quire.base.errors import ConfigError, RequestError
from quire.bench.perplexity import Windows, compare_perplexity, cut_windows
from quire.contracts.kv_compression import KvCompression
from quire.model.build import load_model, whole_prompt_logits
from quire.text.tokenizer import load_tokenizer

STREAMING = {"method": "streaming", "budget_tokens": 48}
TEXT = "the quick brown fox jumps over the lazy dog, and then the other. " * 4


def config_of(folder, **options):
    return EngineConfig(model=str(folder), num_kv_blocks=64, **options)


def nats_by_hand(folder, context, stride):
    """Return the mean of -log p, a plain loop over windows and tokens."""
    decoder = load_model(folder)
    tokens = load_tokenizer(folder).encode(TEXT)
    nats, scored, begin = [], 0, 0
    while begin < len(tokens) - 1 and scored < len(tokens):
        window = tokens[begin : begin + context]
        logits = whole_prompt_logits(decoder, window).double()
        for offset in range(1, len(window)):
            if begin + offset >= scored:
                row = logits[offset - 1]
                nats.append(float(torch.logsumexp(row, 0) - row[window[offset]]))
        scored = begin + len(window)
        begin += stride
    return sum(nats) / len(nats), len(nats)


@pytest.mark.parametrize("context, stride", [(32, None), (32, 8), (50, 50), (200, 1), (255, None)])
def test_perplexity_is_that_of_the_windows_computed_by_hand(tiny_model, context, stride):
    record = compare_perplexity(config_of(tiny_model), TEXT, "foxes", Windows(context, stride))
    (result,) = record.results
    expected, num_scored = nats_by_hand(tiny_model, context, stride or context)
    assert result.nats_per_token == pytest.approx(expected, abs=1e-4)
    assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-4)
    assert (result.num_scored_tokens, result.context, result.stride) == (num_scored, context, stride or context)


@pytest.mark.parametrize("num_tokens", [2, 3, 17, 64, 65])
@pytest.mark.parametrize("context, stride", [(2, 1), (8, 8), (8, 3), (16, 4), (100, 100)])
def test_every_token_is_scored_once_with_all_the_context_there_is(num_tokens, context, stride):
    windows = cut_windows(num_tokens, context, stride)
    scored = [position for _, end, first in windows for position in range(first, end)]
    starts = set() if stride < context else set(range(0, num_tokens, stride))
    assert scored == [position for position in range(1, num_tokens) if position not in starts]
    for begin, end, first in windows:
        assert end - begin <= context
        assert begin < first < end or (first == end and stride == context)
        assert begin == 0 or stride == context or first - begin >= min(context - stride, begin)


def test_default_context_is_what_the_model_takes(tiny_model):
    assert Windows().fit(256) == (255, 255)
    assert Windows().fit(4096) == (512, 512)
    record = compare_perplexity(config_of(tiny_model, max_model_len=40), TEXT, "foxes", Windows(max_tokens=60))
    assert (record.results[0].context, record.results[0].num_tokens) == (39, 60)


def test_precisions_are_compared_over_the_same_tokens(tiny_model):
    record = compare_perplexity(config_of(tiny_model), TEXT, "foxes", Windows(64), ("int8", "int4", str(tiny_model)))
    first, int8, int4, again = record.results
    assert [result.quantization for result in record.results] == [None, "int8", "int4", None]
    assert first.relative is None
    for result in (int8, int4, again):
        assert result.num_scored_tokens == first.num_scored_tokens
        assert result.relative == pytest.approx(result.perplexity / first.perplexity - 1, abs=1e-9)
    assert again.relative == 0.0
    assert 0 < abs(int8.relative) < abs(int4.relative) < 0.2


def test_compression_is_compared_over_the_tokens_after_the_first_eviction(tiny_model):
    ratios = (KvCompression(method="snapkv", compression_ratio=0.0, recent_tokens=8), KvCompression(**STREAMING))
    record = compare_perplexity(config_of(tiny_model), TEXT * 4, "foxes", Windows(200, compressions=ratios))
    plain, nothing, streaming = record.results
    assert (plain.num_scored_tokens, streaming.num_scored_tokens) == (nothing.num_scored_tokens,) * 2
    assert plain.num_scored_tokens < plain.num_tokens / 2
    assert nothing.relative == pytest.approx(0.0, abs=1e-6)
    assert streaming.relative != 0.0
    assert "KV compression streaming, 48 tokens" in streaming.describe()
    with pytest.raises(ConfigError, match="after_tokens"):
        Windows(compressions=(KvCompression(**STREAMING, after_tokens=64),)).first_scored(64)


def test_record_says_what_was_measured_where_and_when(tiny_model):
    record = compare_perplexity(config_of(tiny_model, quantization="int8"), TEXT, "foxes", Windows(64))
    values = json.loads(record.to_json())
    assert values["text"] == "foxes"
    assert values["results"][0]["quantization"] == "int8"
    assert values["results"][0]["dtype"] == "float32"
    assert {"machine", "commit", "date", "version", "num_threads"} <= set(values["provenance"])
    assert "nats/token" in record.describe()


@pytest.mark.parametrize("options", [{"context": 1}, {"stride": 0}, {"max_tokens": 1}])
def test_numbers_that_leave_nothing_to_predict_are_refused(options):
    with pytest.raises(ConfigError, match="at least"):
        Windows(**options)


def test_windows_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="context must be less than"):
        Windows(context=256).fit(256)
    with pytest.raises(ConfigError, match="stride must be at most"):
        Windows(context=8, stride=9).fit(256)


def test_text_of_one_token_is_refused(tiny_model):
    with pytest.raises(RequestError, match="at least 2"):
        compare_perplexity(config_of(tiny_model), "t", "t", Windows())


def test_lossy_routing_prints_its_loss_and_what_it_has_changed():
    config = EngineConfig(model="demo-moe", num_kv_blocks=64, device="cpu", num_threads=1)
    text = "It was a cold morning when the detective looked at the door. " * 4
    record = compare_perplexity(config, text, "t", Windows(), against=["expert_capacity_factor=1", "expert_min_share=1"])
    plain, capacity, weak = record.describe().splitlines()
    assert "expert" not in plain
    assert re.search(r"expert_capacity_factor 1 \((?!0\.0%)[\d.]+% of choices moved, [\d.]+% dropped, 0.0% weak\).*%", capacity)
    assert re.search(r"expert_min_share 1 \(0.0% of choices moved, 0.0% dropped, 50.0% weak\).*, \+[\d.]+%", weak)
    with pytest.raises(ConfigError, match="expert_min_share must be a number, got 'x'"):
        compare_perplexity(config, text, "t", Windows(), against=["expert_min_share=x"])
