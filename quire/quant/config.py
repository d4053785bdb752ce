"""Read the quantisation config of a checkpoint into frozen dataclasses. Does not import torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.base.errors import UnsupportedError
from quire.quant.compressed_config import CompressedTensorsConfig, read_compressed_tensors
from quire.quant.fields import JsonFields
from quire.quant.patterns import MatchingBudget, ModulePattern

_METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4", "bitsandbytes")
_AUTO_ROUND, _AUTO_ROUND_OF_GPTQ = ("auto-round", "intel/auto-round"), "auto_round:auto_gptq"
_MAX_PATTERNS = 256
_GPTQ_BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """How GPTQ stored a linear layer.

    group_size    columns that share a scale; None: the whole row
    is_v2         zero points are stored as they are; otherwise minus one
    is_symmetric  every zero point is 2 ** (bits - 1)
    """

    bits: int
    group_size: int | None
    is_v2: bool
    is_symmetric: bool = False


@dataclass(frozen=True, slots=True)
class GptqConfig:
    """Scheme of a GPTQ checkpoint, with overrides by name: the first pattern that matches decides.

    dynamic     patterns, each with its scheme, or None if the modules are not quantised
    is_ordered  columns are assigned to groups in activation order (desc_act); each grouped weight must store its g_idx
    """

    scheme: GptqScheme
    dynamic: tuple[tuple[ModulePattern, GptqScheme | None], ...] = ()
    is_ordered: bool = False

    def find_scheme(self, module: str) -> GptqScheme | None:
        """Return the scheme of a module, or None if it should not be quantised."""
        return next((scheme for pattern, scheme in self.dynamic if pattern.matches(module)), self.scheme)


@dataclass(frozen=True, slots=True)
class AwqConfig:
    """AWQ, 4 bits, in the "gemm" layout.

    has_zero_point  zero points are stored; otherwise every one is 8
    """

    group_size: int | None
    has_zero_point: bool


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """Weights of float8_e4m3fn.

    block  rows and columns that share a scale; None: a scale per tensor or row, as stored
    notes  log lines about declared options that are not used
    """

    block: tuple[int, int] | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BitsAndBytesConfig:
    """bitsandbytes: nf4 or fp4 in blocks with their own JSON, or int8 by row; the stored tensors determine which."""


@dataclass(frozen=True, slots=True)
class Mxfp4Config:
    """MXFP4 of gpt-oss: experts in blocks of 32 columns; the stored tensors determine which modules."""


QuantizationConfig = GptqConfig | AwqConfig | CompressedTensorsConfig | Fp8Config | Mxfp4Config | BitsAndBytesConfig


def has_quantized_form(config: QuantizationConfig | None) -> bool:
    """Return whether a GPU can run a checkpoint's quantised weights as they are stored: integers and float8."""
    return config is not None and not isinstance(config, BitsAndBytesConfig)


def read_quantization(values: object, where: str, default_method: str | None = None) -> QuantizationConfig:
    """Return a quantisation config.

    values          the JSON value of `quantization_config`, `compression_config` or of a separate file
    where           its name in error messages
    default_method  quant_method if the object has none

    Raises ModelFormatError (invalid) or UnsupportedError (valid, but not implemented).
    """
    fields = JsonFields(values, where)
    default_method = "" if fields.has("quant_method") else default_method or _guess_method(fields)
    method = fields.string("quant_method", default=default_method)
    if method == "gptq" or (method in _AUTO_ROUND and _is_gptq_of_auto_round(fields)):
        return _read_gptq(fields)
    if method == "awq":
        return _read_awq(fields)
    if method == "compressed-tensors":
        return read_compressed_tensors(fields)
    if method in ("fp8", "fbgemm_fp8"):
        return _read_fp8(fields, method)
    if method == "mxfp4":
        return Mxfp4Config()
    if method == "bitsandbytes":
        return _read_bitsandbytes(fields)
    raise UnsupportedError(
        f"{where}: quant_method {method[:80]!r} is not supported; supported: {', '.join(_METHODS)}; "
        "take another version of the checkpoint, or the one that is not quantised"
    )


def _guess_method(fields: JsonFields) -> str:
    """Return the method of a config that does not name it, such as those of early files."""
    if fields.has("config_groups") or fields.has("sparsity_config"):
        return "compressed-tensors"
    if fields.has("load_in_4bit") or fields.has("load_in_8bit"):
        return "bitsandbytes"
    raise fields.wrong("quant_method", f"one of {', '.join(_METHODS)}")


def _is_gptq_of_auto_round(fields: JsonFields) -> bool:
    """Return whether AutoRound wrote integer weights in the GPTQ layout. Raises UnsupportedError for its other formats."""
    if fields.string("packing_format", default="") != _AUTO_ROUND_OF_GPTQ:
        raise fields.unsupported("packing_format", f"{_AUTO_ROUND_OF_GPTQ} of AutoRound, or a checkpoint that it wrote as GPTQ")
    if fields.string("data_type", default="int") != "int":
        raise fields.unsupported("data_type", "int")
    if fields.integer("act_bits", minimum=1, maximum=32, default=16) < 16:
        raise fields.unsupported("act_bits", "16")
    for name, values in fields.table("extra_config").items():
        module = JsonFields(values, f"{fields.where}.extra_config[{name[:40]!r}]")
        if module.integer("bits", minimum=1, maximum=64, default=16) < 16:
            raise module.unsupported("bits", "16 or more: one scheme for all quantised modules")
    return True


def _read_gptq(fields: JsonFields) -> GptqConfig:
    kind = fields.string("checkpoint_format", "format", "version", default="gptq")
    if kind not in ("gptq", "gptq_v2"):
        key = next(key for key in ("checkpoint_format", "format", "version") if fields.has(key))
        raise fields.unsupported(key, "gptq, gptq_v2")
    if fields.string("pack_dtype", default="int32") != "int32":
        raise fields.unsupported("pack_dtype", "int32")
    for key in ("is_marlin_format", "use_marlin", "adapter"):
        if fields.raw(key):
            raise fields.unsupported(key, "false or absent")
    # An absent `sym` means true, as in AutoGPTQ. The second format needs no such default: it stores the actual zero points.
    is_v2 = kind == "gptq_v2"
    is_symmetric = fields.boolean("sym", default=not is_v2)
    base = GptqScheme(_gptq_bits(fields), fields.group_size("group_size", "q_group_size"), is_v2, is_symmetric)
    dynamic = _read_dynamic(fields, base)
    schemes = [base, *(scheme for _, scheme in dynamic if scheme is not None)]
    for scheme in schemes:
        if not scheme.is_symmetric and not is_v2:
            _check_writer(fields, scheme.bits)
    # With static_groups a group consists of consecutive columns in the stored order.
    is_ordered = fields.boolean("desc_act", default=False) and not fields.boolean("static_groups", default=False)
    return GptqConfig(base, dynamic, is_ordered and any(scheme.group_size is not None for scheme in schemes))


def _read_dynamic(fields: JsonFields, base: GptqScheme) -> tuple[tuple[ModulePattern, GptqScheme | None], ...]:
    """Return the overrides of `dynamic` by module name, in order."""
    overrides, budget = fields.table("dynamic").items(), MatchingBudget()
    if len(overrides) > _MAX_PATTERNS:
        raise UnsupportedError(f"{fields.where}: dynamic has {len(overrides)} patterns; at most {_MAX_PATTERNS} are read")
    dynamic: list[tuple[ModulePattern, GptqScheme | None]] = []
    for text, values in overrides:
        if text.startswith("-:"):
            dynamic.append((ModulePattern(text[2:], budget), None))
            continue
        override = JsonFields(values, f"{fields.where}.dynamic[{text[:40]!r}]")
        scheme = GptqScheme(
            _gptq_bits(override, base.bits),
            override.group_size("group_size") if override.has("group_size") else base.group_size,
            base.is_v2,
            override.boolean("sym", default=base.is_symmetric),
        )
        dynamic.append((ModulePattern(text.removeprefix("+:"), budget), scheme))
    return tuple(dynamic)


def _gptq_bits(fields: JsonFields, default: int | None = None) -> int:
    keys = ("bits", "wbits", "w_bit")
    bits = fields.integer(*keys, minimum=1, maximum=32, default=default)
    if bits not in _GPTQ_BITS:
        raise fields.unsupported(next(key for key in keys if fields.has(key)), ", ".join(map(str, _GPTQ_BITS)))
    return bits


def _check_writer(fields: JsonFields, bits: int) -> None:
    """Refuse asymmetric weights of the first format unless their writer is known to store zero points minus one.

    Other writers corrupt a zero point of 0. GPTQModel 5 and 6 store zero points as they are, in some files, and before 7.3.1
    those of 3 bits minus numbers other than one. Symmetric weights do not need this, as their zero points are known.
    """
    quantizers = fields.table("meta").raw("quantizer")
    for quantizer in quantizers if isinstance(quantizers, list) else [quantizers]:
        pattern = r"gptqmodel:(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?\b.{0,40}"
        found = re.fullmatch(pattern, quantizer[:60]) if isinstance(quantizer, str) else None
        if found is None:
            continue
        version = tuple(int(part or 0) for part in found.groups())
        if version >= (7, 3, 1) or (bits != 3 and ((0, 9, 0) <= version < (5, 0, 0) or version >= (7, 0, 0))):
            return
        if version >= (0, 9, 0):
            raise UnsupportedError(
                f"{fields.where}: sym false in the format 'gptq' with {bits} bits is not supported where meta.quantizer is "
                f"{found[0]!r}: this version stored zero points in several ways, and which one is not in the file; "
                "take a version with sym true or checkpoint_format 'gptq_v2', or quantise again with GPTQModel 7.3.1 or newer"
            )
    raise UnsupportedError(
        f"{fields.where}: sym false in the format 'gptq' is supported only where meta.quantizer is gptqmodel 0.9.0 or newer: "
        "other writers damage zero points of 0; take a version with sym true or checkpoint_format 'gptq_v2'"
    )


def _read_awq(fields: JsonFields) -> AwqConfig:
    if fields.string("version", "checkpoint_format", default="gemm").lower() != "gemm":
        raise fields.unsupported("version" if fields.has("version") else "checkpoint_format", "gemm")
    if fields.string("backend", default="autoawq").lower() == "llm-awq":
        raise fields.unsupported("backend", "autoawq")
    keys = ("bits", "w_bit", "num_bits")
    if fields.integer(*keys, minimum=1, maximum=32, default=4) != 4:
        raise fields.unsupported(next(key for key in keys if fields.has(key)), "4")
    group_size = fields.group_size("group_size", "q_group_size")
    return AwqConfig(group_size, fields.boolean("zero_point", default=True))


def _read_fp8(fields: JsonFields, method: str) -> Fp8Config:
    if fields.string("fmt", default="e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise fields.unsupported("fmt", "e4m3")
    if fields.string("activation_scheme", default="dynamic") not in ("dynamic", "static"):
        raise fields.unsupported("activation_scheme", "dynamic, static")
    if fields.string("expert_dtype", default="fp8") not in ("fp8", "fp4"):  # what is stored says which it is
        raise fields.unsupported("expert_dtype", "fp8, fp4")
    notes = _fp8_notes(fields)
    block = fields.raw("weight_block_size")
    if block is None or method == "fbgemm_fp8":
        return Fp8Config(None, notes)
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(type(side) is int and 1 <= side <= 1 << 16 for side in block):
        raise fields.wrong("weight_block_size", "two integers from 1 to 65536, or null")
    return Fp8Config((block[0], block[1]), notes)


def _fp8_notes(fields: JsonFields) -> tuple[str, ...]:
    notes: list[str] = []
    if fields.raw("activation_scheme") == "static":
        notes.append("static scales of activations are not used; activations stay in the model's dtype")
    if fields.has("activation_scale_ub"):
        notes.append("activation_scale_ub is not used; activations stay in the model's dtype, without a bound")
    for key in ("kv_cache_quant_algo", "kv_cache_scheme"):
        if fields.has(key):
            notes.append(f"{key} is not used; the KV cache is kept in the model's dtype")
    return tuple(f"{fields.where}: {note}" for note in notes)


def _read_bitsandbytes(fields: JsonFields) -> BitsAndBytesConfig:
    if fields.string("bnb_4bit_quant_storage", default="uint8").removeprefix("torch.") != "uint8":
        raise fields.unsupported("bnb_4bit_quant_storage", "uint8")
    if fields.string("bnb_4bit_quant_type", default="nf4") not in ("nf4", "fp4"):
        raise fields.unsupported("bnb_4bit_quant_type", "nf4, fp4")
    return BitsAndBytesConfig()
