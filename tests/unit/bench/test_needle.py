"""The needle benchmark: what its prompts hold, and what counts as found."""

import json
import random

import pytest

from quire import EngineConfig
from quire.base.errors import ConfigError
from quire.bench import needle
from quire.bench.needle import NeedleGrid, measure_needles
from quire.contracts.kv_compression import KvCompression
from quire.kernels.native import load_native
from quire.text.tokenizer import load_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog and then the other " * 40


def config_of(folder, **options):
    return EngineConfig(model=str(folder), num_kv_blocks=64, **options)


def test_compression_is_measured_on_the_same_prompts(tiny_model):
    compression = KvCompression(method="snapkv", budget_tokens=64, recent_tokens=16)
    config, grid = config_of(tiny_model), NeedleGrid((120,), (0.5,), 2)
    plain, compressed = measure_needles(config, TEXT, "foxes", grid, compressions=[compression]).results
    assert (plain.kv_compression, compressed.kv_compression) == (None, "snapkv, 64 tokens")
    assert [cell.num_prompts for cell in compressed.cells] == [2]
    assert "KV compression snapkv, 64 tokens" in compressed.describe()


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_prompt_has_its_length_the_needle_at_its_depth_and_the_question_last(tiny_model, depth):
    tokenizer = load_tokenizer(tiny_model)
    haystack = tokenizer.encode(TEXT, add_special_tokens=False)
    made = needle.make_needle(tokenizer.encode, haystack, TEXT.split(), 200, depth, random.Random(1))
    question = tokenizer.encode(needle.INTRODUCTION, add_special_tokens=False)
    assert len(made.prompt) == 200
    assert made.prompt[-len(question) :] == question
    whole = [*question, *made.answer]
    starts = [at for at in range(200) if made.prompt[at : at + len(whole)] == whole]
    rest = 200 - len(whole) - len(question) - len(tokenizer.encode(".\n", add_special_tokens=False))
    assert starts == [round(depth * rest)]


def test_a_record_counts_the_prompts_whose_output_is_the_needle(tiny_model, monkeypatch):
    grid = NeedleGrid((120, 150), (0.0, 1.0), 3)
    record = measure_needles(config_of(tiny_model), TEXT, "foxes", grid)
    (result,) = record.results
    assert [(cell.length, cell.depth, cell.num_prompts) for cell in result.cells] == [
        (120, 0.0, 3),
        (120, 1.0, 3),
        (150, 0.0, 3),
        (150, 1.0, 3),
    ]
    assert result.share_found == 0.0  # random weights find nothing
    make = needle.make_needle
    outputs = {}

    def remember(*args):
        made = make(*args)
        key = tuple(made.prompt)
        return needle.Needle(made.prompt, outputs.get(key, made.answer))

    # With what the model says as the needle, all are found.
    llm = needle.LLM(config_of(tiny_model))
    for index in range(12):
        length, depth = (120, 120, 150, 150)[index // 3], (0.0, 1.0)[index // 3 % 2]
        tokenizer = llm.get_tokenizer()
        made = make(
            tokenizer.encode,
            tokenizer.encode(TEXT, add_special_tokens=False),
            TEXT.split(),
            length,
            depth,
            random.Random(index),
        )
        params = needle.SamplingParams(temperature=0.0, max_tokens=len(made.answer), ignore_eos=True)
        said = llm.generate([{"prompt_token_ids": made.prompt}], [params], use_tqdm=False)[0].outputs[0].token_ids
        outputs[tuple(made.prompt)] = said
    llm.close()
    monkeypatch.setattr(needle, "make_needle", remember)
    (result,) = measure_needles(config_of(tiny_model), TEXT, "foxes", grid).results
    assert [cell.num_found for cell in result.cells] == [3, 3, 3, 3]
    assert "at 0" in result.describe()
    assert "3/3" in result.describe()


@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
def test_other_formats_are_measured_on_the_same_prompts(tiny_model):
    record = measure_needles(config_of(tiny_model), TEXT, "foxes", NeedleGrid((120,), (0.5,), 2), ["k8v4", "turboquant_4bit"])
    formats = [result["kv_cache_dtype"] for result in json.loads(record.to_json())["results"]]
    assert formats[1:] == ["k8v4", "turboquant_4bit"]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"lengths": (0,)}, "lengths must be at least 1, got 0"),
        ({"lengths": (100,), "depths": (1.5,)}, "depths must be from 0 to 1, got 1.5"),
        ({"lengths": (100,), "num_prompts": 0}, "num_prompts must be at least 1, got 0"),
        ({"lengths": (10,)}, "lengths must be at least"),
        ({"lengths": (256,)}, "lengths must leave room for the answer below max_model_len"),
        ({"lengths": (100_000,)}, "give a longer one"),
    ],
)
def test_bad_grids_are_refused(tiny_model, grid, message):
    with pytest.raises(ConfigError, match=message):
        measure_needles(config_of(tiny_model), TEXT, "foxes", NeedleGrid(**grid))


def test_a_format_that_there_is_not_is_refused_before_anything_is_measured(tiny_model):
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of"):
        measure_needles(config_of(tiny_model), TEXT, "foxes", NeedleGrid((100,)), ["int3"])
