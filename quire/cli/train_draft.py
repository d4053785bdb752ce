"""`quire train-draft`: train a head that drafts for a model."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from quire.cli import options
from quire.training.config import KINDS, DraftTraining

_DEFAULTS = {
    field.name: field.default for field in dataclasses.fields(DraftTraining) if field.default is not dataclasses.MISSING
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "train-draft",
        **options.PARSER,
        help="train a head that drafts for a model",
        description=f"{__doc__} It learns from text that the model itself generates. If stopped, and started again with the "
        "same arguments, it continues.",
    )
    parser.add_argument("--kind", choices=KINDS, required=True, help="kind of the head")
    parser.add_argument("model", help="folder, hub id, or a bundled model: demo, demo-draft, demo-moe")
    parser.add_argument("text", type=Path, metavar="DATA", help="a text file, or a folder with .txt and .md files")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write the head to")
    parser.add_argument(
        "--minutes",
        type=float,
        help="time to train, over all starts together; before, the model writes the text that the head learns from",
    )
    parser.add_argument("--sequence-tokens", type=int, help="tokens of a training sequence")
    parser.add_argument("--prompt-tokens", type=int, help="how many of them are text; the model writes the others")
    parser.add_argument("--num-sequences", type=int, help="sequences at most")
    parser.add_argument("--sampled-share", type=float, help="share that the model samples at temperature 0.8, not greedily")
    parser.add_argument("--batch-tokens", type=int, help="tokens of a training step")
    parser.add_argument("--num-steps-ahead", type=int, help="tokens ahead that are learned; of medusa, heads")
    parser.add_argument("--draft-vocab-size", type=int, help="draft the most frequent tokens only; 32000 at most, if not given")
    parser.add_argument(
        "--aux-hidden-state-layers",
        "--tap-layers",
        type=int,
        nargs=3,
        help="layers whose inputs eagle3 reads; 2, n // 2, n - 3, if not given",
    )
    parser.add_argument("--learning-rate", type=float, help="of the matrices")
    parser.add_argument(
        "--start-from", metavar="HEAD", help="continue from a head of the same shapes: a folder, or a bundled one"
    )
    parser.add_argument("--num-threads", type=int, help="threads to compute with")
    parser.add_argument("--seed", type=int, help="same seed, same batches")
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    options.add_common_options(parser)
    parser.set_defaults(run=run, **_DEFAULTS)


def run(args: argparse.Namespace) -> int:
    """Train and print what came of it."""
    chosen = {name: getattr(args, name) for name in _DEFAULTS}
    if chosen["aux_hidden_state_layers"] is not None:
        chosen["aux_hidden_state_layers"] = tuple(chosen["aux_hidden_state_layers"])
    wanted = DraftTraining(kind=args.kind, model=args.model, text=args.text.expanduser(), out=args.out.expanduser(), **chosen)
    from quire.training.loop import train_draft

    trained = train_draft(wanted, args.progress)
    shares = " ".join(f"{share:.3f}" for share in trained.agreement)
    effort = f"{trained.num_steps:,} steps, {trained.seconds / 60:.1f} minutes"
    print(f"{trained.folder}: {trained.num_parameters:,} parameters, {effort}")
    print(f"held-out agreement on the most likely token, by tokens ahead: {shares}")
    return 0
