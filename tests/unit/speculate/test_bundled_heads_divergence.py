"""How far what a bundled head says is from what the model says: this tells mistakes that acceptance is too coarse for."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_bundled_heads import PROMPTS

from quire import LLM, SamplingParams
from quire.contracts.kv_spec import KvSpec
from quire.kernels.native import load_native
from quire.kernels.reference.attention import AttentionMetadata
from quire.kv.pool import KvPool
from quire.model.build import build_model
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.heads.build import build_head, read_layer_head
from quire.model.resolve import resolve_model

pytestmark = pytest.mark.skipif(load_native() is None, reason="needs the native kernels, whose sums have one order")

LENGTH, STRIDE = 256, 4
MARGIN = 0.003
CEILINGS = {"demo-eagle3": (0.149, 0.153), "demo-mtp": (0.202, 0.223)}
"""Of the mean divergence in nats of the first and the second draft, MARGIN above what it was over 1,524 and 378 places."""


@pytest.fixture(scope="module")
def texts():
    """What the model writes itself, which heads are trained on."""
    llm = LLM("demo", num_kv_blocks=200, max_num_seqs=8)
    request = SamplingParams(temperature=0.4, n=2, seed=1, max_tokens=LENGTH, ignore_eos=True)
    outputs = llm.generate(PROMPTS[:3], request, use_tqdm=False)
    llm.close()
    return [(o.prompt_token_ids + list(choice.token_ids))[:LENGTH] for o in outputs for choice in o.outputs]


def divergence(texts, name, change=None, is_shifted=False):
    """Return the mean of KL(model, head) over places, of the first draft and of the second."""
    folder = resolve_model("demo")
    spec = read_model_spec(folder)
    head = read_layer_head(resolve_model(name), name.removeprefix("demo-"), spec)
    head = head if change is None else replace(head, **change)
    target = build_model(spec, open_parameters(folder, spec), LENGTH, 16)
    model = build_head(head, target, LENGTH)
    if head.aux_hidden_state_layers:
        target.keep_inputs(head.aux_hidden_state_layers)
    ids = slice(None) if head.vocabulary is None else head.vocabulary.long()
    found = [], []
    table = torch.arange(LENGTH // 16)[None]

    def note(place, said, meant):
        both = [logits.float().log_softmax(-1) for logits in (said, meant[:, ids])]
        found[place].append(F.kl_div(*both, log_target=True, reduction="none").sum(-1))

    for tokens in texts:
        length = len(tokens) - 1
        positions, rows = torch.arange(length), list(range(length))
        step = AttentionMetadata(positions, [0, length], [length], table)
        kv, own = (KvPool(KvSpec.of(one, 16, spec.dtype), LENGTH // 16) for one in (spec, head.body))
        meant = target.step(torch.tensor(tokens[:-1]), positions, step, kv, rows, True, rows).clone()
        features = (target.layer_inputs(rows) if head.aux_hidden_state_layers else target.hidden_states(0, length)).clone()
        features = features.roll(1, 0) if is_shifted else features
        said = model.enter(torch.tensor(tokens[1:]), positions, step, own, features, rows)
        note(0, said[:-1], meant[1:])
        recycled = model.recycled(length).clone()
        # The last places first: each writes into the cache behind what those before it read.
        for row in range(length - 3, -1, -STRIDE):
            place = torch.tensor([row + 1])
            alone = AttentionMetadata(place, [0, 1], [row + 2], table)
            said = model.enter(torch.tensor(tokens[row + 2 : row + 3]), place, alone, own, recycled[row : row + 1], [0])
            note(1, said, meant[row + 2 : row + 3])
    return [float(torch.cat(parts).mean()) for parts in found]


@pytest.fixture(scope="module")
def right(texts):
    return {name: divergence(texts, name) for name in CEILINGS}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CEILINGS)
def test_heads_say_nearly_what_the_model_says(right, name):
    assert all(value < ceiling for value, ceiling in zip(right[name], CEILINGS[name], strict=True)), right[name]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "change", "place"),
    [
        ("demo-eagle3", {"aux_hidden_state_layers": (1, 5, 7)}, 0),
        pytest.param("demo-eagle3", {"aux_hidden_state_layers": (2, 4, 7)}, 0, marks=pytest.mark.slow),
        pytest.param("demo-eagle3", {"aux_hidden_state_layers": (3, 5, 7)}, 0, marks=pytest.mark.slow),
        pytest.param("demo-eagle3", {"aux_hidden_state_layers": (2, 5, 6)}, 0, marks=pytest.mark.slow),
        pytest.param("demo-eagle3", {"aux_hidden_state_layers": (2, 6, 7)}, 0, marks=pytest.mark.slow),
        pytest.param("demo-eagle3", {"recycles_normed": True}, 1, marks=pytest.mark.slow),
        ("demo-mtp", {"recycles_normed": False}, 1),
    ],
)
def test_a_head_that_is_read_wrongly_says_something_else(texts, right, name, change, place):
    assert divergence(texts, name, change)[place] > right[name][place] + MARGIN


@pytest.mark.slow
@pytest.mark.parametrize("name", CEILINGS)
def test_a_head_says_something_else_to_the_features_of_the_place_before(texts, right, name):
    assert divergence(texts, name, is_shifted=True)[0] > right[name][0] + 50 * MARGIN
