"""Measure how much of attention could be skipped by bounds on keys: python tools/measure_key_bounds.py --text FILE

For the last queries of long prompts it prints, for several gaps, the share of runs of 16 cached tokens whose highest score is
further below the highest score of the query than the gap: by the scores themselves, and by the bound from the least and the
greatest value of each dimension of the run's keys (Quest, https://arxiv.org/abs/2406.10774).
"""

from __future__ import annotations

import argparse
import os

os.environ["QUIRE_NATIVE"] = "0"  # the scores are taken from the torch reference

import torch

import quire.model.decoder as decoder_module
from quire import LLM, SamplingParams
from quire.contracts.model_spec import AttentionSpec
from quire.kernels.reference.attention import AttentionMetadata

RUN = 16
GAPS = (
    ("weights are exactly 0, so that the bits are the same", 86.0),
    ("below the rounding of an f32 sum, 2^-24", 16.64),
    ("below the rounding of bf16, 2^-9", 6.24),
)


class Gaps:
    """Collects, for each query, head and run, how far the highest score and its bound are below the query's highest score."""

    def __init__(self, num_queries: int) -> None:
        self._num_queries = num_queries
        self.scores: list[torch.Tensor] = []
        self.bounds: list[torch.Tensor] = []

    def take(self, q: torch.Tensor, k_cache: torch.Tensor, step: AttentionMetadata, spec: AttentionSpec) -> None:
        """Take in the last queries of the only sequence of a step."""
        num_runs = (step.context_lens[0] - self._num_queries) // RUN  # those that all of the queries see
        blocks = step.block_tables[0, : -(-step.context_lens[0] // k_cache.shape[2])]
        keys = k_cache[blocks].transpose(1, 2).flatten(0, 1)[: num_runs * RUN].float()  # [N, K, D]
        keys = keys.view(num_runs, RUN, *keys.shape[1:])
        group = spec.num_heads // spec.num_kv_heads
        queries = q[-self._num_queries :].float().unflatten(1, (spec.num_kv_heads, group))  # [T, K, G, D]
        found = torch.einsum("tkgd,nrkd->tkgnr", queries, keys).amax(-1) * spec.scale
        low, high = keys.amin(1), keys.amax(1)
        positive, negative = queries.clamp(min=0), queries.clamp(max=0)
        bound = torch.einsum("tkgd,nkd->tkgn", positive, high) + torch.einsum("tkgd,nkd->tkgn", negative, low)
        highest = found.amax(-1, keepdim=True)
        self.scores.append((highest - found).flatten())
        self.bounds.append((highest - bound * spec.scale).flatten())


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", required=True)
    parser.add_argument("--length", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--num-queries", type=int, default=32, help="last tokens of each prompt that are measured")
    args = parser.parse_args()
    gaps, attend = Gaps(args.num_queries), decoder_module.attend

    def recording(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        step: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if q.shape[0] == args.length:
            gaps.take(q, k_cache, step, spec)
        return attend(q, k_cache, v_cache, step, spec, sinks)

    decoder_module.attend = recording
    llm = LLM(args.model, device="cpu", dtype="float32", max_num_seqs=1, num_kv_blocks=2 * args.length // RUN, num_threads=1)
    with open(args.text, encoding="utf-8") as file:
        tokens = llm.get_tokenizer().encode(file.read(), add_special_tokens=False)
    for index in range(args.num_prompts):
        start = index * (len(tokens) - args.length) // args.num_prompts
        prompt = {"prompt_token_ids": tokens[start : start + args.length]}
        llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0, detokenize=False), use_tqdm=False)
    llm.close()
    scores, bounds = torch.cat(gaps.scores), torch.cat(gaps.bounds)
    size = f"{args.num_prompts} prompts of {args.length} tokens: {scores.numel():,} runs"
    print(f"{args.model}, {size}, largest gap {scores.max():.1f}, by bounds {bounds.max():.1f}")
    for name, gap in GAPS:
        shares = [(found > gap).double().mean().item() for found in (scores, bounds)]
        print(f"{name} (gap {gap}): {shares[0]:.2%} by scores, {shares[1]:.2%} by bounds")


if __name__ == "__main__":
    main()
