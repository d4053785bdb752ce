"""speculative_config: what is read, what is refused and how it says so."""

import dataclasses
import json
import re

import pytest

from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig
from quire.contracts.speculative import SpeculativeConfig


@pytest.mark.parametrize(
    "value",
    [
        {"method": "ngram", "num_speculative_tokens": 3},
        '{"method": "ngram", "num_speculative_tokens": 3}',
        SpeculativeConfig(method="ngram", num_speculative_tokens=3),
    ],
    ids=["dict", "json", "object"],
)
def test_config_is_read_from_a_dict_json_or_itself(value):
    config = EngineConfig(model="demo", speculative_config=value)
    assert config.speculative_config == SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    assert EngineConfig(**dataclasses.asdict(config)) == config  # as it travels to the engine's process


def test_method_is_draft_model_when_only_a_model_is_given():
    assert SpeculativeConfig.read({"model": "demo-draft"}).methods == ("draft_model",)
    assert SpeculativeConfig.read({"model": "demo-draft"}).max_tokens == 4


def test_methods_may_be_several():
    config = EngineConfig(model="demo", speculative_config='{"method": ["ngram", "suffix"]}')
    assert config.speculative_config.methods == ("ngram", "suffix")
    assert config.speculative_config.max_tokens == 18
    assert EngineConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert SpeculativeConfig.read({"method": "lookahead"}).max_tokens == 30
    assert SpeculativeConfig.read({"method": ["lookahead", "ngram"]}).max_tokens == 36
    assert SpeculativeConfig.read({"method": "self", "skipped_layers": [1, 2]}).skipped_layers == (1, 2)


def test_every_method_may_have_a_model_of_its_own():
    models = {"eagle3": "a", "draft_model": "b"}
    given = {"method": ["eagle3", "draft_model", "mtp", "suffix"], "model": models}
    config = EngineConfig(model="demo", speculative_config=given)
    drafting = config.speculative_config
    assert [drafting.model_of(method) for method in drafting.methods[:3]] == ["a", "b", None]  # its own folder has the layer
    assert [drafting.p_min_of(method) for method in ("eagle3", "draft_model")] == [0.35, 0.0]
    assert EngineConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert SpeculativeConfig.read({"method": "eagle3", "model": {"eagle3": "a"}}).model == "a"


def test_options_of_trees_are_read_by_the_names_they_have_elsewhere():
    ours = {"method": "eagle3", "model": "x", "draft_top_k": 4, "draft_depth": 3, "num_speculative_tokens": 15}
    names = {"speculative_eagle_topk": 4, "speculative_num_steps": 3, "speculative_num_draft_tokens": 16}
    assert SpeculativeConfig.read({"method": "eagle3", "model": "x", **names}) == SpeculativeConfig.read(ours)
    assert SpeculativeConfig.read({"method": ["eagle3", "ngram"], "model": "x"}).max_tokens == 10
    medusa = SpeculativeConfig.read({"method": "medusa", "model": "x", "medusa_choices": [[0, 1], [0], [2]]})
    assert medusa.medusa_choices == ((0,), (0, 1), (2,))
    assert medusa.max_tokens == 3


def test_methods_and_options_are_read_by_the_names_that_vllm_has():
    settled = {"draft_tensor_parallel_size": 1, "disable_padded_drafter_batch": True, "rejection_sample_method": "standard"}
    ours = SpeculativeConfig.read({"method": "mtp", "num_speculative_tokens": 2})
    assert SpeculativeConfig.read({"method": "qwen3_next_mtp", "num_speculative_tokens": 2, **settled}) == ours
    assert SpeculativeConfig.read({"method": "ngram_gpu", "parallel_drafting": False, "disable_by_batch_size": None}) == (
        SpeculativeConfig(method="ngram")
    )
    drafter = SpeculativeConfig.read({"model": "someone/drafter", "revision": "v2", "max_model_len": 512})
    assert (drafter.methods, drafter.revision, drafter.max_model_len) == (("draft_model",), "v2", 512)
    ngram = SpeculativeConfig.read({"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 5})
    for model in ("ngram", "[ngram]"):
        old = {"model": model, "prompt_lookup_max": 4, "num_speculative_tokens": 5}
        assert SpeculativeConfig.read(old) == SpeculativeConfig.read({**old, "method": "ngram"}) == ngram


def test_the_other_bound_of_the_lookup_gives_way_when_one_is_given():
    bounds = [
        SpeculativeConfig.read({"method": "ngram", **given})
        for given in ({"prompt_lookup_max": 1}, {"prompt_lookup_max": 5}, {"prompt_lookup_min": 12}, {"prompt_lookup_min": 1})
    ]
    assert [(one.prompt_lookup_min, one.prompt_lookup_max) for one in bounds] == [(1, 1), (2, 5), (12, 12), (1, 8)]
    assert SpeculativeConfig.read({"method": "suffix", "prompt_lookup_min": 12}).prompt_lookup_min == 12


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "method is missing; the methods are ngram, suffix, draft_model, lookahead, self"),
        ({"method": []}, "method is missing"),
        ({"method": ["ngram", "guess"]}, "'guess' is unknown"),
        ({"method": ["ngram", "ngram"]}, "stands twice"),
        ({"method": ["ngram", "lookahead"], "num_speculative_tokens": 5}, "must be 2 * (lookahead_ngram - 1), 6, or more"),
        ({"method": ["ngram", "suffix"], "model": "x"}, "takes no model, got 'x'"),
        ({"method": ["ngram", "draft_model"]}, "'draft_model' takes a model: a folder, a hub id or a bundled one, got None"),
        (
            {"method": ["eagle3", "draft_model"], "model": {"eagle3": "x"}},
            "'draft_model' takes a model: a folder, a hub id or a bundled one, got {'eagle3': 'x'}",
        ),
        (
            {"method": ["eagle3", "ngram"], "model": {"ngram": "x"}},
            "model has one for 'ngram'; those of the methods that draft with one are ['eagle3']",
        ),
        ({"method": "eagle3", "model": {"eagle3": 5}}, "model must be text: a folder, a hub id or a bundled model, got 5"),
        ({"model": {"eagle3": "x"}}, "beside a model for each method name the methods"),
        (
            {"method": ["eagle3", "medusa"], "model": {"eagle3": "x", "medusa": "y"}, "revision": "v1"},
            "of one model on the hub",
        ),
        ({"method": "lookahead", "lookahead_window": 30}, "is 105, more than the 64 drafts"),
        ({"method": "lookahead", "lookahead_ngram": 1}, "lookahead_ngram must be an integer from 2"),
        ({"method": "lookahead", "num_speculative_tokens": 5}, "must be 2 * (lookahead_ngram - 1), 6, or more"),
        ({"method": "lookahead", "lookahead_ngram": 40, "num_speculative_tokens": 60}, "(lookahead_ngram - 1), 78, or more"),
        ({"method": "eagle3", "model": 5}, "model must be text: a folder, a hub id or a bundled model, got 5"),
        ({"model": ["ngram"]}, "model must be text"),
        (
            {"method": "eagle3", "model": "x", "speculative_token_tree": "[(0,),(0,0)]"},
            "with draft_top_k and draft_depth, of medusa with medusa_choices",
        ),
        ({"method": "self"}, "'self' needs skipped_layers"),
        ({"method": "ngram", "skipped_layers": [1]}, "'self' alone takes skipped_layers"),
        ({"method": "self", "skipped_layers": [1, 1]}, "a list of different layers"),
        ({"method": "self", "skipped_layers": [-1]}, "must be an integer from 0"),
        ({"method": "guess"}, "'guess' is unknown"),
        ({"method": "mlp_speculator", "model": "x"}, "'mlp_speculator' is not supported yet"),
        ({"method": "eagle3"}, "'eagle3' takes a model: a folder, a hub id or a bundled one, got None"),
        (
            {"method": ["eagle3", "draft_model"], "model": "x"},
            'eagle3 and draft_model draft with a model or a head: give `model` as an object with one for each, {"eagle3"',
        ),
        ({"method": ["mtp", "medusa"], "model": "x"}, "mtp and medusa draft with a model or a head"),
        ({"method": "ngram", "draft_top_k": 2}, "draft_top_k is 2, but of the methods only eagle, eagle3"),
        ({"method": "draft_model", "model": "x", "draft_depth": 2}, "draft_depth is 2, but of the methods only eagle, eagle3"),
        ({"method": "medusa", "model": "x", "medusa_choices": [[0], [0, -1]]}, "ranks from 0 to 63"),
        ({"method": "medusa", "model": "x", "medusa_choices": [[0], 1]}, "list of paths"),
        ({"method": "medusa", "model": "x", "medusa_choices": []}, "1 to 64 different paths, got 0"),
        ({"method": "medusa", "model": "x", "medusa_choices": [[0], [0]]}, "got 2, 1 different"),
        ({"method": "medusa", "model": "x", "medusa_choices": [[0], [1, 0]]}, "has [1, 0] but not [1]"),
        ({"method": "eagle", "model": "x", "medusa_choices": [[0]]}, "are of method 'medusa'"),
        ({"method": "ngram", "acceptance_method": "typical"}, "must be one of rejection_sampler, typical_acceptance_sampler"),
        ({"method": "ngram", "posterior_alpha": 0.4}, "which changes outputs; name it"),
        (
            {"method": "ngram", "acceptance_method": "typical_acceptance_sampler", "posterior_threshold": 2},
            "from 0 to 1, got 2",
        ),
        ({"method": "eagle", "model": "x", "draft_top_k": 0}, "draft_top_k must be an integer from 1 to 64, got 0"),
        ({"method": "eagle", "model": "x", "draft_top_k": 2, "speculative_eagle_topk": 3}, "draft_top_k is given twice, as 2"),
        ({"method": "eagle", "model": "x", "speculative_num_draft_tokens": 1}, "integer from 2 to 65, got 1"),
        ({"method": "ngram", "model": "x"}, "'ngram' takes no model, got 'x'"),
        ({"method": "draft_model"}, "'draft_model' takes a model: a folder, a hub id or a bundled one, got None"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "integer from 1 to 64, got 0"),
        ({"method": "ngram", "num_speculative_tokens": True}, "integer from 1 to 64, got True"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}, "prompt_lookup_max must be an integer from 5"),
        ({"method": "ngram", "adaptive": 1}, "adaptive must be true or false"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 10**400}, "number from 0 to 1, got 10"),
        (
            {"method": "suffix", "suffix_decoding_use_tree_spec": 1},
            "use_tree_spec must be true or false, got 1",
        ),
        ({"method": "ngram", "suffix_decoding_use_tree_spec": True}, "is of suffix alone, got method 'ngram'"),
        ({"method": "ngram", "tokens": 3}, "no option tokens; the options are method, num_spec"),
        ({"method": "ngram", "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size is 2, but drafts are made on one"),
        ({"method": "ngram", "rejection_sample_method": "block"}, "'block', but tokens are always those of plain decoding"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 8, 3]]}, "adaptive measures how many drafts pay"),
        ({"method": "ngram", "parallel_drafting": 0}, "parallel_drafting is 0"),
        ({"method": "ngram", "revision": "main"}, "revision must be text, of one model on the hub"),
        ({"method": "ngram", "max_model_len": 9}, "max_model_len is 9, but it is of draft_model, eagle, eagle3"),
        ({"method": "mtp", "max_model_len": 0}, "max_model_len must be an integer from 1"),
        ({"method": "eagle", "model": "x", "prompt_lookup_max": 4}, "prompt_lookup_max is 4, but it is of ngram alone"),
        ({"method": "ngram", "suffix_decoding_max_spec_factor": 4}, "is of suffix alone, got method 'ngram'"),
        ({"method": "suffix", "lookahead_window": 3}, "lookahead_window is 3, but it is of lookahead alone"),
        ({"method": "ngram", "prompt_lookup_max": 0}, "prompt_lookup_max must be an integer from 2 to 1024, got 0"),
        ("{", "is not JSON"),
        ("ngram", '; give {"method": "ngram"}'),
        ("[1]", "must be an object"),
    ],
)
def test_config_is_refused_with_what_is_allowed(value, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineConfig(model="demo", speculative_config=value)
