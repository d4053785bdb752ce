"""What a head drafts from a fresh run over the known tokens, and how drafts are watched."""

import head_checkpoints as heads
import numpy as np
import torch

from quire import LLM
from quire.contracts.kv_spec import KvSpec
from quire.kernels.native import load_native
from quire.kernels.reference.attention import AttentionMetadata
from quire.kv.pool import KvPool
from quire.model.build import build_model, load_model
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.heads.build import build_head, read_layer_head
from quire.model.token_runs import TokenRuns, address_of
from quire.speculate.head_pass import HeadPass

MAKERS = {
    "eagle": heads.eagle1,
    "eagle3": heads.eagle3,
    "eagle3 narrow": lambda folder: heads.eagle3(folder, layers=(1,)),
    "eagle3 normed residual": lambda folder: heads.eagle3(folder, norm_before_residual=True),
    "mtp": heads.mtp,
}


def run_of(token_ids, num_blocks=4):
    """Return the tokens of one sequence from position 0 on, in blocks 0, 1, ..."""
    table = np.arange(num_blocks)
    return TokenRuns(token_ids, [0, len(token_ids)], [len(token_ids)], [table], [address_of(table)])


def decoders(folder):
    """The target by torch, and natively where that can be."""
    spec = read_model_spec(folder)
    found = [load_model(folder)]
    if load_native() is not None:
        found.append(build_model(spec, open_parameters(folder, spec), 256, 16))
    return found


def one_sequence(spec, length):
    kv = KvPool(KvSpec.of(spec, 16, "float32"), 4)
    slots = torch.arange(length)
    return kv, slots, AttentionMetadata(slots, [0, length], [length], torch.arange(4)[None])


PROMPTS = [list(range(20, 90)), [7, 8, 9], [5] * 33, [*range(20, 84), 1, 2, 3], list(range(100, 133))]


def start(model, kind, folder, **options):
    config = {"method": kind.split()[0], "model": str(folder), "num_speculative_tokens": 3, "adaptive": False}
    config |= {"draft_p_min": 0.0}  # weights are random: such a head is sure of nothing
    config |= options.pop("drafting", {})
    return LLM(str(model), **{"max_num_seqs": 8, "num_kv_blocks": 80, "speculative_config": config, **options})


def spy(llm):
    """Return the list that what is drafted will stand in: known tokens, and drafts."""
    proposer = llm.llm_engine.speculator.proposer
    propose, seen = proposer.propose, []

    def note(wanted):
        known = [tuple(sequence.token_ids) for sequence, _ in wanted]
        drafts = propose(wanted)
        seen.extend((tokens, draft.tokens if draft.is_chain else draft) for tokens, draft in zip(known, drafts, strict=True))
        return drafts

    proposer.propose = note
    return seen


class Oracle:
    """Drafts from a fresh run of the model over all known tokens."""

    def __init__(self, model, folder, kind):
        spec = read_model_spec(model)
        self.target = build_model(spec, open_parameters(model, spec), 256, 16)
        self.head = read_layer_head(folder, kind.split()[0], spec)
        self.model = build_head(self.head, self.target, 256)
        self.target.keep_inputs(self.head.aux_hidden_state_layers)

    def draft(self, tokens, count):
        first, own = self.read(tokens)
        return tuple(self.model.draft(run_of(tokens[1:], 16), [0], own, first.features, [count])[0])

    def read(self, tokens):
        """Return the pass over all known tokens, and an empty cache for it."""
        length = len(tokens) - 1
        kv = KvPool(KvSpec.of(self.target.spec, 16, "float32"), 16)
        positions = torch.arange(length)
        step = AttentionMetadata(positions, [0, length], [length], torch.arange(16)[None])
        rows = list(range(length))
        self.target.step(torch.tensor(tokens[:-1]), positions, step, kv, [length - 1], True, rows)
        features = self.target.layer_inputs(rows) if self.head.aux_hidden_state_layers else self.target.hidden_states(0, length)
        own = KvPool(KvSpec.of(self.head.body, 16, "float32"), 16)
        return HeadPass(torch.tensor(tokens[1:]), positions, step, features), own
