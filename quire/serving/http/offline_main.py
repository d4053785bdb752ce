"""run_batch_file: assembles the parts of `quire batch run`."""

from __future__ import annotations

import asyncio
import sys
import time

from tqdm import tqdm

from quire.base.logging import get_logger
from quire.contracts.config import EngineConfig
from quire.serving.batch.execution import BATCH_ENDPOINTS, check_batch_body
from quire.serving.batch.offline import BatchFiles, BatchProgress, read_input, run_file
from quire.serving.config import ServerConfig
from quire.serving.http.main import Server

logger = get_logger(__name__)


def run_batch_file(
    files: BatchFiles, config: ServerConfig, engine_config: EngineConfig, is_overwriting: bool, log_level: str = "INFO"
) -> BatchProgress:
    """Run a file with its own engine and a progress bar; return the final progress. log_level: of the engine's process. Raises
    QuireError."""
    spans = read_input(files.input_path, BATCH_ENDPOINTS, check_batch_body)

    async def run() -> BatchProgress:
        server = Server.of(config, engine_config, log_level)
        server.responses.keeps_responses = False
        client = server.client
        await client.start()
        try:
            await server.load_model()
            await server.lora.load_modules(config.lora_modules)
            started_s = time.monotonic()
            with tqdm(total=len(spans), unit="request", file=sys.stderr, disable=None) as bar:  # no bar without a terminal

                def show(progress: BatchProgress) -> None:
                    bar.update(progress.num_done - bar.n)
                    rate = progress.num_output_tokens / max(1e-9, time.monotonic() - started_s)
                    bar.set_postfix_str(f"{rate:.0f} tokens/s, {progress.num_failed} failed", refresh=False)

                return await run_file(
                    files,
                    spans,
                    server.execute(),
                    server.gateway.batch_window,
                    is_overwriting=is_overwriting,
                    on_progress=show,
                )
        finally:
            await client.close()

    return asyncio.run(run())
