"""Runs of the bundled model with real drafts: heads that were trained for it, so that runs of drafts are accepted."""

from collections import defaultdict

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.engine.scheduling import check_invariants

STORY = "It was late in the autumn when the old gentleman returned to the house, and he found that nobody had expected him."
PROMPTS = [
    STORY + " The servants had gone to the village, and the fire in the parlour was",
    'My friend rose from his chair and walked to the window. "You see," said he, "that the man who came here last night was',
    f"{STORY}\n\n{STORY}\n\nIt was late in",
    "The boys went down to the river as soon as it was dark, and they took the old boat that was tied under the trees. Tom",
]
# Prose within, so that what was trained on prose drafts runs that the constraint takes.
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["sailor", "detective", "gentleman"]},
        "said": {"type": "string", "minLength": 50, "maxLength": 90},
        "married": {"type": "boolean"},
    },
    "required": ["kind", "said", "married"],
    "additionalProperties": False,
}
SAMPLERS = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "bias": {"logit_bias": {4: 3.0, 9: -2.0}},
    "min_p": {"min_p": 0.05},
    "truncated": {"top_k": 20, "top_p": 0.9},
    "logprobs": {"logprobs": 2},
    "all": {"repetition_penalty": 1.1, "logit_bias": {9: -2.0}, "min_p": 0.02, "logprobs": 1},
}
# Sampler, temperature, and whether JSON is asked for; each stands at its seed.
REQUESTS = [(sampler, temperature, is_json) for sampler in SAMPLERS for temperature in (0, 1) for is_json in (False, True)]
EAGLE3, MTP, MEDUSA = (f"demo-{name}" for name in ("eagle3", "mtp", "medusa"))
BUNDLED = {
    "eagle3": {"method": "eagle3", "model": EAGLE3, "num_speculative_tokens": 6},
    "eagle3 whole": {"method": "eagle3", "model": EAGLE3, "num_speculative_tokens": 5, "draft_p_min": 0.0},
    "eagle3 tree": {"method": "eagle3", "model": EAGLE3, "draft_top_k": 3, "num_speculative_tokens": 12},
    "mtp": {"method": "mtp", "model": MTP, "num_speculative_tokens": 4},
    "mtp tree": {"method": "mtp", "model": MTP, "draft_top_k": 3, "num_speculative_tokens": 12},
    "medusa": {"method": "medusa", "model": MEDUSA, "draft_top_k": 1},
    "medusa tree": {"method": "medusa", "model": MEDUSA, "draft_top_k": 3},
    "draft_model": {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 5},
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "lookahead": {"method": "lookahead"},
    "self": {"method": "self", "skipped_layers": [4], "num_speculative_tokens": 4},
    "eagle3 merged": {"method": ["eagle3", "ngram", "suffix"], "model": EAGLE3, "num_speculative_tokens": 10},
    "medusa tree merged": {"method": ["medusa", "suffix"], "model": MEDUSA, "draft_top_k": 2, "num_speculative_tokens": 12},
    "eagle3 with others": {
        "method": ["eagle3", "medusa", "draft_model", "lookahead"],
        "model": {"eagle3": EAGLE3, "medusa": MEDUSA, "draft_model": "demo-draft"},
        "num_speculative_tokens": 24,
    },
    "draft_model merged": {"method": ["draft_model", "ngram"], "model": "demo-draft", "num_speculative_tokens": 10},
}


def params(seed, **more):
    sampler, temperature, is_json = REQUESTS[seed]
    asked = {"max_tokens": 32, "ignore_eos": True}
    if is_json:
        asked = {"max_tokens": 48, "structured_outputs": StructuredOutputsParams(json=SCHEMA, fit_max_tokens=False)}
    return SamplingParams(**{"temperature": temperature, "seed": seed, **asked, **SAMPLERS[sampler], **more})


def prompt(seed):
    return PROMPTS[seed // 4 % len(PROMPTS)]


def start(kind, **options):
    """Return the bundled model, which drafts as much as it may; None: nothing at all, what is forced included."""
    if kind is not None:
        options |= {"speculative_config": {"adaptive": False, **BUNDLED[kind], **options.pop("drafting", {})}}
    llm = LLM("demo", **{"num_threads": 1, "max_num_seqs": 8, "num_kv_blocks": 120, "max_model_len": 256, **options})
    if kind is None:
        llm.llm_engine.draft_forced(False)
    return llm


def generate(llm, seeds, **more):
    outputs = llm.generate([prompt(seed) for seed in seeds], [params(seed, **more) for seed in seeds], use_tqdm=False)
    check_invariants(llm.llm_engine.scheduler)
    return outputs


def said(choice):
    """What a client sees of a choice."""
    return choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason, choice.logprobs, choice.cumulative_logprob


def note_runs(engine):
    """Return by seed how many drafts are accepted in each step from now on, without those that were forced."""
    speculator, runs = engine.speculator, defaultdict(list)
    end = speculator.end

    def note(plan, paths):
        for key, path in paths.items():
            seed = speculator.followed[key].sequence.request.seed
            runs[seed].append(len(path) - min(len(path), len(speculator.forced.of(key))))
        return end(plan, paths)

    speculator.end = note
    return runs
