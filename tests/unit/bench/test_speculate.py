"""The figures of speculation: what was forced is what is found."""

import json

import pytest

from quire.base.errors import ConfigError
from quire.bench.speculate import Trial, measure_speculation
from quire.bench.speculate_tasks import TASKS, continuing_prompts, copying_prompts, editing_prompts, quoting_prompts
from quire.cli.main import make_parser
from quire.contracts.config import EngineConfig


def trial(methods, **options):
    defaults = {
        "batch_sizes": (1, 2),
        "prompts": ((5, 6, 7), (8, 9)),
        "output_len": 12,
        "temperature": 0.0,
        "num_tokens": 3,
        "num_rounds": 1,
        "is_adaptive": False,
    }
    return Trial(methods=methods, **{**defaults, **options})


def test_forced_shares_are_found_in_the_figures(tiny_model):
    config = EngineConfig(model=str(tiny_model), num_kv_blocks=32, skip_tokenizer_init=True)
    record = measure_speculation(config, trial(("replay:1", "replay:0", '{"method": "ngram"}')))
    by_method = {(line.method, line.batch_size): line for line in record.lines}
    assert by_method["replay:1", 2].acceptance == [1.0, pytest.approx(1.0, abs=0.4), pytest.approx(1.0, abs=0.4)]
    assert by_method["replay:1", 1].tokens_per_step > 2.5
    assert by_method["replay:0", 1].tokens_per_step == 1.0
    assert by_method["replay:0", 2].acceptance == []
    assert all(line.speed_up > 0 and line.decoding > 0 and line.cpu > 0 for line in record.lines)
    assert "replay:1" in record.lines[0].describe()
    assert record.lines[-1].describe().startswith("ngram ")
    assert json.loads(record.to_json())["lines"][0]["batch_size"] == 1
    assert json.loads(record.to_json())["task"] == "continue"


def test_methods_draft_what_is_forced_as_often_as_they_would(tiny_model):
    config = EngineConfig(model=str(tiny_model), num_kv_blocks=32, skip_tokenizer_init=True)
    draft = json.dumps({"method": "draft_model", "model": str(tiny_model), "num_speculative_tokens": 3})
    never = measure_speculation(config, trial((draft,), forced_share=0.0))
    assert [line.tokens_per_step for line in never.lines] == [1.0, 1.0]  # the same model would be right
    assert all(line.drafts_per_step > 1.5 and line.acceptance == [] for line in never.lines)
    always = measure_speculation(config, trial((draft,), forced_share=1.0))
    assert always.lines[0].tokens_per_step > 2.5
    assert "(forced: 1)" in always.lines[0].describe()


class Bar:
    """What was told of a run's progress."""

    def __init__(self):
        self.total, self.count, self.names = 0, 0, []

    def open(self, total, unit, is_shown):
        assert (unit, is_shown) == ("run", True)
        self.total = total
        return self

    def update(self, count=1):
        self.count += count

    def set_description(self, name):
        self.names.append(name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_progress_counts_every_run(tiny_model, monkeypatch):
    bar = Bar()
    monkeypatch.setattr("quire.bench.speculate.progress_bar", bar.open)
    config = EngineConfig(model=str(tiny_model), num_kv_blocks=32, skip_tokenizer_init=True)
    told = []
    wanted = trial(("replay:1", "replay:0"), num_rounds=2, warm_up_len=20)
    record = measure_speculation(config, wanted, show_progress=True, tell=told.append)
    assert told == record.lines
    assert bar.count == bar.total == 2 * (2 + 2 + 4 + 1 + 2 + 4)  # two batches of one prompt, one of two
    assert bar.names == ["replay:1, batch 1", "replay:1, batch 2", "replay:0, batch 1", "replay:0, batch 2"]


def test_a_trial_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="2 prompts, too few for a batch of 3"):
        trial(("replay:1",), batch_sizes=(3,))
    for share in ("2", "-0.1", "x", "nan"):
        with pytest.raises(ConfigError, match="from 0 to 1"):
            trial((f"replay:{share}",))
    with pytest.raises(ConfigError, match="'guess' is unknown"):
        trial(("replay:1", '{"method": "guess"}'))
    with pytest.raises(ConfigError, match="are for all of them"):
        trial(('{"method": "ngram", "adaptive": false}',))
    with pytest.raises(ConfigError, match="force_acceptance must be from 0 to 1, got 2"):
        trial(('{"method": "ngram"}',), forced_share=2)
    with pytest.raises(ConfigError, match="sets its own share of right drafts"):
        trial(("replay:1",), forced_share=0.5)
    with pytest.raises(ConfigError, match="output_len must be at least 2"):
        trial(("replay:1",), output_len=1)


def test_prompts_are_passages_and_quotes_begin_again():
    text = " ".join(f"w{n}" for n in range(40))
    assert continuing_prompts(text, 2, 3) == ("w0 w1 w2", "w20 w21 w22")
    (first,) = quoting_prompts(text, 1, 10)
    assert first.endswith("w9\n\nw0 w1 w2 w3 w4 w5 w6 w7")
    with pytest.raises(ConfigError, match="too few for 9 passages of 10"):
        quoting_prompts(text, 9, 10)


def test_copies_have_no_sense_and_edits_are_kept():
    text = " ".join(f"w{n}" for n in range(100))
    first, second = copying_prompts(text, 2, 50)
    once, again, begun = (part.split() for part in first.split("\n\n"))
    assert once == again != sorted(once, key=text.split().index)
    assert sorted(once) == sorted(text.split()[:50])
    assert begun == once[:8]
    assert set(second.split()) == set(text.split()[50:])
    before, edited, begun = (part.split() for part in editing_prompts(text, 1, 100)[0].split("\n\n"))
    assert before == text.split()
    assert 1 <= sum(a != b for a, b in zip(before, edited, strict=True)) <= 4
    assert begun == edited[:8]
    assert editing_prompts(text, 1, 100) == editing_prompts(text, 1, 100)


def test_every_task_can_be_asked_for():
    for task in TASKS:
        args = make_parser().parse_args(["bench", "speculate", "--text", "x", "--task", task])
        assert args.task == task


def test_each_round_takes_the_next_batch_until_the_prompts_end():
    shown = trial(("replay:1",), prompts=((1,), (2,), (3,), (4,), (5,)), num_rounds=3)
    assert shown.batches(1) == [[{"prompt_token_ids": [n]}] for n in (1, 2, 3)]
    assert [len(batch) for batch in shown.batches(2)] == [2, 2]
    assert len(shown.batches(5)) == 1


def test_a_batch_of_several_is_filled_again_by_the_next_wave(tiny_model):
    prompts = tuple((n, n + 1) for n in range(5, 13))
    waved = trial(("replay:1",), prompts=prompts, batch_sizes=(1, 2), num_rounds=2, num_waves=3)
    assert [len(batch) for batch in waved.batches(2)] == [6]
    assert [len(batch) for batch in waved.batches(1)] == [1, 1]
    config = EngineConfig(model=str(tiny_model), num_kv_blocks=32, skip_tokenizer_init=True)
    one, two = measure_speculation(config, waved).lines
    assert one.same_outputs == two.same_outputs == 1.0
    assert two.tokens_per_step > 2.0  # of each of two places: no more than two ran
    with pytest.raises(ConfigError, match="8 prompts, too few for a batch of 9"):
        trial(("replay:1",), prompts=prompts, batch_sizes=(3,), num_waves=3)
    with pytest.raises(ConfigError, match="waves must be at least 1"):
        trial(("replay:1",), num_waves=0)


def test_drafts_beside_the_methods_are_refused(tiny_model):
    config = EngineConfig(model=str(tiny_model), skip_tokenizer_init=True, speculative_config={"method": "suffix"})
    with pytest.raises(ConfigError, match="leave it out"):
        measure_speculation(config, trial(("replay:1",)))


def test_sampled_outputs_of_typical_acceptance_may_differ_and_their_share_is_told(tiny_model):
    method = '{"method": "ngram", "prompt_lookup_min": 1, "acceptance_method": "typical_acceptance_sampler"}'
    config = EngineConfig(model=str(tiny_model), num_kv_blocks=32, skip_tokenizer_init=True)
    record = measure_speculation(config, trial((method,), temperature=1.0, output_len=40, batch_sizes=(1,), num_rounds=2))
    assert 0.0 <= record.lines[0].same_outputs < 1.0
    assert "of the outputs are those without drafts" in record.lines[0].describe()
