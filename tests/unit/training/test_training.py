"""Training heads that draft: what is trained is what is drafted, a run can be gone on with, and what is written is read."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base.errors import ConfigError, UnsupportedError
from quire.contracts.kv_spec import KvSpec
from quire.kernels.reference.attention import AttentionMetadata
from quire.kv.pool import KvPool
from quire.model.build import load_model
from quire.model.config_reader import read_model_spec
from quire.model.heads.build import read_layer_head, read_parallel_head
from quire.model.heads.reference_head import ReferenceHead
from quire.training import loop
from quire.training.config import KINDS, DraftTraining
from quire.training.corpus import read_sequences
from quire.training.heads import build_head
from quire.training.mtp_layout import from_stored
from quire.training.target import Target
from tests.tiny_checkpoint import write_checkpoint

WORDS = "the quick brown fox jumps over the lazy dog and runs away from what it has seen in the dark wood "


def options(model, tmp_path, kind, **changes):
    text = tmp_path / "text.txt"
    text.write_text(WORDS * 60, encoding="utf-8")
    return DraftTraining(
        kind=kind,
        model=str(model),
        text=text,
        **{
            "out": tmp_path / kind,
            **{"sequence_tokens": 32, "prompt_tokens": 20, "num_sequences": 24, "batch_tokens": 256, "num_steps_ahead": 3},
            **{"draft_vocab_size": None if kind == "mtp" else 100, "minutes": 0.2, "num_threads": None, **changes},
        },
    )


@pytest.fixture
def clock(monkeypatch):
    """A clock by which every step of the training takes one second."""
    now = iter(range(1_000_000))
    monkeypatch.setattr(loop.time, "monotonic", lambda: float(next(now)))


def run_of_drafts(model, kv, token_ids, features, place, count):
    """What the head says behind the token at `place`, its own features from then on: [count, V']."""
    positions = torch.arange(place + 1)
    step = AttentionMetadata(positions, [0, place + 1], [place + 1], torch.arange(2)[None])
    said = [model.enter(token_ids[1 : place + 2], positions, step, kv, features[: place + 1], [place])[0]]
    for index in range(1, count):
        at = torch.tensor([place + index])
        step = AttentionMetadata(at, [0, 1], [place + index + 1], torch.arange(2)[None])
        said.append(model.enter(token_ids[at + 1], at, step, kv, model.recycled(1), [0])[0])
    return torch.stack(said)


@pytest.mark.parametrize(("kind", "family"), [("eagle3", "qwen3"), ("mtp", "qwen3"), ("mtp", "qwen2"), ("eagle3", "qwen2")])
def test_what_is_unrolled_in_training_is_what_is_drafted(tmp_path, kind, family):
    tiny_model = write_checkpoint(tmp_path / "model", family)
    wanted = options(tiny_model, tmp_path, kind)
    target = Target(str(tiny_model), 32, (0, 1) if kind == "eagle3" else ())
    torch.manual_seed(3)
    head = build_head(target, wanted, sorted(torch.randperm(301)[:100].tolist()))
    head.to(torch.bfloat16).float()  # as it is written
    head.embedding = target.parameter("embed.weight")
    if kind == "mtp":
        head.head = target.head()
    token_ids = torch.randint(0, 301, (2, 16))
    rows = target.compute(token_ids)
    with torch.no_grad():
        said = torch.stack(list(head.unroll(token_ids, rows.inputs if kind == "eagle3" else rows.hidden)))
    loop.write_head(wanted_folder(wanted), head, loop.Progress(), [])
    spec = read_model_spec(tiny_model)
    read = read_layer_head(wanted.out, kind, spec)
    model = ReferenceHead(read, load_model(tiny_model), 64)
    features = rows.inputs if kind == "eagle3" else rows.hidden
    for sequence in range(2):
        for place in (0, 3, 9):
            kv = KvPool(KvSpec.of(read.body, 16, "float32"), 2)
            drafted = run_of_drafts(model, kv, token_ids[sequence], features[sequence], place, 3)
            torch.testing.assert_close(drafted, said[:, sequence, place], atol=1e-4, rtol=1e-4)


def wanted_folder(wanted):
    wanted.out.mkdir(parents=True, exist_ok=True)
    return wanted


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_stopped_goes_on_and_ends_where_an_unbroken_one_does(tiny_model, tmp_path, clock, monkeypatch, kind):
    whole = options(tiny_model, tmp_path, kind, out=tmp_path / "whole")
    made = loop.train_draft(replace(whole), show_progress=False)
    assert made.num_steps == 12
    assert len(made.agreement) == 3
    broken = replace(whole, out=tmp_path / "broken")

    original, calls = loop.make_batch, []

    def batch(sequences, step, wanted):
        calls.append(step)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return original(sequences, step, wanted)

    with monkeypatch.context() as during:
        during.setattr(loop, "_SAVE_S", 0.5)
        during.setattr(loop, "make_batch", batch)
        with pytest.raises(KeyboardInterrupt):
            loop.train_draft(broken, show_progress=False)
    again = loop.train_draft(broken, show_progress=False)
    assert again.num_steps == 12
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (tmp_path / "broken" / "model.safetensors").read_bytes()
    spec = read_model_spec(tiny_model)
    if kind == "medusa":
        assert len(read_parallel_head(again.folder, spec).heads) == 3
    else:
        assert read_layer_head(again.folder, kind, spec).body.vocab_size == (301 if kind == "mtp" else 100)


def test_training_lowers_the_loss(tiny_model, tmp_path, clock):
    wanted = options(tiny_model, tmp_path, "medusa", minutes=1.0)
    made = loop.train_draft(wanted, show_progress=False)
    assert made.num_steps == 60
    assert made.agreement[0] > 0.03  # one in a hundred by chance; what a random model writes is hard to foretell
    config = json.loads((made.folder / "config.json").read_text())
    assert config["truncated_vocab_size"] == 100


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"kind": "eagle2"}, "kind must be one of"),
        ({"prompt_tokens": 40}, "prompt_tokens must be at most"),
        ({"aux_hidden_state_layers": (1, 0, 2)}, "low to high"),
        ({"minutes": 0.0}, "above 0"),
    ],
)
def test_options_that_cannot_be_are_refused(tiny_model, tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        options(tiny_model, tmp_path, changes.pop("kind", "eagle3"), **changes)


@pytest.mark.parametrize(
    ("kind", "family", "changes", "words"),
    [
        ("eagle3", "qwen3_moe", {}, "medusa heads for others too"),
        ("mtp", "gemma2", {}, "scaled embeddings"),
        ("mtp", "qwen3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "scaled or partial rope.*eagle3 or medusa"),
    ],
)
def test_a_model_is_refused_before_anything_is_computed(tmp_path, kind, family, changes, words):
    wanted = options(write_checkpoint(tmp_path / "model", family, **changes), tmp_path, kind)
    with pytest.raises(UnsupportedError, match=words):
        loop.train_draft(wanted, show_progress=False)
    assert not wanted.out.exists()


def test_a_head_that_could_not_be_read_is_not_trained(tiny_model, tmp_path, monkeypatch):
    wanted = options(tiny_model, tmp_path, "medusa")
    build = loop.build_head

    def build_too_wide(*args):
        head = build(*args)
        monkeypatch.setattr(head, "tensors", lambda: {"blocks.0.layers.0.weight": torch.zeros(3, 3)})
        return head

    monkeypatch.setattr(loop, "build_head", build_too_wide)
    with pytest.raises(UnsupportedError, match="cannot be trained for .* hidden size 3"):
        loop.train_draft(wanted, show_progress=False)
    assert not (wanted.out / "training" / "state.pt").exists()


def test_too_little_text_is_refused(tiny_model, tmp_path):
    wanted = options(tiny_model, tmp_path, "medusa")
    wanted.text.write_text("few words")
    with pytest.raises(ConfigError, match="too few"):
        loop.train_draft(wanted, show_progress=False)


def test_text_is_read_anew_when_it_was_edited_in_place(tiny_model, tmp_path):
    wanted = options(tiny_model, tmp_path, "medusa")
    before = read_sequences(wanted, tmp_path, show_progress=False)
    assert (read_sequences(wanted, tmp_path, show_progress=False) == before).all()
    wanted.text.write_text(WORDS.upper() * 60)
    assert (read_sequences(wanted, tmp_path, show_progress=False) != before).any()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_trained_further(tiny_model, tmp_path, kind, clock, monkeypatch):
    first = loop.train_draft(options(tiny_model, tmp_path, kind, num_sequences=16, minutes=0.05), show_progress=False)
    other_text = options(tiny_model, tmp_path, kind, out=tmp_path / "more", draft_vocab_size=None, start_from=str(first.folder))
    other_text.text.write_text(WORDS[::-1] * 60)  # whose most frequent tokens are others
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_run", lambda *args: args[-1].close())
        same = loop.train_draft(other_text, show_progress=False)
    stored, found = (load_file(folder / "model.safetensors") for folder in (first.folder, same.folder))
    assert stored.keys() == found.keys()
    assert all(torch.equal(stored[name], found[name]) for name in stored)
    more = load_file(loop.train_draft(other_text, show_progress=False).folder / "model.safetensors")
    assert any(not torch.equal(stored[name], more[name]) for name in stored)


def test_a_head_in_the_layout_that_was_written_before_is_trained_further(tiny_model, tmp_path, clock, monkeypatch):
    """Multi-token prediction was once written as Qwen stores it: what is read of both is the same."""
    first = loop.train_draft(options(tiny_model, tmp_path, "mtp", num_sequences=16, minutes=0.05), show_progress=False)
    stored = load_file(first.folder / "model.safetensors")
    assert {name.split(".")[1] for name in stored} == {"mtp_layers"}
    assert json.loads((first.folder / "config.json").read_text())["qk_norm"] is True
    old = tmp_path / "old"
    old.mkdir()
    own = {name: tensor for name, tensor in from_stored(stored).items() if not name.endswith("_proj.bias")}
    save_file({f"mtp.{name}": tensor for name, tensor in own.items()}, str(old / "model.safetensors"))
    config = json.loads((first.folder / "config.json").read_text()) | {"architectures": ["Qwen3MTP"], "model_type": "qwen3"}
    del config["qk_norm"]
    (old / "config.json").write_text(json.dumps(config))
    spec = read_model_spec(tiny_model)
    new, before = (read_layer_head(folder, "mtp", spec) for folder in (first.folder, old))
    assert new.body == before.body
    assert new.parameters.keys() == before.parameters.keys()
    assert all(torch.equal(tensor, before.parameters[name]) for name, tensor in new.parameters.items())
    monkeypatch.setattr(loop, "_run", lambda *args: args[-1].close())
    again = loop.train_draft(
        options(tiny_model, tmp_path, "mtp", out=tmp_path / "more", start_from=str(old)), show_progress=False
    )
    found = load_file(again.folder / "model.safetensors")
    assert stored.keys() == found.keys()
    assert all(torch.equal(stored[name], found[name]) for name in stored)


def test_a_head_of_other_shapes_is_not_trained_further(tiny_model, tmp_path, clock):
    first = loop.train_draft(options(tiny_model, tmp_path, "medusa", minutes=0.02), show_progress=False)
    changes = {"out": tmp_path / "more", "draft_vocab_size": None, "start_from": str(first.folder)}
    with pytest.raises(ConfigError, match="start_from: .* has num_heads 3, with these options it is 4"):
        loop.train_draft(options(tiny_model, tmp_path, "medusa", num_steps_ahead=4, **changes), show_progress=False)
    with pytest.raises(ConfigError, match="of which these options differ: start_from"):
        loop.train_draft(replace(options(tiny_model, tmp_path, "medusa", **changes), out=first.folder), show_progress=False)
    with pytest.raises(ConfigError, match="draft_vocab_size cannot be set with start_from"):
        options(tiny_model, tmp_path, "medusa", **{**changes, "draft_vocab_size": 50})


def test_a_head_that_reads_other_layers_is_not_trained_further(tmp_path, clock):
    model = write_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=5)
    first = loop.train_draft(
        options(model, tmp_path, "eagle3", aux_hidden_state_layers=(0, 1, 3), minutes=0.02), show_progress=False
    )
    changes = {"out": tmp_path / "more", "draft_vocab_size": None, "start_from": str(first.folder)}
    with pytest.raises(ConfigError, match=r"start_from: .* has eagle_config .*\[0, 1, 3\].*, with these options it is"):
        loop.train_draft(options(model, tmp_path, "eagle3", aux_hidden_state_layers=(0, 2, 3), **changes), show_progress=False)


def test_a_run_does_not_go_on_with_other_tokens_to_draft(tiny_model, tmp_path, clock):
    wanted = options(tiny_model, tmp_path, "medusa", minutes=0.02)
    loop.train_draft(wanted, show_progress=False)
    wanted.text.write_text("Entirely other words: " + WORDS[::-1] * 60)
    with pytest.raises(ConfigError, match="of which these options differ: tokens to draft"):
        loop.train_draft(replace(wanted, minutes=0.1, seed=1), show_progress=False)
