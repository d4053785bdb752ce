"""Compile launches for a GPU without having one, with the assembler in Triton's wheel, and inspect the machine code.

Not in the interpreter, which replaces the functions that would be compiled.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from quire.base.errors import InvariantError
from quire.kernels.triton.arithmetic import INTERPRETED
from quire.kernels.triton.launching import Argument, Launch
from quire.kernels.triton.tma_tensor import TmaTensor

_TYPE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
_DIVISIBLE = [["tt.divisibility", 16]]
_OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*(?:\.[A-Z0-9_]+)*)")
_WAIT = "ACQBULK"


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """Statistics of a compiled launch.

    num_registers  per thread, at most 255
    stack_bytes    per thread; not 0: registers were spilled
    shared_bytes   per program
    opcodes        number of occurrences of each machine instruction, by its name with all modifiers
    num_early_loads
                   loads from global memory before the kernel waits (pdl.py); 0 without a wait
    """

    num_registers: int
    stack_bytes: int
    shared_bytes: int
    opcodes: Counter[str]
    num_early_loads: int

    def count(self, opcode: str) -> int:
        """Return the number of instructions with a name, e.g. "HGMMA", or with a name and its first modifiers."""
        return sum(number for name, number in self.opcodes.items() if name == opcode or name.startswith(opcode + "."))

    def count_wide_copies(self) -> int:
        """Return the number of asynchronous copies from global to shared memory with 16 bytes per thread."""
        return sum(number for name, number in self.opcodes.items() if name.startswith("LDGSTS.") and name.endswith(".128"))


def compile_launch(launch: Launch, arch: int = 90) -> CompiledKernel:
    """Compile for compute capability `arch` with the launch's specialisations: aligned tensors and multiples of 16.

    The tensors of the launch may be on any device, including "meta". Raises InvariantError in the interpreter.
    """
    if INTERPRETED:
        raise InvariantError("kernels cannot be compiled in a process in which TRITON_INTERPRET=1 was set; unset it")
    signature: dict[str, str] = {}
    constants: dict[str, object] = dict(launch.constants)
    is_plain = {param.name: bool(param.do_not_specialize) for param in launch.kernel.params}
    for name, value in launch.arguments.items():
        signature[name] = _type_name(value, is_plain[name])
        if signature[name] == "constexpr":
            constants[name] = value
    names = launch.kernel.arg_names
    signature |= dict.fromkeys(launch.constants, "constexpr")
    divisible = [name for name, value in launch.arguments.items() if _is_divisible(value, is_plain[name])]
    attributes = {(names.index(name),): _DIVISIBLE for name in divisible}
    source_type = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    source = source_type(launch.kernel, {name: signature[name] for name in names}, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    return _inspect(compiled.asm["cubin"], int(compiled.metadata.shared))


def _type_name(value: Argument, is_plain: bool) -> str:
    if isinstance(value, TmaTensor):
        columns = f"{value.box[0]}, {value.box[1]}"
        return f"tensordesc<{_TYPE_NAMES[value.tensor.dtype]}[{columns}],{value.layout!r}>"
    if isinstance(value, Tensor):
        return "*" + _TYPE_NAMES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if value is None or (value == 1 and not is_plain):
        return "constexpr"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def _is_divisible(value: Argument, is_plain: bool) -> bool:
    if is_plain:
        return False
    if isinstance(value, Tensor):
        return value.storage_offset() * value.itemsize % 16 == 0
    return isinstance(value, int) and value != 1 and value % 16 == 0


def _inspect(cubin: bytes, shared_bytes: int) -> CompiledKernel:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run_tool(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path))
        code = _run_tool(triton.knobs.nvidia.nvdisasm.path, "-c", str(path))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise InvariantError(f"cuobjdump names no registers: {usage!r}")
    opcodes = [match[1] for match in _OPCODE.finditer(code)]
    early = opcodes[: opcodes.index(_WAIT)] if _WAIT in opcodes else []
    num_early = sum(opcode.startswith(("LDG.", "LDGSTS.")) for opcode in early)
    return CompiledKernel(int(found[1]), int(found[2]), shared_bytes, Counter(opcodes), num_early)


def _run_tool(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
