"""What the direct path from a message of the engine to the socket saves of the HTTP process's CPU time.

    python -m bench.direct_path [STREAMS] [TOKENS] [ROUNDS]

Two servers of the demo model, one whose streams always go through the task of their request, take turns with the same streams.
"""

import asyncio
import os
import statistics
import sys
from pathlib import Path

import httpx

from tests.e2e.server_process import ServerProcess

WITHOUT = "from quire.serving.core.sinks import DirectFrames\nDirectFrames.is_open = property(lambda self: False)"


def cpu_s(process_id: int) -> float:
    """Return the CPU seconds of a process and all its threads so far."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def stream_all(url: str, num_streams: int, num_tokens: int) -> None:
    """Read so many streams of so many tokens at the same time."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def read(seed: int) -> None:
            message = {"role": "user", "content": f"Tell me {seed}"}
            body = {"model": "demo", "messages": [message], "max_tokens": num_tokens, "ignore_eos": True, "seed": seed}
            async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
                answer.raise_for_status()
                async for _ in answer.aiter_raw():
                    pass

        await asyncio.gather(*map(read, range(num_streams)))


def main(num_streams: int = 16, num_tokens: int = 900, num_rounds: int = 6) -> None:
    """Print microseconds for each token with and without it, and the median of the rounds' savings."""
    servers = {
        name: ServerProcess("--max-num-seqs", str(num_streams), prelude=code)
        for name, code in (("with", None), ("without", WITHOUT))
    }
    rounds = []
    try:
        for server in servers.values():
            server.wait_for(lambda server=server: server.get("/ready").status_code == 200)
            asyncio.run(stream_all(server.url, num_streams, num_tokens))
        for index in range(num_rounds):
            found = {}
            for name in sorted(servers, reverse=index % 2 == 1):
                before = cpu_s(servers[name].process.pid)
                asyncio.run(stream_all(servers[name].url, num_streams, num_tokens))
                found[name] = (cpu_s(servers[name].process.pid) - before) * 1e6 / (num_streams * num_tokens)
            rounds.append(found)
            print("  ".join(f"{name} {value:.1f} us/token" for name, value in sorted(found.items())), flush=True)
    finally:
        for server in servers.values():
            server.process.terminate()
            server.process.wait()
    print(f"saved: {100 * statistics.median(1 - found['with'] / found['without'] for found in rounds):.0f} %")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
