"""The kernel benchmark runs every kernel, counts its work, and says where it was made."""

import json

import pytest

from quire.base.errors import ConfigError
from quire.bench.expert_cases import embed_experts
from quire.bench.kernel_setup import MixtureShape, ModelShapes, Setup, shapes_of
from quire.bench.kernels import KERNELS, KernelOptions, default_working_set, make_cases, measure_kernels
from quire.cli.main import main
from quire.kernels.native import load_native
from quire.model.config_reader import read_model_spec
from tests.tiny_checkpoint import VOCAB_SIZE, write_checkpoint

native = load_native()
pytestmark = pytest.mark.skipif(native is None or not hasattr(native, "peak"), reason="the native kernels are not built")

ISAS = native.supported_isas() if native else []
SMALL = ("--rows", "1", "3", "--lengths", "5", "40", "--seconds", "1e-4", "--working-set-bytes", "20000", "--no-progress")


def small_setup(rows=(1, 3)):
    return Setup(native, "portable", num_threads=1, working_set_bytes=100_000, rows=rows, lengths=(40,))


@pytest.mark.slow
@pytest.mark.parametrize("isa", [*(pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS[:-1]), *ISAS[-1:]])
def test_command_measures_every_kernel_and_writes_a_record(tiny_model, tmp_path, capsys, isa):
    file = tmp_path / "record.json"
    arguments = ["bench", "kernels", "--model", str(tiny_model), "--isa", isa, "--threads", "1", *SMALL]
    assert main([*arguments, "--output-json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert (record["isa"], record["num_threads"], record["provenance"]["num_threads"]) == (isa, 1, 1)
    assert record["provenance"]["machine"]
    assert set(KERNELS) - {"experts"} == {result["kernel"] for result in record["results"]}
    formats = {result["number_format"] for result in record["results"] if result["kernel"] == "linear"}
    assert formats == {"bf16", "bf12", "f32", "f16", "int8", "int4", "fp8"}
    for kernel in ("attention", "store"):
        formats = {result["number_format"] for result in record["results"] if result["kernel"] == kernel}
        assert formats == {"bf16", "f32", "int8", "fp8", "k8v4", "turboquant_4bit"}
    for result in record["results"]:
        assert result["seconds"] > 0
        assert result["bandwidth_share"] == pytest.approx(result["bytes_per_s"] / result["machine_bytes_per_s"])
        assert result["compute_share"] == pytest.approx(result["operations_per_s"] / result["machine_operations_per_s"])
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + len(record["results"])


def test_command_measures_only_what_is_asked_for(tiny_model, capsys):
    assert main(["bench", "kernels", "--model", str(tiny_model), "--only", "norm", *SMALL]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["norm", "norm"]


def test_cases_count_their_work_and_their_copies_fill_the_working_set(tiny_model):
    shapes = shapes_of(read_model_spec(tiny_model))
    assert shapes.linears == {
        "q": (32, 32),
        "k, v": (16, 32),
        "o": (32, 32),
        "gate, up": (48, 32),
        "down": (32, 48),
        "head": (VOCAB_SIZE, 32),
    }
    cases = {}
    for case in make_cases(small_setup(), shapes):
        case.run(case.num_copies - 1)
        assert case.num_bytes * case.num_copies >= 100_000
        cases[case.kernel, case.number_format, case.shape] = case
    linear = cases["linear", "f32", "M=3 gate, up [48, 32]"]
    assert (linear.num_operations, linear.num_bytes) == (2 * 3 * 48 * 32, 4 * (48 * 32 + 3 * (48 + 32)))
    decode, prefill = cases["attention", "bf16", "decode S=16 context 40"], cases["attention", "bf16", "prefill 40"]
    assert (decode.num_operations, prefill.num_operations) == (4 * 32 * 16 * 40, 4 * 32 * 40 * 41 // 2)
    assert decode.num_bytes == 16 * 40 * 2 * 16 * 2 + 2 * 4 * 16 * 32
    to_bytes, to_bf16 = cases["pack", "int8", "M=3 [48]"], cases["pack", "bf16", "M=3 [48]"]
    assert (to_bytes.num_bytes, to_bf16.num_bytes) == (3 * (48 * (4 + 1) + 12), 3 * 48 * (4 + 2))
    int8, int4 = cases["quantize", "int8", "gate, up [48, 32]"], cases["quantize", "int4", "gate, up [48, 32]"]
    assert (int8.num_bytes, int4.num_bytes) == (48 * (32 * 3 + 4), 48 * (32 * 3 + 4))
    assert ("quantize", "int4", "down [32, 48]") not in cases


def test_shapes_of_a_mixture_are_those_of_an_expert(tmp_path):
    spec = read_model_spec(write_checkpoint(tmp_path / "moe", "qwen3_moe"))
    linears = shapes_of(spec).linears
    assert (linears["expert gate, up"], linears["expert down"]) == ((24, 32), (32, 24))
    assert "gate, up" not in linears


@pytest.mark.covering
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("number_format, size", [("bf16", 2), ("int8", 1)])
def test_mixtures_count_the_experts_that_are_met(isa, number_format, size):
    shapes = ModelShapes({}, 32, 64, 1, 1, 2, MixtureShape(num_experts=6, top_k=2, inner_size=16))
    setup = Setup(native, isa, num_threads=2, working_set_bytes=100_000, rows=(1, 5), lengths=(40,))
    one, five = (case for case in make_cases(setup, shapes, ("experts",)) if case.number_format == number_format)
    assert (one.num_operations, five.num_operations) == (2 * 2 * 3 * 16 * 32, 5 * 2 * 2 * 3 * 16 * 32)
    others = 4 * 6 * 32 + 2 * 4 * 32
    assert 2 * 3 * 16 * 32 * size <= one.num_bytes - others < 2 * 3 * (16 * 32 * size + 32 * 4) + 1
    assert five.num_bytes - others - 4 * 2 * 4 * 32 == 3 * (one.num_bytes - others)
    assert one.num_copies == 3 * five.num_copies
    for case in (one, five):
        for copy in range(case.num_copies):
            case.run(copy)


def test_tokens_of_a_mixture_meet_the_experts_in_turn():
    shapes, mixture = ModelShapes({}, 32, 64, 1, 1, 2), MixtureShape(num_experts=6, top_k=4, inner_size=16)
    embedding = embed_experts(mixture, shapes.hidden_size)
    assert [sorted(row.topk(4).indices.tolist()) for row in embedding] == [[0, 1, 2, 3], [0, 1, 4, 5], [2, 3, 4, 5]]


def test_results_that_no_step_has_are_left_out():
    shapes = ModelShapes({"head": (40_000_000, 32)}, 32, 64, 1, 1, 2)
    cases = make_cases(small_setup(rows=(2,)), shapes, ("linear",))
    assert list(cases) == []


@pytest.mark.parametrize("files, expected", [({}, 64), ({"index0": "48K", "index3": "32768K"}, 128), ({"index2": "1G"}, 4096)])
def test_working_set_is_four_times_the_largest_cache(tmp_path, files, expected):
    for name, size in files.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "size").write_text(size + "\n")
    assert default_working_set(tmp_path) == expected << 20


@pytest.mark.parametrize(
    "options",
    [{"rows": (0,)}, {"rows": ()}, {"lengths": (-1,)}, {"num_threads": 0}, {"seconds": 0.0}, {"only": ("mlp",)}],
    ids=str,
)
def test_options_are_refused_when_they_make_no_sense(options):
    with pytest.raises(ConfigError):
        KernelOptions(**options)


def test_unknown_instruction_set_is_refused():
    with pytest.raises(ConfigError, match="portable"):
        measure_kernels(KernelOptions(isa="sse9"))


def test_missing_kernels_are_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr("quire.bench.kernels.load_native", lambda: None)
    with pytest.raises(ConfigError, match="install"):
        measure_kernels(KernelOptions())


@pytest.mark.parametrize("kind", ["f32", "bf16", "u8"])
@pytest.mark.parametrize("isa", ISAS)
def test_peak_counts_the_operations_of_all_threads(kind, isa):
    one, two = (native.peak(kind, threads, 50, isa) for threads in (1, 2))
    assert one > 0
    assert one % (50 * 32) == 0
    assert two == 2 * one
    with pytest.raises(ValueError):
        native.peak("f64", 1, 1, isa)
