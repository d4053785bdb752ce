"""tools/count_instructions.py on disassemblies of both architectures."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools/count_instructions.py"
ARM = """
linear_neon.o:     file format elf64-littleaarch64
0000000000000000 <_ZN5quire4neon6linearE>:
       0:\tstp\tx29, x30, [sp, #-16]!
       4:\tsdot\tv10.4s, v1.16b, v0.16b
       8:\tfmla\tv1.4s, v29.4s, v12.s[0]
       c:\tadd\tx1, x1, x0
      10:\tbfmlalb\tv1.4s, v13.8h, v15.8h
"""
X86 = """
linear_avx2.o:     file format elf64-x86-64
   0:\tvfmadd231ps %ymm1,%ymm2,%ymm3
   5:\tvpmaddubsw %ymm1,%ymm2,%ymm3
   9:\tvmovaps %ymm1,0x20(%rsp)
   e:\tret
"""


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("count_instructions", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        (ARM, {"instructions": 5, "multiply-adds": 3, "byte products": 1, "bf16 products": 1, "stack": 1}),
        (X86, {"instructions": 4, "multiply-adds": 2, "byte products": 1, "stack": 1}),
    ],
    ids=["arm", "x86"],
)
def test_instructions_are_counted_by_kind(tool, listing, expected):
    assert +tool.count(listing) == expected


def test_files_that_are_no_objects_are_refused(tool, tmp_path):
    path = tmp_path / "linear_neon.cpp.o"
    path.write_bytes(b"text")
    with pytest.raises(SystemExit, match="ELF object for x86-64 or AArch64 is needed"):
        tool.count_object(path)
    with pytest.raises(SystemExit, match=r"linear_avx2.cpp.o is missing"):
        tool.main([f"avx2:{tmp_path}"])
