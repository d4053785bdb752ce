"""`quire calibrate-tree`: find the best draft tree for Medusa heads, on text that the model itself generates."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from quire.cli import options


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "calibrate-tree",
        **options.PARSER,
        help="find the tree that Medusa heads draft best",
        description=f"{__doc__} What it prints last goes to --speculative-config; with --save it is stored with the heads, "
        "which draft it from then on.",
    )
    parser.add_argument("model", help="folder, hub id, or a bundled model: demo, demo-draft, demo-moe")
    parser.add_argument("head", help="folder or hub id of its Medusa heads, or demo-medusa")
    parser.add_argument(
        "text", type=Path, help="a text file, or a folder with .txt and .md files, that the heads did not learn"
    )
    parser.add_argument("--num-nodes", type=int, default=32, help="tokens of the tree")
    parser.add_argument("--num-sequences", type=int, default=64, help="sequences that the model writes")
    parser.add_argument("--sequence-tokens", type=int, default=256, help="tokens of each")
    parser.add_argument("--prompt-tokens", type=int, default=96, help="how many of them are text; the model writes the others")
    parser.add_argument("--num-threads", type=int, help="threads to compute with")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same sequences")
    parser.add_argument("--save", action="store_true", help="store the tree in the heads' config.json")
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    options.add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Calibrate and print what was found."""
    from quire.model.resolve import resolve_model
    from quire.training.config import DraftTraining
    from quire.training.medusa_tree import calibrate_tree, store_tree

    with tempfile.TemporaryDirectory() as folder:
        wanted = DraftTraining(
            kind="medusa",
            model=args.model,
            text=args.text.expanduser(),
            out=Path(folder),
            num_sequences=args.num_sequences,
            sequence_tokens=args.sequence_tokens,
            prompt_tokens=args.prompt_tokens,
            batch_tokens=args.sequence_tokens,
            sampled_share=0.0,
            num_threads=args.num_threads,
            seed=args.seed,
        )
        tree = calibrate_tree(wanted, args.head, args.num_nodes, args.progress)
    for path, share in zip(tree.choices, tree.shares, strict=True):
        print(f"{share:.4f}  {list(path)}")
    print(f"{tree.tokens_per_step:.2f} tokens a greedy step with {len(tree.choices)} drafts, over {tree.num_places:,} places")
    if args.save:
        store_tree(resolve_model(args.head), tree)
    chosen = {"method": "medusa", "model": args.head, "num_speculative_tokens": len(tree.choices)}
    print(json.dumps(chosen if args.save else {**chosen, "medusa_choices": [list(path) for path in tree.choices]}))
    return 0
