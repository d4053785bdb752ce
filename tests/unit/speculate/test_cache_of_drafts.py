"""What drafts keep in caches of their own is, after every step, what a fresh run over the known tokens puts there.

A wrong key or value there changes no token: it would be seen as lower acceptance alone, if at all.
"""

from functools import partial
from types import SimpleNamespace

import head_checkpoints as heads
import pytest
import torch
from cache_layout import by_token
from head_oracle import PROMPTS, Oracle, run_of

from quire import LLM, SamplingParams
from quire.contracts.kv_spec import KvSpec
from quire.engine.scheduling import check_invariants
from quire.kernels.native import load_native
from quire.kv.pool import KvPool
from quire.model.build import build_model
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.speculate.draft_model import DraftModelProposer
from quire.speculate.head_proposer import HeadProposer
from tests.tiny_checkpoint import write_checkpoint

pytestmark = pytest.mark.skipif(load_native() is None, reason="needs the native kernels, whose sums have one order")

SIZE = 16
METHODS = {
    "draft_model": {"method": "draft_model"},
    "draft_model merged": {"method": ["draft_model", "ngram"], "num_speculative_tokens": 8, "prompt_lookup_min": 1},
    "draft_model with mtp": {"method": ["draft_model", "mtp"], "num_speculative_tokens": 8},
    "eagle": {"method": "eagle"},
    "eagle3": {"method": "eagle3"},
    "eagle3 tree": {"method": "eagle3", "draft_top_k": 3, "num_speculative_tokens": 12},
    "eagle3 merged": {"method": ["eagle3", "ngram", "suffix"], "num_speculative_tokens": 12, "prompt_lookup_min": 1},
    "eagle3 with draft_model": {"method": ["eagle3", "draft_model"], "num_speculative_tokens": 8},
    "mtp": {"method": "mtp"},
    "mtp tree": {"method": "mtp", "draft_top_k": 3, "num_speculative_tokens": 12},
}
MAKERS = {"eagle": heads.eagle1, "eagle3": heads.eagle3, "mtp": heads.mtp}
OPTIONS = {
    "roomy": {},
    "preempted": {"num_kv_blocks": 10},
    "recomputed": {"num_kv_blocks": 10, "enable_prefix_caching": False},
    "chunked": {"long_prefill_token_threshold": 5, "max_num_seqs": 2},
    "adaptive": {"adaptive": True},
    "asleep": {"adaptive": True},
}
# Each method with one of the options, in turn, and with another one that is slow.
CASES = [
    pytest.param(kind, option, marks=[] if place == index % len(OPTIONS) else pytest.mark.slow)
    for index, kind in enumerate(METHODS)
    for place, option in enumerate(OPTIONS)
    if (place - index) % len(OPTIONS) in (0, 2)
]


class DraftModelOracle:
    """A draft model's cache from one pass over all tokens."""

    def __init__(self, folder):
        self.spec = read_model_spec(folder)
        self.model = build_model(self.spec, open_parameters(folder, self.spec), 256, SIZE)

    def cache(self, tokens):
        kv = KvPool(KvSpec.of(self.spec, SIZE, "float32"), 16)
        self.model.step(*run_of(tokens, 16).tensors(SIZE), kv, [len(tokens) - 1])
        return kv


class HeadOracle(Oracle):
    """A head's cache from one pass of the model, and one of the head, over all tokens."""

    def cache(self, tokens):
        first, own = self.read(tokens)
        rows = [len(tokens) - 2]
        self.model.enter(first.token_ids, first.positions, first.attention, own, first.features, rows)
        return own


def start(model, folder, kind, options):
    """Return an engine, and the oracle of the first method."""
    options, methods = dict(options), METHODS[kind]["method"]
    models = {}
    for method in (methods,) if isinstance(methods, str) else methods:
        if method == "draft_model" or method in MAKERS:
            models[method] = str(folder / method)
            make = partial(write_checkpoint, family="qwen3", seed=1) if method == "draft_model" else MAKERS[method]
            make(folder / method)
    first = next(iter(models))
    oracle = DraftModelOracle(folder / first) if first == "draft_model" else HeadOracle(model, folder / first, first)
    config = {"model": models, "num_speculative_tokens": 4, "adaptive": options.pop("adaptive", False), **METHODS[kind]}
    config |= {} if "draft_top_k" in config else {"draft_p_min": 0.0}
    return LLM(str(model), **{"max_num_seqs": 8, "num_kv_blocks": 80, "speculative_config": config, **options}), oracle


class Recorder:
    """Copies after every step what a proposer holds of each sequence.

    seen      by request and choice what was held: first place, and per layer K and V [K, T, D], and where each lies
    foreign   (block, offset) of places that a head reads with the nearest feature, as nobody kept theirs: up to where a
              sequence is fed again after a sleep, and the last one of a cached prefix, whose next token may be another one for
              whom shares that block
    """

    def __init__(self, llm):
        self.speculator = llm.llm_engine.speculator
        proposer = self.speculator.proposer
        self.is_merged = hasattr(proposer, "proposers")
        self.proposer = proposer.proposers[0] if self.is_merged else proposer
        self.seen, self.tokens, self.foreign = {}, {}, set()
        if isinstance(self.proposer, HeadProposer):
            self.watch_features()

    def watch_features(self):
        take_in = self.proposer.take_in

        def note(sequence, first, run):
            before = sequence.memo
            take_in(sequence, first, run)
            if sequence.memo is not before and sequence.memo is not None:
                assert first - sequence.memo.done < SIZE
                places = [*range(sequence.memo.done, first), *([first - 1] if first % SIZE == 0 and first > 0 else [])]
                self.foreign |= {(int(sequence.table[place // SIZE]), place % SIZE) for place in places}

        self.proposer.take_in = note

    def held(self, memo):
        if isinstance(self.proposer, DraftModelProposer):
            return 0, memo.num_done
        return memo.start, memo.done

    def record(self):
        (pool,) = self.proposer.pools
        for followed in self.speculator.followed.values():
            sequence = followed.sequence
            memo = sequence.memo[0].sequence.memo if self.is_merged and sequence.memo is not None else sequence.memo
            first, last = (0, 0) if memo is None else self.held(memo)
            if last == first:
                continue
            blocks = [int(block) for block in sequence.table[first // SIZE : -(-last // SIZE)]]
            parts = [
                torch.cat([by_token(name, part[layer][block]) for block in blocks], 1)[:, : last - first].clone()
                for name, part in (("k", pool.k), ("v", pool.v))
                for layer in range(len(pool.k))
            ]
            places = [(blocks[place // SIZE], place % SIZE) for place in range(last - first)]
            key = sequence.request.request_id, sequence.choice
            self.seen.setdefault(key, []).append(SimpleNamespace(first=first, parts=parts, places=places))
            self.tokens[key] = list(sequence.token_ids)


def expect_fresh(recorder, oracle):
    """Compare all that was held with a fresh run; return how many places were compared, and how many were left out."""
    num_compared = num_foreign = 0
    for key, steps in recorder.seen.items():
        fresh = oracle.cache(recorder.tokens[key])
        expected = [
            torch.cat([by_token(name, part[layer][block]) for block in range(fresh.num_blocks)], 1)
            for name, part in (("k", fresh.k), ("v", fresh.v))
            for layer in range(len(fresh.k))
        ]
        for step in steps:
            own = torch.tensor([place not in recorder.foreign for place in step.places])
            num_compared, num_foreign = num_compared + int(own.sum()), num_foreign + int((~own).sum())
            for found, whole in zip(step.parts, expected, strict=True):
                right = whole[:, step.first : step.first + len(step.places)]
                assert torch.equal(found[:, own], right[:, own])
    return num_compared, num_foreign


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("kind", "option"), CASES)
def test_own_cache_holds_after_every_step_what_a_fresh_run_would(tiny_model, tmp_path, kind, option):
    llm, oracle = start(tiny_model, tmp_path / "head", kind, OPTIONS[option])
    recorder, engine = Recorder(llm), llm.llm_engine
    num_preemptions = num_steps = 0
    for turn in range(2):  # the second time with cached prefixes
        for index, prompt in enumerate(PROMPTS):
            temperature = (0.0, 1.0)[index % 2 * turn]  # the first time all are greedy
            asked = SamplingParams(temperature=temperature, seed=index, max_tokens=20 + 3 * index, ignore_eos=True)
            engine.add_request(f"{turn}-{index}", prompt, asked)
        while engine.has_unfinished_requests():
            if option == "asleep" and turn == 0:
                recorder.speculator.end_skipping()
                recorder.speculator.controller.budget.disabled_left = 1000 if 3 <= num_steps < 9 else 0
            num_preemptions += sum(output.metrics.num_preemptions for output in engine.step() if output.finished)
            num_steps += 1
            recorder.record()
        check_invariants(engine.scheduler)
    num_compared, num_foreign = expect_fresh(recorder, oracle)
    assert (num_preemptions > 0) is ("num_kv_blocks" in OPTIONS[option])
    assert num_compared > (30 if "adaptive" in OPTIONS[option] else 500)  # fewer where drafts come to sleep by themselves
    if "adaptive" not in OPTIONS[option]:
        assert num_foreign <= (0 if kind.startswith("draft_model") else 0.1 * num_compared)
    llm.close()


@pytest.mark.parametrize("kind", ["draft_model", "eagle3", pytest.param("mtp", marks=pytest.mark.slow)])
def test_own_cache_of_choices_that_fork_holds_what_a_fresh_run_would(tiny_model, tmp_path, kind):
    llm, oracle = start(tiny_model, tmp_path / "head", kind, {})
    recorder, engine = Recorder(llm), llm.llm_engine
    asked = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    for index, prompt in enumerate((PROMPTS[1], PROMPTS[0], list(range(30, 46)))):
        engine.add_request(str(index), prompt, asked)
    while engine.has_unfinished_requests():
        engine.step()
        recorder.record()
    num_compared, _ = expect_fresh(recorder, oracle)
    assert num_compared > 300
    assert len(recorder.seen) == 9
    llm.close()
