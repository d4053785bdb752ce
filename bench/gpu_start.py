"""How long an engine on a GPU takes from nothing to its first token, for bench/gpu.py: a fresh process each time, by stage.

`python bench/gpu_start.py SINCE FOLDER OPTIONS` is that process: it prints a line of JSON. SINCE is when it was started, as
time.time() has it, and OPTIONS are the engine's, as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from gpu_model import Place, Shape

Row = dict[str, object]
Made = TypeVar("Made")
_ROOT = Path(__file__).resolve().parents[1]
_SHOWN_ERROR = 2000


def start_rows(place: Place, shape: Shape, until_s: float) -> Iterator[Row]:
    """Yield the stages of a start with an empty cache of Triton's, and of one with what that left there.

    The engine has its defaults, but for what a try without a GPU needs. The checkpoint is in the system's memory either way.

    until_s  as time.perf_counter has it: no start goes on behind that
    """
    from gpu_model import write_random_model

    folder = write_random_model(shape, place.folder / shape.name)
    options: dict[str, object] = {"device": place.engine_device, "skip_tokenizer_init": True}
    options |= {"max_num_seqs": 4, "max_model_len": 96, "num_kv_blocks": 16} if place.is_tiny else {}
    cache = Path(tempfile.mkdtemp(dir=place.folder))
    for is_cold in (True, False):
        left_s = until_s - time.perf_counter()
        if left_s <= 0:
            return
        row: Row = {"section": "start", "model": shape.name, "is_cold": is_cold}
        command = [sys.executable, str(Path(__file__)), str(time.time()), str(folder), json.dumps(options)]
        environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(_ROOT)}
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=left_s, check=False)
        except subprocess.TimeoutExpired:
            yield row | {"error": f"stopped after {left_s:.0f} s"}
            return
        if done.returncode != 0:
            yield row | {"error": f"ended with {done.returncode}", "output": done.stderr[-_SHOWN_ERROR:]}
            return
        stages = json.loads(done.stdout.splitlines()[-1])
        yield row | stages


def stages_of_start(since_s: float, folder: str, options: dict[str, object]) -> dict[str, float]:
    """Return the seconds of each stage, in this process, which began at `since_s`.

    import_s       of Python, torch, Triton and the engine
    device_s       until the device has taken its first tensor
    weights_s      of weights to the device, compiling going on beside it
    compile_s      that launches then still waited for their kernels
    rest_s         of the engine's other parts: reading its config, the memory plan with its largest step, the first capture
    ready_s        of all of these but the imports
    first_token_s  of a prompt of three tokens
    compiled_s     until all kernels were compiled, in the background
    """
    import torch

    from quire import LLM, SamplingParams
    from quire.worker.device import build
    from quire.worker.device.precompile import Precompilation

    spent: dict[str, float] = {"weights_s": 0.0, "compile_s": 0.0}
    build.DeviceDecoder = timed(build.DeviceDecoder, spent, "weights_s")
    Precompilation.wait_for = timed(Precompilation.wait_for, spent, "compile_s")
    times = [since_s, time.time()]
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    times.append(time.time())
    llm = LLM(folder, **options)
    times.append(time.time())
    spent_before = dict(spent)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate([[1, 2, 3]], params, use_tqdm=False)
    times.append(time.time())
    for thread in threading.enumerate():
        if thread.name == "precompile":
            thread.join()
    compiled_s = time.time() - times[0]
    llm.close()
    imported, device, loaded, first_token = (after - before for before, after in itertools.pairwise(times))
    found = {"import_s": imported, "device_s": device, **spent_before, "rest_s": loaded - sum(spent_before.values())}
    return {
        **found,
        "ready_s": device + loaded,
        "first_token_s": first_token,
        "total_s": times[-1] - times[0],
        "compiled_s": compiled_s,
    }


def timed(make: Callable[..., Made], spent: dict[str, float], stage: str) -> Callable[..., Made]:
    """Return what does the same, and adds the seconds that it takes to a stage."""

    def run(*arguments: object, **named: object) -> Made:
        begun_s = time.time()
        made = make(*arguments, **named)
        spent[stage] += time.time() - begun_s
        return made

    return run


if __name__ == "__main__":
    since, checkpoint, chosen = sys.argv[1:]
    print(json.dumps(stages_of_start(float(since), checkpoint, json.loads(chosen))))
