# ruff: noqa: E402 - the interpreter is chosen, and the source tree found, before anything of either is imported
"""Test and time the GPU's kernels and whole models, from the source tree, in one run: `python bench/gpu.py --out gpu.json`.

Sections in the order of what they are worth, each in a process of its own with a limit of time; the results so far are written
after each. --smoke runs tiny shapes once wherever the kernels run, the interpreter included, and times nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
if "--smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from gpu_sections import Row, Section, run_all_sections, write_rows
from gpu_tests import files_for_a_gpu, pytest_command, run_test_files

SECTIONS = [
    Section("roofline", 20),
    Section("tests", 100),
    Section("decode-small", 40),
    Section("few", 25),
    Section("engine", 80),
    Section("start", 45),
    Section("decode-large", 45),
    Section("kernels", 45),
    Section("products", 60),
    Section("decode-large-fp8", 25),
    Section("decode-large-int4", 25),
    Section("decode-large-mixed-kv", 25),
    Section("in-order-large", 20),
    Section("in-order-small", 15),
    Section("launches", 10),
    Section("sampling", 40),
    Section("ranks", 40),
    Section("tiers", 35),
    Section("profile", 40),
]
MODELS = {
    "decode-small": (True, "bf16", False),
    "decode-large": (False, "bf16", False),
    "decode-large-fp8": (False, "fp8", False),
    "decode-large-int4": (False, "int4", False),
    "decode-large-mixed-kv": (False, "bf16", False, "k8v4"),
    "in-order-small": (True, "bf16", True),
    "in-order-large": (False, "bf16", True),
}
"""Of a section: whether the model is the small one, and its gpu_model.Options."""

_SMOKE_LIMIT_S = 600
_TESTS_AT_ONCE = 16
"""Files; each has a core to compile on, and a context on the device."""

_SECONDS_TO_STOP = 12
"""What tests that are stopped have to sum up what they have found."""


def section_rows(
    name: str, is_smoke: bool, peaks: tuple[float, float], folder: Path, limit_s: float, logs: Path
) -> Iterator[Row]:
    """Yield the rows of a section, in its own process; whole outputs of tests are written to logs / "tests"."""
    import gpu_few
    import gpu_kernels
    import gpu_launches
    import gpu_model
    import gpu_products
    import gpu_profile
    import gpu_ranks
    import gpu_sampling
    import gpu_start
    import gpu_tiers
    import torch

    device = torch.device("cpu") if is_smoke else torch.device("cuda", 0)
    until_s = time.perf_counter() + limit_s
    place = gpu_model.Place("interpreter" if is_smoke else "cuda", device, *peaks, folder)
    small, large = (gpu_model.TINY, gpu_model.TINY) if is_smoke else (gpu_model.SMALL, gpu_model.LARGE)
    if name == "roofline":
        yield {"section": name, **gpu_kernels.environment(device), **gpu_kernels.measure_roofline(device)}
    elif name == "tests":
        yield from test_rows(is_smoke, limit_s - _SECONDS_TO_STOP, logs / "tests")
    elif name == "engine":
        yield from gpu_model.engine_rows(place, until_s)
    elif name == "start":
        shape = gpu_model.TINY if is_smoke else gpu_model.SMALL
        checkpoint = gpu_model.write_random_model(shape, folder / shape.name)
        yield from gpu_start.start_rows(shape.name, checkpoint, gpu_model.start_options(place), folder / "cache", until_s)
    elif name == "profile":
        yield from gpu_profile.profile_rows(place, small, until_s)
    elif name == "ranks":
        yield from gpu_ranks.rank_rows(place, small, until_s)
    elif name == "sampling":
        yield from gpu_sampling.sampling_rows(place, small, until_s)
    elif name == "tiers":
        yield from gpu_tiers.tier_rows(place, small, until_s)
    elif name == "launches":
        yield from gpu_launches.launch_rows(device)
    elif name == "products":
        yield from gpu_products.product_rows(device, is_smoke, peaks, until_s)
    elif name == "kernels":
        yield from gpu_kernels.case_rows(name, gpu_kernels.Shapes(device, is_smoke).all(), is_smoke, peaks, until_s)
    elif name == "few":
        yield from gpu_few.few_rows(device, is_smoke, peaks, until_s)
    else:
        is_small, *options = MODELS[name]
        yield from gpu_model.decode_rows(place, small if is_small else large, until_s, gpu_model.Options(*options))


def test_rows(is_smoke: bool, limit_s: float, folder: Path) -> Iterator[Row]:
    """Yield what became of the kernels' tests on this device, file by file; is_smoke: of finding the tests of one.

    folder  where their whole outputs are written
    """
    names = files_for_a_gpu()[:1] if is_smoke else files_for_a_gpu()

    def command_of(name: str) -> list[str]:
        return [*pytest_command(name), "--collect-only"] if is_smoke else pytest_command(name)

    for row in run_test_files(names, command_of, limit_s, min(_TESTS_AT_ONCE, os.cpu_count() or 1), folder):
        yield {"section": "tests", **row}


def measure(sections: list[Section], is_smoke: bool, budget_s: float, out: Path, logs: Path) -> bool:
    """Run sections, write the results so far after each, and print them; returns whether none failed.

    logs  a folder that whole outputs of sections and of tests are written to
    """
    from gpu_profile_table import profile_table

    found: dict[str, list[Row]] = {}

    def command_of(section: Section, rows: list[Row]) -> list[str]:
        peaks = next((row for row in rows if "read_tbs" in row), {"read_tbs": 4.3, "bf16_tflops": 790.0})
        command = [
            sys.executable,
            str(Path(__file__)),
            "--section",
            section.name,
            "--rows",
            str(folder / f"{section.name}.jsonl"),
        ]
        command += ["--peaks", f"{peaks['read_tbs']},{peaks['bf16_tflops']}", "--budget", str(section.limit_s)]
        command += ["--logs", str(logs)]
        return [*command, "--smoke"] if is_smoke else command

    def take(section: Section, rows: list[Row]) -> None:
        found[section.name] = rows
        out.write_text(json.dumps(found, indent=1))
        for row in rows:
            shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}
            print(f"{section.name:20} {shown}", flush=True)
        if table := profile_table(rows):
            print(table, flush=True)

    folder = logs / "sections"
    folder.mkdir(parents=True, exist_ok=True)
    run_all_sections(sections, command_of, folder, budget_s, take)
    return not any("error" in row for rows in found.values() for row in rows)


def logs_folder(asked: Path | None, out: Path) -> Path:
    """Return where whole outputs are written: what $OUT names comes back from a machine that is lent."""
    if asked is not None:
        return asked
    lent = os.environ.get("OUT")
    return Path(lent) if lent else out.with_suffix(".logs")


def main() -> None:
    """Parse the command line and run."""
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(description="Test and time the GPU kernels.")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="where the results are written, as JSON")
    parser.add_argument(
        "--logs", type=Path, help="a folder for whole outputs of sections and of tests; without it $OUT, else --out with .logs"
    )
    parser.add_argument("--budget", type=float, default=470.0, help="seconds for all sections together")
    parser.add_argument("--only", default="", help=f"names of sections with commas between: {', '.join(names)}")
    parser.add_argument("--smoke", action="store_true", help="run tiny shapes once, without a GPU, and time nothing")
    parser.add_argument("--section", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--peaks", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.section is not None:
        read_tbs, tflops = map(float, options.peaks.split(","))
        with tempfile.TemporaryDirectory() as folder:
            peaks = read_tbs * 1e12, tflops * 1e12
            rows = section_rows(options.section, options.smoke, peaks, Path(folder), options.budget, options.logs)
            write_rows(rows, options.rows)
        return
    chosen = options.only.split(",") if options.only else names
    unknown = set(chosen) - set(names)
    if unknown:
        parser.error(f"--only names no section: {', '.join(sorted(unknown))}")
    # nvidia-smi rather than torch: this process must not take any of the device's memory.
    if not options.smoke and subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode != 0:
        parser.error("there is no NVIDIA GPU here; --smoke tries the script without one")
    sections = [section for section in SECTIONS if section.name in chosen]
    if options.smoke:  # the interpreter is slow
        sections = [replace(section, limit_s=_SMOKE_LIMIT_S) for section in sections]
        options.budget = _SMOKE_LIMIT_S * len(sections)
    is_fine = measure(sections, options.smoke, options.budget, options.out, logs_folder(options.logs, options.out))
    sys.exit(0 if is_fine else 1)


if __name__ == "__main__":
    main()
