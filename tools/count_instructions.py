"""Count the instructions of the native kernels, by level, in objects that a build has left; prints a table in Markdown.

    python tools/count_instructions.py avx2:build/CMakeFiles/_native.dir/levels neon:build-arm/CMakeFiles/_native.dir/levels

Needs objdump for each architecture (binutils, binutils-aarch64-linux-gnu). The counts are of the code, not of what is executed:
they show whether a level compiles to the instructions that it is written for, and how often the stack is read and written.

    python tools/count_instructions.py --loops 'dot_group<1, 4, true, false>' avx2:FOLDER neon:FOLDER

prints instead the innermost loops with multiply-adds, those that are equal once, of the functions whose names match a pattern.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from stack_traffic import functions, innermost_loops

KERNELS = ("linear", "attention", "elementwise", "sampler", "quantize", "recurrence")
OBJDUMPS = {62: "objdump", 183: "aarch64-linux-gnu-objdump"}
"""By the machine of an ELF header."""
KINDS = {
    "multiply-adds": re.compile(r"v?fn?m(add|sub|la|ls)|vpdpbusd|vdpbf16ps|vpmadd|bfmlal|bfdot|[us]{1,2}dot|[us]{1,2}mmla"),
    "byte products": re.compile(r"vpdpbusd|vpmaddubsw|[us]{1,2}dot|[us]{1,2}mmla"),
    "bf16 products": re.compile(r"vdpbf16ps|bfmlal|bfdot"),
}
COLUMNS = ("instructions", *KINDS, "stack")
STACK = re.compile(r"\(%rsp|\[sp[,\]]")
INSTRUCTION = re.compile(r"^\s*[0-9a-f]+:\t(?:\{vex\} )?([a-z][a-z0-9.]*)(.*)$")


def objdump_of(path: Path) -> str:
    """Return the command that reads an object."""
    header = path.read_bytes()[:20]
    machine = int.from_bytes(header[18:20], "little") if header[:4] == b"\x7fELF" else 0
    if machine not in OBJDUMPS:
        raise SystemExit(f"{path}: an ELF object for x86-64 or AArch64 is needed, its machine is {machine}")
    return OBJDUMPS[machine]


def count(listing: str) -> Counter[str]:
    """Return the numbers of instructions in a disassembly: all, those of KINDS, and those on the stack."""
    found: Counter[str] = Counter()
    for line in listing.splitlines():
        matched = INSTRUCTION.match(line)
        if matched is None:
            continue
        name, operands = matched.groups()
        found["instructions"] += 1
        found["stack"] += STACK.search(operands) is not None
        found.update(kind for kind, pattern in KINDS.items() if pattern.match(name))
    return found


def count_object(path: Path) -> Counter[str]:
    """Return the counts of an object."""
    command = [objdump_of(path), "-d", "--no-show-raw-insn", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise SystemExit(
            f"{command[0]} is not installed: it is in binutils, for AArch64 in binutils-aarch64-linux-gnu"
        ) from None
    return count(done.stdout)


def count_loops(path: Path, patterns: list[str]) -> dict[str, list[Counter[str]]]:
    """Return the counts of the innermost loops with multiply-adds, by the pattern that matches the name of their function."""
    found: dict[str, list[Counter[str]]] = {pattern: [] for pattern in patterns}
    for name, code in functions(str(path), objdump_of(path)):
        for pattern in (pattern for pattern in patterns if re.search(pattern, name)):
            for first, last in innermost_loops(code):
                counts = count("\n".join(f"{at:x}:\t{line}" for at, line in code if first <= at <= last))
                if counts["multiply-adds"] and counts not in found[pattern]:
                    found[pattern].append(counts)
    return found


def print_counts(name: str, level: str, counts: Counter[str]) -> None:
    """Print a row of the table."""
    print(f"| {name} | `{level}` | {' | '.join(f'{counts[column]:,}' for column in COLUMNS)} |")


def main(argv: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("levels", nargs="+", metavar="LEVEL:FOLDER", help="a level, and the folder of its objects")
    parser.add_argument("--loops", action="append", metavar="PATTERN", help="print loops of functions with such names")
    options = parser.parse_args(argv)
    print(f"| kernel | level | {' | '.join(COLUMNS)} |")
    print("|---" * (len(COLUMNS) + 2) + "|")
    for kernel in KERNELS:
        for level, _, folder in (text.partition(":") for text in options.levels):
            path = Path(folder) / f"{kernel}_{level}.cpp.o"
            if options.loops is None and not path.is_file():
                raise SystemExit(f"{path} is missing: build quire there first")
            if options.loops is None:
                print_counts(kernel, level, count_object(path))
            elif path.is_file():  # AVX-VNNI has few kernels of its own
                for pattern, loops in count_loops(path, options.loops).items():
                    for counts in loops:
                        print_counts(pattern, level, counts)


if __name__ == "__main__":
    main(sys.argv[1:])
