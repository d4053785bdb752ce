# ruff: noqa: E402 - the interpreter is chosen, and the source tree found, before anything of either is imported
"""Test and time the GPU's kernels and whole models, from the source tree: `python bench/gpu.py --out gpu.json`.

Sections in the order of what they are worth, each in a process of its own with a limit of time; the results so far are written
after each. --smoke runs tiny shapes once wherever the kernels run, the interpreter included, and times nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
if "--smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from gpu_goals import goals_table
from gpu_profile_table import profile_table
from gpu_sections import Row, Section, is_measured, pack, read_record, record_text, run_all_sections, write_rows
from gpu_tests import files_for_a_gpu, pytest_command, run_test_files

SECTIONS = [
    Section("roofline", 20),
    Section("tests", 150),
    Section("decode-small", 45),
    Section("engine", 60),
    Section("start", 45),
    Section("decode-large", 50),
    Section("decode-large-fp8", 45),
    Section("decode-large-int4", 45),
    Section("profile", 40),
    Section("captured-prompts", 45),
    Section("in-order-small", 35),
    Section("in-order-large", 45),
    Section("drafts", 60),
    Section("adapters", 45),
    Section("engine-in-turn", 40),
    Section("products", 70),
    Section("kernels", 45),
    Section("libraries", 40),
    Section("sampling", 40),
    Section("decode-large-mixed-kv", 40),
    Section("tiers", 35),
    Section("ranks", 45),
    Section("launches", 10),
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

_SECONDS_TO_END = 3
"""What other sections have to end in."""


def section_rows(name: str, is_smoke: bool, peaks: tuple[float, float], folder: Path, until_s: float) -> Iterator[Row]:
    """Yield the rows of a section, in its own process.

    peaks    bytes and bf16 operations a second
    folder   for checkpoints, which sections share, and in `logs` for whole outputs of tests
    until_s  as time.perf_counter has it, which all processes share: the section is stopped soon after that
    """
    import gpu_drafts
    import gpu_kernels
    import gpu_launches
    import gpu_libraries
    import gpu_model
    import gpu_products
    import gpu_profile
    import gpu_prompts
    import gpu_ranks
    import gpu_sampling
    import gpu_start
    import gpu_tiers
    import torch

    device = torch.device("cpu") if is_smoke else torch.device("cuda", 0)
    place = gpu_model.Place("interpreter" if is_smoke else "cuda", device, *peaks, folder)
    small, large = (gpu_model.TINY, gpu_model.TINY) if is_smoke else (gpu_model.SMALL, gpu_model.LARGE)
    if name in MODELS:
        is_small, *options = MODELS[name]
        yield from gpu_model.decode_rows(place, small if is_small else large, until_s, gpu_model.Options(*options))
        return
    if name == "tests":
        limit_s = until_s + _SECONDS_TO_END - _SECONDS_TO_STOP - time.perf_counter()
        yield from test_rows(is_smoke, limit_s, folder / "logs" / "tests")
        return
    yield from {
        "roofline": lambda: [{"section": name, **gpu_kernels.environment(device), **gpu_kernels.measure_roofline(device)}],
        "engine": lambda: gpu_model.engine_rows(place, until_s),
        "engine-in-turn": lambda: gpu_model.engine_rows(place, until_s, is_ahead=False),
        "start": lambda: gpu_start.start_rows(place, small, until_s),
        "profile": lambda: gpu_profile.profile_rows(place, small, until_s),
        "captured-prompts": lambda: gpu_prompts.prompt_rows(place, small, until_s),
        "drafts": lambda: gpu_drafts.draft_rows(place, small, until_s),
        "adapters": lambda: gpu_model.adapter_rows(place, small, until_s),
        "ranks": lambda: gpu_ranks.rank_rows(place, small, until_s),
        "sampling": lambda: gpu_sampling.sampling_rows(place, small, until_s),
        "tiers": lambda: gpu_tiers.tier_rows(place, small, until_s),
        "launches": lambda: gpu_launches.launch_rows(device),
        "libraries": lambda: gpu_libraries.library_rows(device, is_smoke, until_s),
        "products": lambda: gpu_products.product_rows(device, is_smoke, peaks, until_s),
        "kernels": lambda: gpu_kernels.case_rows(name, gpu_kernels.Shapes(device, is_smoke).all(), is_smoke, peaks, until_s),
    }[name]()


def test_rows(is_smoke: bool, limit_s: float, folder: Path) -> Iterator[Row]:
    """Yield what became of the kernels' tests on this device, file by file; is_smoke: of finding the tests of one.

    folder  where their whole outputs are written
    """
    names = files_for_a_gpu()[:1] if is_smoke else files_for_a_gpu()

    def command_of(name: str) -> list[str]:
        return [*pytest_command(name), "--collect-only"] if is_smoke else pytest_command(name)

    for row in run_test_files(names, command_of, limit_s, min(_TESTS_AT_ONCE, os.cpu_count() or 1), folder):
        yield {"section": "tests", **row}


def measure(sections: list[Section], is_smoke: bool, budget_s: float, out: Path, record: dict[str, Any]) -> bool:
    """Run sections, add their rows to a record, write it after each, and print them; returns whether none failed.

    Whole outputs of sections and of tests are in an archive beside `out`.
    """
    is_fine = True

    def command_of(section: Section, rows: list[Row]) -> list[str]:
        peaks = next((row for row in [*rows, *record.get("roofline", [])] if "read_tbs" in row), None)
        peaks = peaks or {"read_tbs": 4.3, "bf16_tflops": 790.0}
        until_s = time.perf_counter() + section.limit_s - _SECONDS_TO_END
        command = [sys.executable, str(Path(__file__)), "--section", section.name, "--folder", str(folder)]
        command += ["--peaks", f"{peaks['read_tbs']},{peaks['bf16_tflops']}", "--until", str(until_s)]
        return [*command, "--smoke"] if is_smoke else command

    def take(section: Section, rows: list[Row]) -> None:
        nonlocal is_fine
        is_fine &= not any("error" in row for row in rows)
        record[section.name] = rows
        out.write_text(record_text(record))
        pack(folder / "logs", out.with_suffix(".logs.tar.gz"))
        for row in rows:
            shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}
            print(f"{section.name:20} {shown}", flush=True)
        if table := profile_table(rows):
            print(table, flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        run_all_sections(sections, command_of, folder / "logs", budget_s, take)
    return is_fine


def begin_record(after: Path | None, commit: str, arguments: list[str]) -> dict[str, Any]:
    """Return a record without rows, or that of an earlier call, to which this one is added.

    Raises SystemExit if that was made at another commit.
    """
    if not commit and shutil.which("git"):
        asked = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        commit = asked.stdout.strip()
    commit = commit or "unknown"
    command = " ".join(["python bench/gpu.py", *arguments])
    if after is None:
        return {"commit": commit, "command": command}
    record = read_record(after.read_text())
    if commit != record["commit"]:
        sys.exit(f"--after {after}: its commit is {record['commit']}, and this is {commit}: a record is of one commit")
    return record | {"command": f"{record['command']}; {command}"}


def main() -> None:
    """Parse the command line and run."""
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(description="Test and time the GPU kernels.")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="where the results are written, as JSON")
    parser.add_argument("--after", type=Path, help="results of an earlier call: run what it has not run, and write all")
    parser.add_argument("--budget", type=float, default=470.0, help="seconds for all sections together")
    parser.add_argument("--only", default="", help=f"names of sections with commas between: {', '.join(names)}")
    parser.add_argument("--commit", default="", help="what is measured, where there is no repository")
    parser.add_argument("--smoke", action="store_true", help="run tiny shapes once, without a GPU, and time nothing")
    for name in ("--section", "--folder", "--peaks", "--until"):  # of a section's own process
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.section is not None:
        read_tbs, tflops = map(float, options.peaks.split(","))
        peaks, folder = (read_tbs * 1e12, tflops * 1e12), Path(options.folder)
        rows = section_rows(options.section, options.smoke, peaks, folder, float(options.until))
        write_rows(rows, folder / "logs" / f"{options.section}.jsonl")
        return
    unknown = set(filter(None, options.only.split(","))) - set(names)
    if unknown:
        parser.error(f"--only names no section: {', '.join(sorted(unknown))}")
    # nvidia-smi rather than torch: this process must not take any of the device's memory.
    asked = ["nvidia-smi", "-L"] if shutil.which("nvidia-smi") else ["false"]
    if not options.smoke and subprocess.run(asked, capture_output=True, check=False).returncode != 0:
        parser.error("there is no NVIDIA GPU here; --smoke tries the script without one")
    record = begin_record(options.after, options.commit, sys.argv[1:])
    chosen = options.only.split(",") if options.only else [name for name in names if not is_measured(record.get(name, []))]
    sections = [section for section in SECTIONS if section.name in chosen]
    if options.smoke:  # the interpreter is slow
        sections = [replace(section, limit_s=_SMOKE_LIMIT_S) for section in sections]
        options.budget = _SMOKE_LIMIT_S * len(sections)
    is_fine = measure(sections, options.smoke, options.budget, options.out, record)
    print(goals_table(record), flush=True)
    sys.exit(0 if is_fine else 1)


if __name__ == "__main__":
    main()
