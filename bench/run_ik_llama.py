"""ik_llama.cpp over workloads, with run-time repacking; prints a JSON line for each.

    python bench/run_ik_llama.py PEERS FILE.gguf NAME...

PEERS is ../shared/bench/peers, which defines the workloads. Needs ik-llama-cpp-python 0.1.5. bench/peers.py starts it.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import time
from typing import Any

NUM_THREADS = 2
Row = tuple[int, int, int, bool]  # token, position, sequence, and whether its logits are wanted


class Engine:
    """A model, and a context of sixteen sequences and 8,192 tokens."""

    def __init__(self, path: str) -> None:
        import ik_llama_cpp._ctypes_api as api

        self._api: Any = api
        api.llama_backend_init()
        model_params = api.llama_model_default_params()
        model_params.repack_tensors, model_params.use_mmap = True, False
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 8192, 4096, 512, 16
        params.n_threads = params.n_threads_batch = NUM_THREADS
        params.flash_attn = True
        model = api.llama_model_load_from_file(path.encode(), model_params)
        self._context = api.llama_init_from_model(model, params)
        self._synchronize = api._lib.llama_synchronize
        self._synchronize.argtypes, self._synchronize.restype = [ctypes.c_void_p], None

    def decode(self, rows: list[Row]) -> None:
        """Compute rows. Raises RuntimeError if the engine refuses them."""
        batch = self._api.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, is_wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, is_wanted
            batch.seq_id[i][0] = sequence
        status = self._api.llama_decode(self._context, batch)
        self._synchronize(self._context)
        self._api.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def seconds(self, num_sequences: int, prompt: int, output: int) -> float:
        """Return how long prompts of random tokens, one after another, and outputs together take."""
        rng = random.Random(0)
        self._api.llama_kv_cache_clear(self._context)
        start = time.perf_counter()
        for sequence in range(num_sequences):
            self.decode([(rng.randrange(10000), p, sequence, p == prompt - 1) for p in range(prompt)])
        for step in range(output - 1):
            self.decode([(rng.randrange(10000), prompt + step, sequence, True) for sequence in range(num_sequences)])
        return time.perf_counter() - start


def main(peers: str, path: str, names: list[str]) -> None:
    """Run the workloads that are named."""
    sys.path.insert(0, peers)
    from workloads import WORKLOADS

    engine = Engine(path)
    for name in names:
        num_sequences, prompt, output, counted = WORKLOADS[name]
        line: dict[str, Any] = {"engine": "ik_llama.cpp", "workload": name}
        try:
            engine.seconds(num_sequences, prompt, min(output, 4))
            elapsed = engine.seconds(num_sequences, prompt, output)
            line["tokens_per_s"] = num_sequences * (output if counted == "output" else prompt) / elapsed
        except RuntimeError as error:
            line["error"] = str(error)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
