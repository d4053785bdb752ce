"""List the innermost loops of compiled kernels that read or write vector registers on the stack.

    cmake -S . -B build -G Ninja && cmake --build build
    python tools/stack_traffic.py $(find build -name '*_avx512.cpp.o')

An accumulator on the stack costs a kernel half of its speed and no test sees it. Exits with 1 if there is such a loop.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator

FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r"^ *([0-9a-f]+):\t(.*)$")
# Of x86-64 and AArch64: there the address may follow a register, and the number of a bit.
JUMP = re.compile(r"^(?:j\w+ +|(?:b(?:\.\w+)?|cbn?z|tbn?z)\t(?:[wx]\w+, (?:#\w+, )?)?)([0-9a-f]+) ")
# A frame below %rbp or above %rsp; what lies above %rbp is no frame but an array.
ON_STACK = re.compile(r"(-0x[0-9a-f]+\(%rbp|\(%rsp).*%[yz]mm|%[yz]mm.*(-0x[0-9a-f]+\(%rbp|\(%rsp)")

Code = list[tuple[int, str]]


def functions(path: str, objdump: str = "objdump") -> Iterator[tuple[str, Code]]:
    """Yield the name of each function of an object file, and its (address, instruction)s."""
    command = [objdump, "-d", "-C", "--no-show-raw-insn", path]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    name, code = "", []
    for line in listing.splitlines():
        if start := FUNCTION.match(line):
            yield name, code
            name, code = start[1], []
        elif instruction := INSTRUCTION.match(line):
            code.append((int(instruction[1], 16), instruction[2]))
    yield name, code


def innermost_loops(code: Code) -> list[tuple[int, int]]:
    """Return (first, last) address of each jump backwards that encloses no other."""
    first_address = code[0][0] if code else 0
    loops = []
    for address, instruction in code:
        jump = JUMP.match(instruction)
        if jump and first_address <= int(jump[1], 16) <= address:
            loops.append((int(jump[1], 16), address))
    return [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]


def main() -> int:
    """Print a line for each loop with stack traffic; return how the process shall exit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("objects", nargs="+", help="object files")
    num_found = 0
    for path in parser.parse_args().objects:
        for name, code in functions(path):
            for first, last in innermost_loops(code):
                loop = [text for address, text in code if first <= address <= last]
                hits = [text for text in loop if ON_STACK.search(text)]
                if hits:
                    num_found += 1
                    print(f"{path}: {name[:160]} at {first:x}: {len(hits)} of {len(loop)}, as {hits[0]}")
    return 1 if num_found else 0


if __name__ == "__main__":
    sys.exit(main())
