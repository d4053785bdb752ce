"""Native sources for another processor: each is compiled once for all processes of a session, and programs run in an emulator.

QUIRE_EMULATED_TESTS=required turns skips into failures. QUIRE_EMULATED_BUILD names a folder that keeps what was compiled.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "quire/kernels/cpu/csrc"
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-Wall", "-Wextra", "-Werror")
FLAGS += ("-Wno-unused-function", "-Wno-uninitialized", f"-I{CSRC}")
_DOT = "-march=armv8.2-a+dotprod"
ARM_LEVELS = {"portable": (), "neon": (_DOT,), "neon_i8mm_bf16": (f"{_DOT}+i8mm+bf16",)}
KERNELS = ("linear", "attention", "elementwise", "sampler", "quantize", "peak", "recurrence")
"""In the order of the pointers of Kernels in tables.h."""


@dataclass(frozen=True)
class Source:
    """A translation unit, with the flags that it needs in addition to FLAGS."""

    name: str
    text: str
    flags: tuple[str, ...] = ()


def need(command: str) -> str:
    """Return the path of a command; skip the test, or fail it, where it is not installed."""
    path = shutil.which(command)
    if path is None and os.environ.get("QUIRE_EMULATED_TESTS") == "required":
        pytest.fail(f"{command} is not installed")
    if path is None:
        pytest.skip(f"{command} is not installed")
    return path


def run(*command: str | Path, **options: str) -> str:
    """Return what a command prints; it must succeed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600, check=False, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def kernel_source(kernel: str, level: str, flags: tuple[str, ...]) -> Source:
    """Return the source of a kernel for a level, as CMakeLists.txt writes it."""
    return Source(f"{kernel}_{level}", f'#define QUIRE_ISA {level}\n#include "{kernel}.inl"\n', flags)


def plain_source(name: str) -> Source:
    """Return a source of csrc that is the same for all levels."""
    return Source(name, f'#include "{name}.cpp"\n')


def program_source(name: str) -> Source:
    """Return a source of tests/native."""
    return Source(name, f'#include "{ROOT}/tests/native/{name}.cpp"\n')


def table_list(levels: Iterable[str], kernels: Iterable[str]) -> Source:
    """Return a source in place of dispatch.cpp, of a program with some kernels of some levels, all of which can run."""
    kernels = frozenset(kernels)
    declared = [
        f"namespace {level} {{ extern const {kernel.title()}Table {kernel}_table; }}" for level in levels for kernel in kernels
    ]
    rows = [
        ", ".join([f'{{"{level}"', *(f"&{level}::{kernel}_table" if kernel in kernels else "nullptr" for kernel in KERNELS)])
        + "}"
        for level in levels
    ]
    text = f"""
#include <string.h>
#include "tables.h"
namespace quire {{
{chr(10).join(sorted(declared))}
static const Kernels all[] = {{{", ".join(rows)}}};
std::vector<const Kernels*> supported_kernels() {{
    std::vector<const Kernels*> found;
    for (const Kernels& one : all) found.push_back(&one);
    return found;
}}
const Kernels* kernels_named(const char* name) {{
    for (const Kernels& one : all) if (strcmp(one.name, name) == 0) return &one;
    return nullptr;
}}
}}
"""
    return Source("list", text)


class NativeBuild:
    """Objects and programs in a folder that processes may share."""

    def __init__(self, compiler: str, folder: Path) -> None:
        self._compiler, self._folder = compiler, folder
        folder.mkdir(parents=True, exist_ok=True)

    def compile(self, source: Source) -> Path:
        """Return the object of a source."""
        key = _digest(self._compiler, *FLAGS, *source.flags, _with_includes(source.text))

        def make(path: Path) -> None:
            run(self._compiler, *FLAGS, *source.flags, "-x", "c++", "-c", "-", "-o", path, input=source.text)

        return self._once(self._folder / f"{source.name}-{key}.o", make)

    def link(self, sources: Iterable[Source]) -> Path:
        """Return a static program; its sources are compiled two at a time."""
        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(self.compile, sources))
        key = _digest(*(part.name for part in objects))
        return self._once(
            self._folder / f"program-{key}", lambda path: run(self._compiler, "-static", "-fopenmp", *objects, "-o", path)
        )

    def _once(self, path: Path, make: Callable[[Path], object]) -> Path:
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                part = path.with_suffix(".part")
                make(part)
                part.rename(path)
        return path


def build_folder(factory: pytest.TempPathFactory) -> Path:
    """Return the folder of objects, the same one for all workers of pytest-xdist."""
    given = os.environ.get("QUIRE_EMULATED_BUILD")
    own = factory.getbasetemp()
    return Path(given) if given else (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "emulated"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _with_includes(text: str) -> str:
    """Return a text with those of the project's files that it includes, directly or not."""
    found: dict[str, str] = {}
    waiting = [text]
    while waiting:
        for name in re.findall(r'^#include "([^"]+)"', waiting.pop(), re.MULTILINE):
            if name not in found:
                found[name] = (CSRC / name).read_text()
                waiting.append(found[name])
    return text + "".join(found[name] for name in sorted(found))
