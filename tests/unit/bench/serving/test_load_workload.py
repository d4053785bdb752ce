"""Arrival processes, traces and prompts: seeded, and true to what was asked for."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import ConfigError
from quire.bench.serving.arrivals import Arrivals
from quire.bench.serving.prompts import TokenAlphabet, WordAlphabet, find_words, vocab_size_of
from quire.bench.serving.traces import TraceRow, infer_block_tokens, read_trace
from quire.bench.serving.workload import Dataset, make_requests
from quire.model.resolve import resolve_model
from quire.text.tokenizer import load_tokenizer

TRACES = Path(__file__).resolve().parents[5] / "shared" / "data" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the shared traces are not beside the checkout")
ALPHABET = TokenAlphabet(5000)


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0])
def test_gaps_have_the_mean_and_spread_of_their_process(burstiness):
    times = Arrivals(request_rate=5.0, burstiness=burstiness).times(40000, None, seed=3)
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)
    if burstiness == 1.0:  # memoryless: counts of a second vary as much as their mean
        counts = np.bincount(np.array(times).astype(int))[:-1]
        assert counts.var() / counts.mean() == pytest.approx(1.0, rel=0.1)


def test_times_repeat_with_their_seed():
    arrivals = Arrivals(request_rate=2.0)
    assert arrivals.times(50, None, 1) == arrivals.times(50, None, 1) != arrivals.times(50, None, 2)


def test_times_are_even_or_in_bursts_when_that_is_asked():
    assert Arrivals(request_rate=4.0, process="fixed").times(4, None, 0) == [0, 0.25, 0.5, 0.75]
    bursts = Arrivals(request_rate=4.0, process="burst", burst_size=2).times(5, None, 0)
    assert bursts == [0, 0, 0.5, 0.5, 1.0]
    assert Arrivals().times(3, None, 0) == [0, 0, 0]


def test_trace_is_replayed_faster_and_from_its_start():
    assert Arrivals(trace_speed=4.0).times(3, [10.0, 12.0, 18.0], 0) == [0, 0.5, 2.0]
    given = Arrivals(request_rate=1.0, process="fixed").times(3, [10.0, 12.0, 18.0], 0)
    assert given == [0, 1, 2]


@pytest.mark.parametrize(
    "arrivals,words",
    [
        (Arrivals(), "all at once"),
        (Arrivals(max_concurrency=4), "closed loop, at most 4 at a time"),
        (Arrivals(request_rate=2), "open loop, 2 requests/s, Poisson"),
        (Arrivals(request_rate=2, burstiness=0.5, max_concurrency=3), "gamma gaps, burstiness 0.5, at most 3"),
        (Arrivals(request_rate=2, process="burst"), "bursts of 8"),
    ],
)
def test_process_is_described(arrivals, words):
    assert words in arrivals.describe(has_times=False)


@pytest.mark.parametrize(
    "options,option",
    [
        ({"request_rate": 0}, "--request-rate"),
        ({"request_rate": math.nan}, "--request-rate"),
        ({"burstiness": -1}, "--burstiness"),
        ({"burstiness": math.inf}, "--burstiness"),
        ({"trace_speed": 0}, "--trace-speed"),
        ({"burst_size": 0}, "--burst-size"),
        ({"max_concurrency": 0}, "--max-concurrency"),
        ({"process": "fixed"}, "--request-rate"),
        ({"process": "trace", "request_rate": 3}, "--trace-speed"),
    ],
)
def test_arrivals_are_refused_when_they_make_no_sense(options, option):
    with pytest.raises(ConfigError, match=option):
        Arrivals(**options)


def test_recorded_times_are_refused_when_there_are_none():
    with pytest.raises(ConfigError, match="--arrival trace"):
        Arrivals(process="trace").times(3, None, 0)


def test_random_lengths_lie_in_their_range_and_prompts_share_the_prefix():
    dataset = Dataset(num_prompts=400, input_len=100, output_len=20, range_ratio=0.5, prefix_len=7, seed=9)
    requests = make_requests(dataset, ALPHABET)
    assert make_requests(dataset, ALPHABET) == requests
    lengths = [request.num_prompt_tokens - 7 for request in requests]
    outputs = [request.num_output_tokens for request in requests]
    assert (min(lengths), max(lengths)) == (pytest.approx(50, abs=3), pytest.approx(150, abs=3))
    assert (min(outputs), max(outputs)) == (10, 30)
    assert all(len(request.prompt) == request.num_prompt_tokens for request in requests)
    assert len({tuple(request.prompt[:7]) for request in requests}) == 1
    assert len({tuple(request.prompt[7:20]) for request in requests}) == 400
    assert all(3 <= token < 5000 for request in requests for token in request.prompt)
    assert {request.num_prompt_tokens for request in make_requests(Dataset(num_prompts=3), ALPHABET)} == {1024}


def test_lengths_are_scaled_and_then_capped():
    dataset = Dataset(num_prompts=1, input_len=100, output_len=50, input_scale=0.5, output_scale=0.1, max_input_len=40)
    (request,) = make_requests(dataset, ALPHABET)
    assert (len(request.prompt), request.num_output_tokens) == (40, 5)
    tiny = Dataset(input_scale=1e-6, output_scale=1e-6)
    assert (tiny.scaled_input(1000), tiny.scaled_output(1000)) == (1, 1)


@pytest.mark.parametrize(
    "options,option",
    [
        ({"num_prompts": 0}, "--num-prompts"),
        ({"input_len": 0}, "--random-input-len"),
        ({"prefix_len": -1}, "--random-prefix-len"),
        ({"range_ratio": 1.0}, "--random-range-ratio"),
        ({"input_scale": 0.0}, "--input-scale"),
        ({"output_scale": math.nan}, "--output-scale"),
        ({"seed": -1}, "--seed"),
        ({"name": "trace"}, "--dataset-path"),
        ({"path": Path("x")}, "--dataset-path"),
        ({"name": "custom", "path": Path("x"), "input_scale": 0.5}, "--input-scale"),
    ],
)
def test_dataset_is_refused_when_it_makes_no_sense(options, option):
    with pytest.raises(ConfigError, match=option):
        Dataset(**options)


CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:04.0319600,30,8\r\n2023-11-16 18:17:03.9799600,4808,10\r\n"
CSV += "2023-11-16 18:17:05.0000000,5,0\r\n2024-05-10 00:00:00+00:00,7,2\r\n2024-05-10 00:00:00.500000+00:00,7,2\r\n"


def written(folder, text):
    path = folder / "trace"
    path.write_bytes(text.encode())
    return path


def test_csv_trace_is_read_in_order_of_time_with_seven_decimals(tmp_path):
    rows = read_trace(written(tmp_path, CSV)).rows
    assert [(row.num_input_tokens, row.num_output_tokens) for row in rows] == [(4808, 10), (30, 8), (7, 2), (7, 2)]
    assert [row.time_s for row in rows[:2]] == [0.0, pytest.approx(0.052, abs=1e-6)]
    assert rows[3].time_s - rows[2].time_s == pytest.approx(0.5, abs=1e-6)
    assert len(read_trace(written(tmp_path, CSV), duration_s=0.05).rows) == 1
    assert len(read_trace(written(tmp_path, CSV), max_requests=3).rows) == 3


def lines(*rows):
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows) + "\n"


def test_equal_hash_ids_give_equal_blocks(tmp_path):
    text = lines((500, 1200, 3, [7, 8, 9]), (1500, 1100, 4, [7, 8, 10]), (2500, 512, 1, [8]), (9000, 1500, 1, [7, 8, 9]))
    requests = make_requests(Dataset(name="trace", path=written(tmp_path, text)), ALPHABET)
    first, second, third, fourth = (request.prompt for request in requests)
    assert [request.num_prompt_tokens for request in requests] == [1200, 1100, 512, 1500]
    assert [request.time_s for request in requests] == [0, 1, 2, 8.5]
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1100]
    assert third == first[512:1024]
    assert third != first[:512]
    assert fourth[:1200] == first


def test_share_of_equal_tokens_stays_when_a_trace_is_scaled(tmp_path):
    text = lines((0, 1200, 30, [7, 8, 9]), (1, 1100, 4, [7, 8, 10]))
    dataset = Dataset(name="trace", path=written(tmp_path, text), input_scale=1 / 64, output_scale=0.5)
    first, second = make_requests(dataset, ALPHABET)
    assert (first.num_prompt_tokens, second.num_prompt_tokens, first.num_output_tokens) == (19, 17, 15)
    assert first.prompt[:16] == second.prompt[:16]
    assert first.prompt[16] != second.prompt[16]
    capped = Dataset(name="trace", path=dataset.path, max_input_len=600, num_prompts=1)
    (request,) = make_requests(capped, ALPHABET)
    assert (len(request.prompt), request.num_prompt_tokens) == (600, 600)


@pytest.mark.parametrize(
    "rows,size",
    [
        ([(1200, 3), (512, 1)], 512),
        ([(17, 2), (32, 2), (16, 1)], 16),
        ([(5, 1)], 512),
        ([(600, 1)], 1024),
        ([(30, 3), (28, 3)], 10),
        ([(9, 0)], None),
    ],
)
def test_block_size_is_inferred_from_lengths_and_numbers_of_ids(rows, size):
    trace = [TraceRow(0.0, length, 1, tuple(range(number))) for length, number in rows]
    assert infer_block_tokens(trace, Path("t")) == size
    for length, number in rows:
        assert not number or -(-length // size) == number


@pytest.mark.parametrize(
    "text,message",
    [
        ("a,b\n1,2\n", "is not a trace"),
        ("", "is not a trace"),
        (CSV.replace("4808", "many"), "line 3"),
        (CSV.replace("2023-11-16 18:17:03", "yesterday"), "line 3"),
        (CSV.splitlines()[0] + "\n", "no request"),
        (lines((0, 5, 1, [1])) + "{]", "line 2"),
        (lines((0, -5, 1, [1])), "line 1"),
        ('{"timestamp": 1}\n', "input_length"),
        ('{"timestamp": NaN, "input_length": 4, "output_length": 4}\n', "line 1"),
        (lines((0, 900, 1, [1]), (0, 30, 1, [1, 2])), "no block size"),
    ],
)
def test_trace_is_refused_with_its_line_when_it_is_damaged(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_trace(written(tmp_path, text))
    assert f"the trace {tmp_path}" in str(caught.value)


def test_trace_is_refused_when_it_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none")


@needs_traces
@pytest.mark.parametrize(
    "name,number,block",
    [
        ("azure2023_code.csv", 8819, None),
        ("azure2023_conv.csv", 19366, None),
        ("mooncake_synthetic.jsonl", 3993, 512),
        ("mooncake_synthetic_div32.jsonl", 2258, 16),
    ],
)
def test_shared_traces_are_read(name, number, block):
    trace = read_trace(TRACES / name)
    assert (trace.block_tokens, trace.rows[0].time_s) == (block, 0.0)
    assert number - 20 <= len(trace.rows) <= number
    assert all(before.time_s <= after.time_s for before, after in zip(trace.rows, trace.rows[1:], strict=False))
    assert 600 < trace.rows[-1].time_s < 4000


@needs_traces
def test_prefixes_of_a_shared_trace_are_shared_in_its_prompts():
    path = TRACES / "mooncake_synthetic_div32.jsonl"
    requests = make_requests(Dataset(name="trace", path=path, num_prompts=300), ALPHABET)
    rows = read_trace(path, max_requests=300).rows
    seen = {}
    for request, row in zip(requests, rows, strict=True):
        for index, hash_id in enumerate(row.hash_ids[:-1]):
            tokens = tuple(request.prompt[index * 16 : index * 16 + 16])
            assert seen.setdefault(hash_id, tokens) == tokens
    assert len(set(seen.values())) == len(seen) > 100
    assert max(Counter(id for row in rows for id in row.hash_ids[:-1]).values()) > 1


def test_custom_prompts_are_text_ids_or_messages(tmp_path):
    path = tmp_path / "prompts"
    messages = [{"role": "user", "content": "hi"}]
    path.write_text('{"prompt": "hi", "timestamp": 3}\n\n{"prompt": [1, 2], "max_tokens": 9, "timestamp": 1}\n')
    found = make_requests(Dataset(name="custom", path=path, output_len=5, output_scale=2), ALPHABET)
    assert [(item.prompt, item.num_output_tokens, item.time_s) for item in found] == [([1, 2], 18, 1.0), ("hi", 10, 3.0)]
    path.write_text(json.dumps({"messages": messages}))
    (request,) = make_requests(Dataset(name="custom", path=path), ALPHABET)
    assert (request.prompt, request.time_s) == (messages, None)


@pytest.mark.parametrize("text", ["", "[1]", '{"prompt": ""}', '{"prompt": 3}', '{"prompt": "a", "max_tokens": 0}', "{"])
def test_custom_prompts_are_refused_when_they_are_none(tmp_path, text):
    path = tmp_path / "prompts"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--dataset-path"):
        make_requests(Dataset(name="custom", path=path), ALPHABET)


def test_text_prompts_have_the_wanted_number_of_tokens():
    folder = resolve_model("demo")
    tokenizer = load_tokenizer(folder)
    assert vocab_size_of(folder) == 4096
    words = find_words(tokenizer, 4096)
    assert isinstance(words, WordAlphabet)
    assert words.size > 100
    for request in make_requests(Dataset(num_prompts=30, input_len=40, range_ratio=0.5), words):
        assert len(tokenizer.encode(request.prompt, False)) == request.num_prompt_tokens


def test_vocabulary_is_guessed_when_nothing_tells_it(tmp_path):
    assert vocab_size_of(None) == vocab_size_of(tmp_path) == 1000
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 77}}')
    assert vocab_size_of(tmp_path) == 77
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="--vocab-size"):
        vocab_size_of(tmp_path)
    with pytest.raises(ConfigError, match="--vocab-size"):
        TokenAlphabet(3)
