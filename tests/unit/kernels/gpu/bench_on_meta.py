"""Runs sections of bench/gpu.py at their real sizes where nothing has memory, not interpreted; prints a line of JSON."""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from quire.kernels.triton.launching import collected_launches

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "bench"))

import gpu_kernels
import gpu_launches
import gpu_model
import gpu_products
import gpu_profile
import gpu_prompts

FOREVER = float("inf")


class Capturer:
    def capture(self, step):
        step()
        return lambda: None


def prompt_kernels(place):
    """Returns the kernels of attention by whether attend_runs is forced, sequences of a step, and tokens."""
    found = {}
    with torch.inference_mode(), collected_launches() as launches:
        seen = 0
        for row in gpu_prompts.prompt_rows(place, gpu_model.SMALL, FOREVER):
            names = {launch.kernel.__name__ for launch in launches[seen:] if launch.kernel.__name__.startswith("attend")}
            seen = len(launches)
            if "tokens" in row:
                found[f"{row['tokens']} of {row['max_num_seqs']}{' forced' if row['is_forced'] else ''}"] = sorted(names)
    return found


def product_kernels():
    """Returns the ways of products of 4-bit weights with 256 tokens, and the kernels that each launches."""
    shapes, size, found = gpu_kernels.Shapes(torch.device("meta"), False), (6144, 4096), {}
    x, weight = shapes.random(256, 4096), gpu_products.make_weight("int4", size, shapes)
    for label, run in gpu_products.ways("int4", "qkv", x, size):
        with collected_launches() as launches:
            run(weight)
        found[label] = [launch.kernel.__name__ for launch in launches]
    return found


def main():
    for module in (gpu_model, gpu_profile, gpu_prompts):
        module.stamped_capturer = lambda _: gpu_launches.StampedCapturer(Capturer(), time.perf_counter)
    gpu_model.Place.is_tiny = False
    gpu_model.serving_variants, gpu_model.compile_all = lambda *_: [], lambda *_: []  # tested by themselves
    gpu_model.GpuStepExecutor.read_sampled = lambda *_: None
    with tempfile.TemporaryDirectory() as folder:
        place = gpu_model.Place("cuda", torch.device("meta"), 1.0, 1.0, Path(folder))
        with torch.inference_mode(), collected_launches():
            decoded = list(gpu_model.decode_rows(place, gpu_model.LARGE, FOREVER, gpu_model.Options("int4")))
            adapted = list(gpu_model.adapter_rows(place, gpu_model.SMALL, FOREVER))
            profiled = list(gpu_profile.profile_rows(place, gpu_model.SMALL, FOREVER))
        print()  # behind what the profiler prints
        rows = {"decode": decoded, "adapters": adapted, "profile": profiled}
        errors = [row for found in rows.values() for row in found if "error" in row]
        counts = {name: len(found) for name, found in rows.items()}
        print(json.dumps({"counts": counts, "errors": errors, "kernels": prompt_kernels(place), "products": product_kernels()}))


if __name__ == "__main__":
    main()
