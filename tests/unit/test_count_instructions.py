"""tools/count_instructions.py on disassemblies of both architectures."""

import importlib.util
import subprocess
from pathlib import Path
from types import SimpleNamespace

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
VEX = """
   0:\t{vex} vpdpbusd %ymm1,%ymm2,%ymm3
"""
# A function each, with a loop inside of another.
LOOPS = {
    62: """
0000000000000010 <quire::avx2::dot_group<1>(long)>:
  10:\tvpmaddubsw %ymm1,%ymm2,%ymm3
  14:\tadd    $0x1,%rax
  18:\tjne    10 <quire::avx2::dot_group<1>(long)>
  1c:\tjmp    10 <quire::avx2::dot_group<1>(long)>
0000000000000020 <quire::avx2::other(long)>:
  20:\tvpmaddubsw %ymm1,%ymm2,%ymm3
  24:\tjne    20 <quire::avx2::other(long)>
""",
    183: """
0000000000000010 <quire::neon::dot_group<1>(long)>:
      10:\tsdot\tv10.4s, v1.16b, v0.16b
      14:\tcbnz\tx3, 10 <quire::neon::dot_group<1>(long)>
      18:\tsdot\tv10.4s, v1.16b, v0.16b
      1c:\tldr\tq1, [sp, #16]
      20:\tb.ne\t18 <quire::neon::dot_group<1>(long)+0x8>  // b.any
      24:\tb\t10 <quire::neon::dot_group<1>(long)>
""",
}


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
        (VEX, {"instructions": 1, "multiply-adds": 1, "byte products": 1}),
    ],
    ids=["arm", "x86", "vex"],
)
def test_instructions_are_counted_by_kind(tool, listing, expected):
    assert +tool.count(listing) == expected


@pytest.mark.parametrize(
    ("machine", "expected"),
    [(62, [{"instructions": 3, "stack": 0}]), (183, [{"instructions": 2, "stack": 0}, {"instructions": 3, "stack": 1}])],
    ids=["x86", "arm"],
)
def test_innermost_loops_of_matching_functions_are_counted(tool, tmp_path, monkeypatch, machine, expected):
    path = tmp_path / "linear.o"
    path.write_bytes(b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little"))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=LOOPS[machine]))
    (found,) = tool.count_loops(path, [r"dot_group<\d>"]).values()
    products = {"multiply-adds": 1, "byte products": 1}
    assert [dict(counts) for counts in found] == [counts | products for counts in expected]


def test_files_that_are_no_objects_are_refused(tool, tmp_path):
    path = tmp_path / "linear_neon.cpp.o"
    path.write_bytes(b"text")
    with pytest.raises(SystemExit, match="ELF object for x86-64 or AArch64 is needed"):
        tool.count_object(path)
    with pytest.raises(SystemExit, match=r"linear_avx2.cpp.o is missing"):
        tool.main([f"avx2:{tmp_path}"])
