"""Count the instructions of the native kernels, by level, in objects that a build has left; prints a table in Markdown.

    python tools/count_instructions.py avx2:build/CMakeFiles/_native.dir/levels neon:build-arm/CMakeFiles/_native.dir/levels

Needs objdump for each architecture (binutils, binutils-aarch64-linux-gnu). The counts are of the code, not of what is executed:
they show whether a level compiles to the instructions that it is written for, and how often the stack is read and written.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

KERNELS = ("linear", "attention", "elementwise", "sampler", "quantize", "recurrence")
OBJDUMPS = {62: "objdump", 183: "aarch64-linux-gnu-objdump"}
"""By the machine of an ELF header."""
KINDS = {
    "multiply-adds": re.compile(r"v?fn?m(add|sub|la|ls)|vpdpbusd|vdpbf16ps|vpmadd|bfmlal|bfdot|[us]{1,2}dot|[us]{1,2}mmla"),
    "byte products": re.compile(r"vpdpbusd|vpmaddubsw|[us]{1,2}dot|[us]{1,2}mmla"),
    "bf16 products": re.compile(r"vdpbf16ps|bfmlal|bfdot"),
}
STACK = re.compile(r"\(%rsp|\[sp[,\]]")
INSTRUCTION = re.compile(r"^\s*[0-9a-f]+:\t([a-z][a-z0-9.]*)(.*)$")


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


def main(argv: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("levels", nargs="+", metavar="LEVEL:FOLDER", help="a level, and the folder of its objects")
    columns = ("instructions", *KINDS, "stack")
    print(f"| kernel | level | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 2) + "|")
    for kernel in KERNELS:
        for level, _, folder in (text.partition(":") for text in parser.parse_args(argv).levels):
            path = Path(folder) / f"{kernel}_{level}.cpp.o"
            if not path.is_file():
                raise SystemExit(f"{path} is missing: build quire there first")
            counts = count_object(path)
            print(f"| {kernel} | `{level}` | {' | '.join(f'{counts[column]:,}' for column in columns)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
