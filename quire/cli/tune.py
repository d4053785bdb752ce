"""`quire tune`: measure the fastest tile sizes of the kernels on this machine's GPU."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from quire.base.errors import ConfigError
from quire.cli import options

KERNELS = (
    "attention-decode", "attention-prefill", "attention-prefill-hopper", "fused-attention", "fused-linear", "fused-quantized",
    "linear", "linear-large-batch", "float8", "experts",
)  # fmt: skip
"""What a table of tiles has entries for."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "tune",
        **options.PARSER,
        help="measure which tiles are fastest for the kernels on this machine's GPU",
        description=f"{__doc__} Engines on the same kind of GPU then start with them; nothing is tuned when they start.",
    )
    parser.add_argument("--output", type=Path, help="JSON file for --tile-table; None: where engines find it by themselves")
    what = "tune this one alone; may be given several times; else all but linear-large-batch"
    parser.add_argument("--kernel", action="append", choices=KERNELS, help=what)
    options.add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Tune and print where the table is. Raises ConfigError without a GPU, or without Triton."""
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("the kernels of a GPU need Triton: pip install 'quire[gpu]' on the machine that has the GPU")
    from quire.bench.tuning import tune_device

    print(tune_device(args.output, args.kernel))
    return 0
