"""The process that says how much memory models need, one line of JSON for each file of options of `quire serve`."""

from __future__ import annotations

import json
import sys

from quire.base.errors import QuireError
from quire.base.logging import setup_logging
from quire.cli import options
from quire.cli.main import make_parser


def measure(path: str) -> dict[str, object]:
    """Return the fields of MeasuredModel, or the error of a model that cannot be read."""
    from quire.engine.inspect import check_weights, inspect_model
    from quire.engine.replica_setup import replica_setups

    args = make_parser().parse_args(["serve", "--config", path])
    try:
        config = options.engine_config(args, takes_replicas=True)
        # On GPUs each replica has the memory of its own device.
        num_replicas = config.data_parallel_size
        config = replica_setups(config)[0].config
        report = inspect_model(config)
        check_weights(report)
    except (QuireError, OSError) as error:
        return {"error": str(error)}
    plan = report.memory
    if report.device.startswith("cuda"):
        num_replicas = 1
    speculative = config.speculative_config
    return {
        "device": report.device,
        "available_bytes": plan.available_bytes * num_replicas,
        "needed_bytes": plan.needed_bytes * num_replicas,
        "num_kv_blocks": plan.num_kv_blocks,
        "has_draft_model": speculative is not None and speculative.model is not None,
    }


def main(paths: list[str]) -> int:
    """Print the lines."""
    setup_logging("WARNING")
    for path in paths:
        print(json.dumps(measure(path)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
