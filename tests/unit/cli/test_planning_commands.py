"""quire plan and quire simulate from the command line: the figures in their outputs, and refusals that name the option."""

import json

import pytest

from quire.bench.steps import StepsTrial, measure_steps
from quire.cli.main import main
from quire.contracts.config import EngineConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128001,
}


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


@pytest.fixture(scope="module")
def steps_record(tiny_model, tmp_path_factory):
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_kv_blocks": 64, "device": "cpu", "num_threads": 1}
    record = measure_steps(EngineConfig(model=str(tiny_model), **options), StepsTrial(seconds=0.5, num_decode_steps=3))
    path = tmp_path_factory.mktemp("steps") / "steps.json"
    path.write_text(record.to_json())
    return str(path)


def refused(arguments, capsys):
    assert main(arguments) == 1
    return capsys.readouterr().err


def test_plan_of_llama_8b_has_its_published_sizes(llama_8b, capsys):
    arguments = ["plan", llama_8b, "--hardware", "h100", "--num", "2", "--input-len", "1000", "--output-len", "200"]
    assert main([*arguments, "--rate", "5", "--slo", "ttft:500", "tpot:50", "--price", "2.5", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["num_parameters"] == 8_030_261_248
    assert figures["kv_bytes_per_token"]["bfloat16"] == 131_072
    assert figures["weight_bytes"]["bfloat16"] == 2 * 8_030_261_248
    assert figures["weight_bytes"]["int8"] < 0.52 * figures["weight_bytes"]["bfloat16"]
    assert figures["best"]["replicas_needed"] >= 1
    assert figures["best"]["cost"]["per_million_output"] > figures["best"]["cost"]["per_million_input"] > 0
    assert "not measured" not in figures["model"]
    assert figures["is_measured"] is False


def test_plan_writes_a_page_and_text(llama_8b, tmp_path, capsys):
    page = tmp_path / "plan.html"
    assert main(["plan", llama_8b, "--hardware", "a100", "--html", str(page)]) == 0
    assert "<svg" in page.read_text()
    assert "published figures, not measured" in capsys.readouterr().out


def test_plan_of_a_model_that_does_not_fit_fails(llama_8b, capsys):
    assert main(["plan", llama_8b, "--hardware", "l4", "--memory-gb", "16"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_plan_takes_a_trace_with_its_rate(llama_8b, tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:17:{second:02d}.0000000,400,100" for second in range(0, 60, 2)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    assert main(["plan", llama_8b, "--hardware", "h200", "--trace", str(trace), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["rate"] == pytest.approx(30 / 58)
    assert figures["lengths"]["p95"] == 500


def test_plan_with_a_measurement_uses_its_model_and_limits(steps_record, tiny_model, capsys):
    arguments = ["plan", str(tiny_model), "--measured", steps_record, "--input-len", "20", "--output-len", "10", "--json"]
    assert main(arguments) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["is_measured"] is True
    assert figures["limits"]["max_num_seqs"] == 4
    assert figures["hardware"]["is_measured"] is True


def test_simulate_prints_the_report_and_writes_json_and_page(llama_8b, tmp_path, capsys):
    path, page = tmp_path / "out.json", tmp_path / "out.html"
    arguments = ["simulate", llama_8b, "--hardware", "h100", "--replicas", "2", "--num-prompts", "30", "--request-rate", "10"]
    outputs = ["--output-json", str(path), "--save-detailed", "--html-report", str(page)]
    assert main([*arguments, "--input-len", "500", "--output-len", "50", "--goodput", "ttft:300", *outputs]) == 0
    assert "Serving Benchmark Result" in capsys.readouterr().out
    figures = json.loads(path.read_text())
    assert figures["completed"] == 30
    assert figures["total_output_tokens"] == 1500
    assert len(figures["requests"]) == 30
    assert sum(figures["simulation"]["requests_by_replica"]) == 30
    assert figures["num_good_requests"] == 30
    assert "<svg" in page.read_text()


def test_simulate_with_a_measurement(steps_record, tiny_model, capsys):
    arguments = ["simulate", str(tiny_model), "--measured", steps_record, "--input-len", "20", "--output-len", "10"]
    assert main([*arguments, "--num-prompts", "10"]) == 0
    assert "fit of steps.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--hardware (one of h100, h200"),
        (["--hardware", "h900"], "--hardware must be one of h100"),
        (["--hardware", "h100", "--quantization", "int3"], "--quantization must be auto or one of"),
        (["--hardware", "h100", "--kv-cache-dtype", "int2"], "--kv-cache-dtype must be auto or one of"),
        (["--hardware", "a100", "--kv-cache-dtype", "fp8"], "'fp8' needs a GPU of compute capability 8.9 or later"),
        (["--hardware", "epyc-9654", "--kv-cache-dtype-skip-layers", "0"], "needs a quantised --kv-cache-dtype"),
        (["--hardware", "l4", "--kv-cache-dtype", "int8", "--kv-cache-dtype-skip-layers", "32"], "from -32 to 31"),
        (["--measured", "missing.json", "--kv-cache-dtype-skip-layers", "0"], "must be left out with --measured"),
        (["--hardware", "h100", "--memory-gb", "-1"], "--memory-gb must be a number above 0"),
        (["--hardware", "h100", "--max-num-seqs", "0"], "max_num_seqs must be an integer >= 1, got 0"),
        (["--hardware", "h100", "--trace", "missing.csv"], "missing.csv cannot be read"),
        (["--hardware", "h100", "--input-len", "0"], "--input-len must be an integer >= 1, got 0"),
        (["--hardware", "h100", "--trace", "t.csv", "--input-len", "5"], "--input-len is for synthetic requests"),
        (["--hardware", "h100", "--trace-duration", "5"], "--trace-duration needs --trace"),
        (["--measured", "missing.json"], "--measured missing.json cannot be read"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_wrong_options_are_refused_by_name(command, arguments, message, llama_8b, capsys):
    assert message in refused([command, llama_8b, *arguments], capsys)


def test_measurement_of_another_model_or_format_is_refused(steps_record, tiny_model, llama_8b, capsys):
    assert "model must be" in refused(["plan", llama_8b, "--measured", steps_record], capsys)
    wrong = ["simulate", str(tiny_model), "--measured", steps_record, "--quantization", "int4"]
    assert "--quantization must be auto or float32" in refused(wrong, capsys)


def test_simulate_refuses_devices_that_do_not_divide_the_heads(llama_8b, capsys):
    wrong = ["simulate", llama_8b, "--hardware", "h100", "--tensor-parallel-size", "3"]
    assert "--tensor-parallel-size must divide the 8 KV heads" in refused(wrong, capsys)


def test_simulated_sweep_prints_a_row_for_each_rate(llama_8b, tmp_path, capsys):
    path, page = tmp_path / "sweep.json", tmp_path / "sweep.html"
    arguments = ["simulate", llama_8b, "--hardware", "h200", "--num-prompts", "20", "--output-len", "20", "--sweep", "rate:1,8"]
    assert main([*arguments, "--output-json", str(path), "--html-report", str(page)]) == 0
    assert "tok/s/user" in capsys.readouterr().out
    assert [point["value"] for point in json.loads(path.read_text())["points"]] == [1, 8]
    assert "<svg" in page.read_text()


def test_sweep_of_a_server_refuses_what_is_for_one_run(capsys):
    arguments = ["bench", "serve", "--sweep", "rate:1,2"]
    assert "--save-result must be left out with --sweep" in refused([*arguments, "--save-result"], capsys)
    assert "--request-rate must be left out with --sweep" in refused([*arguments, "--request-rate", "2"], capsys)
    assert "--sweep takes concurrency" in refused(["bench", "serve", "--sweep", "x"], capsys)


@pytest.mark.slow
def test_sweep_of_an_engine_in_process(tiny_model, tmp_path, capsys):
    path = tmp_path / "sweep.json"
    arguments = ["bench", "serve", "--in-process", "--model", str(tiny_model), "--num-threads", "1", "--device", "cpu"]
    lengths = ["--random-input-len", "20", "--random-output-len", "10", "--num-prompts", "6", "--no-progress"]
    assert main([*arguments, *lengths, "--sweep", "concurrency:1,3", "--ignore-eos", "--output-json", str(path)]) == 0
    assert [run["completed"] for run in json.loads(path.read_text())["runs"]] == [6, 6]


def test_bench_parallel_simulates_layouts(capsys):
    command = ["bench", "parallel", "--simulate", "H100x2", "--model", "demo-moe", "--context-len", "64"]
    assert main([*command, "--layout", "ep2xhomes2", "--layout", "pcp2", "--new-tokens", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("SIMULATED: demo-moe (bfloat16) on 2 x NVIDIA H100")
    assert [line.split()[0] for line in lines[1:]] == ["layout", "ep2xhomes2", "pcp2"]
    assert main([*command, "--layout", "tp4"]) == 1
    assert "layout tp4 has 4 devices, but --simulate has 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layout", "tp2"], "--layout needs --simulate or --compare"),
        (["--compare", "--layout", "pp2"], "--compare takes layouts of tpN, homesN, dcpN and pcpN, got pp2"),
        (["--compare", "--new-tokens", "8"], "--new-tokens needs --simulate"),
        (["--batch-size", "4"], "--batch-size needs --simulate or --compare"),
        (["--compare", "--imbalance", "2"], "--imbalance needs --simulate"),
        (["--simulate", "H100x2", "--ranks", "2"], "--ranks must be left out with --simulate"),
        (["--compare", "--idle", "1"], "--idle must be left out with --compare"),
        (["--simulate", "H100x2", "--compare"], "--simulate and --compare: give one of them"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_bench_parallel_refuses_options_without_effect(options, message, capsys):
    assert message in refused(["bench", "parallel", *options], capsys)


@pytest.mark.parametrize(
    "options, text",
    [
        (
            ["--prefill-replicas", "2", "--kv-host-gb", "9", "--link-gb-per-s", "25", "--link-latency-ms", "1"],
            " prompts handed over",
        ),
        (["--fail", "0:0.3:1", "--replicas", "2"], "streams continued"),
        (["--autoscale", "1:3", "--autoscale-interval", "1", "--prompt-tokens-per-s", "800"], "serve: 3 replicas"),
        ([], "Model bandwidth utilization, MBU (%)"),
    ],
    ids=["roles", "failure", "autoscale", "utilization"],
)
def test_simulate_shows_what_happened_to_replicas(llama_8b, options, text, capsys):
    arguments = ["simulate", llama_8b, "--hardware", "h100", "--num-prompts", "20", "--request-rate", "10"]
    assert main([*arguments, "--input-len", "600", "--output-len", "100", *options]) == 0
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [
        (["--prefill-replicas", "-1"], "--prefill-replicas must be an integer >= 0, got -1"),
        (["--prefill-replicas", "1", "--link-gb-per-s", "0"], "--link-gb-per-s must be a number above 0, got 0"),
        (["--prefill-replicas", "1", "--kv-disk-gb", "1"], "--kv-disk-gb must be left out with --prefill-replicas"),
        (["--kv-host-gb", "-1"], "--kv-host-gb must be a number above 0, got -1"),
        (["--kv-host-gb", "0.001"], "raise --kv-host-gb"),
        (["--fail", "1:5"], "--fail takes a replica below 1"),
        (["--fail", "soon"], "--fail takes REPLICA:AT_S"),
        (["--autoscale", "0:4"], "--autoscale takes MIN:MAX"),
        (["--autoscale", "1:2", "--replicas", "3"], "--replicas must be from 1 to 2"),
        (["--autoscale", "1:2", "--prompt-tokens-per-s", "0"], "prompt_tokens_per_s must be a positive number, got 0"),
        (["--link-gb-per-s", "5"], "--link-gb-per-s needs --prefill-replicas"),
        (["--kv-save", "all"], "--kv-save needs --kv-host-gb, --kv-disk-gb or --prefill-replicas"),
        (["--kv-host-gb", "9", "--kv-disk-gb-per-s", "1"], "--kv-disk-gb-per-s needs --kv-disk-gb"),
        (["--down-delay", "5"], "--down-delay needs --autoscale"),
        (["--autoscale", "1:2", "--batching", "static"], "--batching must be continuous"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_wrong_events_of_a_simulation_are_refused_by_name(llama_8b, options, message, capsys):
    assert message in refused(["simulate", llama_8b, "--hardware", "h100", *options], capsys)


def test_simulated_tiers_load_what_left_the_pool(llama_8b, tmp_path, capsys):
    rows = [f'{{"timestamp": {1000 * place}, "input_length": 400, "output_length": 2, "hash_ids": [{one}]}}'
            for place, one in enumerate([1, 2, 1])]  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(rows))
    tiers = ["--kv-host-gb", "1", "--kv-disk-gb", "20", "--kv-save", "all", "--num-kv-blocks", "30", "--block-size", "16"]
    assert main(["simulate", llama_8b, "--hardware", "h100", "--trace", str(path), "--max-model-len", "480", *tiers]) == 0
    assert "pages loaded from the host" in capsys.readouterr().out


def test_utilization_of_a_server_needs_its_checkpoint(capsys):
    message = refused(["bench", "serve", "--hardware", "h100"], capsys)
    assert "--hardware and --measured need --model" in message
    assert "--num-devices needs --hardware or --measured" in refused(["bench", "serve", "--num-devices", "2"], capsys)
    assert "--kv-cache-dtype is of the engine" in refused(["bench", "serve", "--kv-cache-dtype", "int8"], capsys)


def test_run_of_an_engine_in_process_has_its_utilization(steps_record, tiny_model, capsys):
    arguments = ["bench", "serve", "--in-process", "--model", str(tiny_model), "--measured", steps_record, "--no-progress"]
    load = ["--num-prompts", "3", "--input-len", "9", "--output-len", "6", "--num-kv-blocks", "40", "--device", "cpu"]
    assert main([*arguments, *load]) == 0
    assert "Model FLOPs utilization, MFU (%)" in capsys.readouterr().out
