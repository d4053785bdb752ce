"""Counts the hosts that a token's experts are on, with and without placing experts that are chosen together on one host.

    python bench/expert_hosts.py MODEL TEXT --ranks 4 --hosts 2

MODEL is a folder that transformers runs with output_router_logits. The first half of the text is what is counted; the second
half is what the placements are compared on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from quire.parallel.expert_balance import place
from quire.parallel.expert_placement import ExpertPlacement
from quire.text.tokenizer import load_tokenizer


def num_hosts_of(placement: ExpertPlacement, routes: np.ndarray, num_hosts: int) -> float:
    """Return on how many hosts the experts of a token [T, K] are, on average; no expert has copies."""
    host = np.zeros(placement.num_experts, np.int64)
    for rank, own in enumerate(placement.ranks):
        host[list(own)] = rank * num_hosts // len(placement.ranks)
    return float((host[routes][:, :, None] == np.arange(num_hosts)).any(1).sum(1).mean())


@torch.inference_mode()
def main() -> None:
    """Print for each layer the hosts of a token, and max/mean of the ranks, with both placements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=2)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model)
    ids = torch.tensor(load_tokenizer(args.model).encode(args.text.read_text()[:40_000])[:8192]).split(512)
    found = [model(part[None], output_router_logits=True).router_logits for part in ids]
    for layer, parts in enumerate(zip(*found, strict=True)):
        logits = torch.cat(parts).float()
        routes = logits.topk(model.config.num_experts_per_tok).indices.numpy()
        half, num_experts = len(routes) // 2, logits.shape[1]
        chosen = np.zeros((half, num_experts), np.int64)
        np.put_along_axis(chosen, routes[:half], 1, 1)
        load, counts = chosen.sum(0), (num_experts // args.ranks,) * args.ranks
        later = np.bincount(routes[half:].ravel(), minlength=num_experts)
        for name, options in (("by load", ()), ("by pairs", (None, args.hosts, chosen.T @ chosen))):
            placement = place(load, counts, *options)
            hosts = num_hosts_of(placement, routes[half:], args.hosts)
            print(f"layer {layer} {name:9} hosts of a token {hosts:.3f}, max/mean {placement.imbalance(later):.3f}")


if __name__ == "__main__":
    main()
