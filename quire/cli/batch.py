"""`quire batch`: run files of requests without a server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quire.base.errors import UnsupportedError
from quire.cli import lora_options, options


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("batch", **options.PARSER, help="run a file of requests", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run_parser = actions.add_parser(
        "run",
        **options.PARSER,
        help="answer every line of a file",
        description="Answer every line of a file in the format of the Batch API. Run again to continue after an interruption.",
    )
    run_parser.add_argument("-i", "--input-file", type=Path, required=True, help="JSON lines: custom_id, method, url, body")
    run_parser.add_argument("-o", "--output-file", type=Path, required=True, help="where the answers go")
    run_parser.add_argument(
        "--error-file", type=Path, help="file for failed requests; by default the output file's name with .errors"
    )
    run_parser.add_argument("--overwrite", action="store_true", help="start over if the output file exists")
    run_parser.add_argument("--served-model-name", nargs="+", default=(), help="names of the model in the lines; *: any")
    lora_options.add_lora_modules(run_parser)
    run_parser.add_argument("--tool-call-parser", default="auto", help="format of tool calls, as in `quire serve`")
    run_parser.add_argument("--reasoning-parser", default="auto", help="format of reasoning")
    options.add_model_argument(run_parser)
    options.add_engine_options(run_parser)
    options.add_common_options(run_parser)
    run_parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the file; 0 when every line has an answer, 1 when some failed."""
    engine_config = options.engine_config(args, takes_replicas=True)
    try:
        from quire.serving.batch.offline import BatchFiles
        from quire.serving.config import ServerConfig
        from quire.serving.http.offline_main import run_batch_file
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"this needs the package {error.name}, which is not installed: pip install 'quire[server]'"
        ) from None
    config = ServerConfig(
        served_model_names=tuple(args.served_model_name),
        lora_modules=lora_options.lora_modules(args),
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
    )
    output = args.output_file
    files = BatchFiles(args.input_file, output, args.error_file or output.with_suffix(f".errors{output.suffix}"))
    progress = run_batch_file(files, config, engine_config, args.overwrite, args.log_level.upper())
    failed = f", {progress.num_failed} failed: see {files.error_path}" if progress.num_failed else ""
    print(
        f"{progress.num_done} of {progress.num_lines} requests done{failed}; {progress.num_input_tokens} prompt and "
        f"{progress.num_output_tokens} output tokens",
        file=sys.stderr,
    )
    return 1 if progress.num_failed else 0
