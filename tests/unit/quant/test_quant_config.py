"""The quantisation config: what is read, and that everything else is refused by name."""

import pytest

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.quant.compressed_config import CompressedTensorsConfig
from quire.quant.config import AwqConfig, BitsAndBytesConfig, Fp8Config, GptqConfig, GptqScheme, read_quantization
from tests.needs_re2 import needs_re2

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AUTO_ROUND = {**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": GROUP}}


def _read(values, default_method=None):
    return read_quantization(values, "config.json", default_method)


def _compressed(weights=None, group=None, **changes):
    group = {**GROUP, "weights": {**WEIGHTS, **(weights or {})}, **(group or {})}
    return {**COMPRESSED, "config_groups": {"group_0": group}, **changes}


@pytest.mark.parametrize(
    "values, expected",
    [
        (GPTQ, GptqConfig(GptqScheme(4, 128, False, is_symmetric=True))),
        ({**GPTQ, "sym": None}, GptqConfig(GptqScheme(4, 128, False, is_symmetric=True))),
        ({**GPTQ, "group_size": -1, "bits": 8}, GptqConfig(GptqScheme(8, None, False, is_symmetric=True))),
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, GptqConfig(GptqScheme(4, 128, True, is_symmetric=True))),
        ({**GPTQ, "checkpoint_format": "gptq_v2", "sym": False}, GptqConfig(GptqScheme(4, 128, True))),
        ({"quant_method": "gptq", "wbits": 3, "q_group_size": 64, "format": "gptq_v2"}, GptqConfig(GptqScheme(3, 64, True))),
        (AWQ, AwqConfig(128, True)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}, AwqConfig(64, True)),
        ({**AWQ, "zero_point": False, "group_size": -1}, AwqConfig(None, False)),
        (FP8, Fp8Config((128, 128))),
        ({**FP8, "weight_block_size": None}, Fp8Config(None)),
        ({"quant_method": "fbgemm_fp8"}, Fp8Config(None)),
        (AUTO_ROUND, GptqConfig(GptqScheme(4, 128, False, is_symmetric=True))),
        (
            {**AUTO_ROUND, "quant_method": "intel/auto-round", "extra_config": {"lm_head": {"bits": 16}}},
            GptqConfig(GptqScheme(4, 128, False, is_symmetric=True)),
        ),
        ({**GPTQ, "desc_act": True}, GptqConfig(GptqScheme(4, 128, False, is_symmetric=True), is_ordered=True)),
        ({**GPTQ, "desc_act": True, "static_groups": True}, GptqConfig(GptqScheme(4, 128, False, is_symmetric=True))),
        ({**GPTQ, "desc_act": True, "group_size": -1}, GptqConfig(GptqScheme(4, None, False, is_symmetric=True))),
        (BNB, BitsAndBytesConfig()),
        ({"load_in_8bit": True}, BitsAndBytesConfig()),
    ],
)
def test_config_is_read(values, expected):
    assert _read(values) == expected


@needs_re2
def test_compressed_scheme_is_read():
    config = _read(_compressed(kv_cache_scheme={"num_bits": 8}, ignore=["lm_head", "re:.*gate$"], unknown_key=1))
    assert isinstance(config, CompressedTensorsConfig)
    scheme = config.find_scheme("model.layers.0.mlp.up_proj")
    assert scheme is not None
    assert (scheme.layout, scheme.bits, scheme.strategy, scheme.group_size) == ("pack-quantized", 4, "group", 128)
    assert config.find_scheme("model.layers.0.mlp.gate") is None


def test_method_is_found_when_the_file_does_not_name_it():
    without = {key: value for key, value in COMPRESSED.items() if key != "quant_method"}
    assert isinstance(_read(without), CompressedTensorsConfig)
    assert isinstance(_read({"quantization_config": without, "quant_method": "compressed-tensors"}), CompressedTensorsConfig)
    assert isinstance(_read({"bits": 4, "group_size": 128}, "gptq"), GptqConfig)
    assert isinstance(_read({"w_bit": 4, "q_group_size": 128}, "awq"), AwqConfig)
    with pytest.raises(ModelFormatError, match="quant_method must be one of"):
        _read({"bits": 4})


@pytest.mark.parametrize("method", ["hqq", "quanto", "torchao", "modelopt", "aqlm", "eetq", "x" * 5000])
def test_method_is_refused_by_name_when_it_is_not_supported(method):
    with pytest.raises(UnsupportedError, match=f"quant_method '{method[:40]}.*supported: gptq, awq") as caught:
        _read({"quant_method": method})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "values, message",
    [
        ({**GPTQ, "checkpoint_format": "gptq_p"}, "checkpoint_format 'gptq_p' .*supported: gptq, gptq_v2"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format"),
        ({**GPTQ, "pack_dtype": "int8"}, "pack_dtype 'int8'"),
        ({**GPTQ, "bits": 5}, "bits 5 .*supported: 2, 3, 4, 8"),
        ({**GPTQ, "sym": False}, "meta.quantizer is gptqmodel 0.9.0"),
        ({**GPTQ, "sym": False, "meta": {"quantizer": ["gptqmodel:0.8.9"]}}, "meta.quantizer"),
        ({**GPTQ, "sym": False, "meta": {"quantizer": ["gptqmodel:5.0.0"]}}, "'gptqmodel:5.0.0'.*is not in the file"),
        ({**GPTQ, "sym": False, "meta": {"quantizer": "gptqmodel:6.0.3"}}, "is not in the file"),
        ({**GPTQ, "bits": 3, "sym": False, "meta": {"quantizer": "gptqmodel:4.2.5"}}, "3 bits"),
        pytest.param(
            {**GPTQ, "sym": False, "dynamic": {"a": {"bits": 3}}, "meta": {"quantizer": "gptqmodel:4.2.5"}},
            "3 bits",
            marks=needs_re2,
        ),
        ({**GPTQ, "sym": False, "meta": {"quantizer": "other:7.0.0"}}, "meta.quantizer"),
        pytest.param({**GPTQ, "dynamic": {"-:(?!x)": {}}}, "look-around", marks=needs_re2),
        ({**GPTQ, "dynamic": {"a" * 5000: {}}}, "5000 characters"),
        ({**GPTQ, "dynamic": {f"a{n}": {} for n in range(1000)}}, "1000 patterns"),
        ({**AUTO_ROUND, "packing_format": "auto_round"}, "packing_format 'auto_round' .*supported: auto_round:auto_gptq"),
        ({"quant_method": "auto-round"}, "packing_format None .*supported: auto_round:auto_gptq"),
        ({**AUTO_ROUND, "data_type": "nv_fp4"}, "data_type 'nv_fp4'"),
        ({**AUTO_ROUND, "act_bits": 8}, "act_bits 8"),
        ({**AUTO_ROUND, "extra_config": {"lm_head": {"bits": 8}}}, "extra_config.*bits 8"),
        ({**AUTO_ROUND, "sym": False}, "meta.quantizer is gptqmodel 0.9.0"),
        ({**AWQ, "version": "gemv"}, "version 'gemv' .*supported: gemm"),
        ({**AWQ, "version": "gemv_fast"}, "version 'gemv_fast'"),
        ({**AWQ, "version": "marlin"}, "version 'marlin'"),
        ({**AWQ, "version": "exllama"}, "version 'exllama'"),
        ({**AWQ, "backend": "llm-awq"}, "backend 'llm-awq'"),
        ({**AWQ, "bits": 8}, "bits 8 .*supported: 4"),
        ({**FP8, "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({**FP8, "activation_scheme": "token"}, "activation_scheme 'token'"),
        ({**FP8, "expert_dtype": "int4"}, "expert_dtype 'int4'"),
        ({**BNB, "bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage 'bfloat16'"),
        ({**BNB, "bnb_4bit_quant_type": "af4"}, "bnb_4bit_quant_type 'af4'"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "format 'sparse-24-bitmask'"),
        ({**COMPRESSED, "transform_config": {"config_groups": {}}}, "transform_config"),
        ({**COMPRESSED, "format": "marlin-24"}, "format 'marlin-24'"),
        ({**COMPRESSED, "format": "sparse-bitmask"}, "format 'sparse-bitmask'"),
        ({**COMPRESSED, "format": "nvfp4-pack-quantized"}, "type 'int' .*supported: float of 4 bits"),
        ({**COMPRESSED, "format": "mxfp6-pack-quantized"}, "format 'mxfp6-pack-quantized'"),
        (_compressed({"type": "float"}, format="mxfp4-pack-quantized"), "group_size 128 .*supported: 32"),
        ({**COMPRESSED, "format": "mixed-precision"}, "format 'mixed-precision'"),
        (_compressed(group={"format": "mxfp8-quantized"}), "format 'mxfp8-quantized'"),
        (_compressed({"strategy": "tensor_group"}), "strategy 'tensor_group'"),
        (_compressed({"dynamic": True}), "dynamic True"),
        (_compressed({"type": "float"}), "type 'float'"),
        (_compressed({"type": "float", "num_bits": 4}, format="float-quantized"), "num_bits 4"),
        pytest.param(_compressed(ignore=["re:(a)\\1"]), "escape", marks=needs_re2),
        (_compressed(ignore=[f"re:a{n}" for n in range(1000)]), "more patterns of module names"),
        ({**COMPRESSED, "config_groups": {str(n): GROUP for n in range(1000)}}, "1000 groups"),
    ],
)
def test_variant_is_refused_by_name_when_it_is_not_supported(values, message):
    with pytest.raises(UnsupportedError, match=message):
        _read(values)


@pytest.mark.parametrize(
    "values, message",
    [
        ([1], "must be a JSON object"),
        ({"quant_method": 3}, "quant_method must be a string, got 3"),
        ({"quant_method": "gptq"}, "bits must be an integer"),
        ({**GPTQ, "bits": 0}, "bits must be an integer from 1"),
        ({**GPTQ, "bits": True}, "bits must be an integer"),
        ({**GPTQ, "bits": 10**30}, "bits must be an integer"),
        ({**GPTQ, "bits": 4.0}, "bits must be an integer"),
        ({**GPTQ, "group_size": 0}, "group_size must be an integer from 1"),
        ({**GPTQ, "group_size": -2}, "group_size must be an integer from 1"),
        ({**GPTQ, "group_size": 1 << 40}, "group_size must be an integer from 1"),
        ({**GPTQ, "sym": "yes"}, "sym must be true or false"),
        ({**GPTQ, "dynamic": [1]}, "dynamic must be a JSON object"),
        ({**GPTQ, "dynamic": {"a": 1}}, "must be a JSON object"),
        ({**AWQ, "zero_point": 1}, "zero_point must be true or false"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size must be two integers"),
        ({**FP8, "weight_block_size": [0, 128]}, "weight_block_size must be two integers"),
        ({**FP8, "weight_block_size": [128, 1 << 30]}, "weight_block_size must be two integers"),
        ({**FP8, "weight_block_size": 128}, "weight_block_size must be two integers"),
        ({**COMPRESSED, "config_groups": {}}, "config_groups must be"),
        ({**COMPRESSED, "ignore": "lm_head"}, "ignore must be a list of strings"),
        (_compressed({"num_bits": 9}), "num_bits must be an integer from 1 to 8"),
        (_compressed({"group_size": 0}), "group_size must be an integer"),
        (_compressed({"type": "bool"}), "type must be int or float"),
        (_compressed(group={"targets": "Linear"}), "targets must be a list of strings"),
        (
            _compressed({"type": "float", "num_bits": 8, "strategy": "block"}, format="float-quantized"),
            "block_structure must be two",
        ),
    ],
)
def test_config_is_refused_when_it_is_wrong(values, message):
    with pytest.raises(ModelFormatError, match=message):
        _read(values)


@needs_re2
def test_first_dynamic_pattern_that_matches_decides():
    dynamic = {
        r"-:.*\.gate$": {},
        r"+:.*\.(?:18|19)\..*": {"bits": 8, "group_size": 32},
        r".*down.*": {"bits": 8},
        r".*": {"group_size": -1},
    }
    config = _read({**GPTQ, "dynamic": dynamic})
    assert isinstance(config, GptqConfig)
    assert config.find_scheme("model.layers.18.gate") is None
    assert config.find_scheme("model.layers.18.mlp.down_proj") == GptqScheme(8, 32, False, True)
    assert config.find_scheme("model.layers.1.mlp.down_proj") == GptqScheme(8, 128, False, True)
    assert config.find_scheme("model.layers.1.mlp.up_proj") == GptqScheme(4, None, False, True)


@needs_re2
@pytest.mark.parametrize("writer", ["gptqmodel:1.4.0", "gptqmodel:4.2.5", "gptqmodel:7.3.1", "gptqmodel:7.7.0-dev"])
def test_asymmetric_first_format_is_read_when_its_writer_is_sound(writer):
    meta = {"quantizer": [writer]}
    assert _read({**GPTQ, "sym": False, "meta": meta}) == GptqConfig(GptqScheme(4, 128, False))
    mixed = _read({**GPTQ, "dynamic": {"a": {"sym": False}}, "meta": meta})
    assert [mixed.find_scheme(module).is_symmetric for module in ("a", "b")] == [False, True]
    with pytest.raises(UnsupportedError, match="meta.quantizer"):
        _read({**GPTQ, "dynamic": {".*": {"sym": False}}})


def test_what_is_declared_and_not_used_is_noted():
    def notes(values):
        return [note.partition(": ")[2] for note in _read(values).notes]

    unused = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    tokens = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    assert notes(_compressed(group={"input_activations": tokens})) == []
    assert notes(_compressed(group={"input_activations": unused}, kv_cache_scheme={"num_bits": 8})) == [
        "kv_cache_scheme is not used; the KV cache is kept in the model's dtype",
        "input_activations are not used as they are declared; on a CPU inputs are rounded to int8, with a scale for each group "
        "of them, unless dtype is float32",
    ]
    floats = {"type": "float", "num_bits": 8, "strategy": "channel"}
    of_floats = _compressed(floats, {"input_activations": unused}, format="float-quantized")
    assert notes(of_floats) == ["input_activations are not used as they are declared; activations stay in the model's dtype"]
    assert notes(_compressed(group={"input_activations": {**tokens, "symmetric": False}})) != []
    assert notes(_compressed(group={"output_activations": tokens})) == [
        "output_activations are not used; outputs stay in the model's dtype"
    ]
    assert len(notes({**FP8, "activation_scheme": "static"})) == 1
    assert notes({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}) == [
        "activation_scale_ub is not used; activations stay in the model's dtype, without a bound"
    ]
    assert notes({**FP8, "kv_cache_quant_algo": "FP8"}) == [
        "kv_cache_quant_algo is not used; the KV cache is kept in the model's dtype"
    ]
    assert notes(FP8) == []


def test_groups_that_share_a_target_are_refused_when_their_schemes_differ():
    other = {**GROUP, "weights": {**WEIGHTS, "group_size": 64}}
    with pytest.raises(ModelFormatError, match="config_groups\\['b'\\]: its target 'Linear' is one of another group"):
        _read({**COMPRESSED, "config_groups": {"a": GROUP, "b": other}})
    assert _read({**COMPRESSED, "config_groups": {"a": GROUP, "b": GROUP}}).find_scheme("q_proj").group_size == 128
    named = {**other, "targets": ["q_proj"]}
    assert _read({**COMPRESSED, "config_groups": {"a": GROUP, "b": named}}).find_scheme("q_proj").group_size == 64
