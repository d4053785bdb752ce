"""The command line: what it prints, writes and refuses."""

import io
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from quire.cli.main import main, make_parser
from quire.cli.other_engines import RENAMED
from tests.needs_re2 import needs_re2
from tests.unit.engine.one_compiler import one_compiler


@pytest.fixture(autouse=True)
def small_pool(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def run(capsys, *argv):
    status = main([str(arg) for arg in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_generate_streams_the_prompt_and_its_continuation(capsys, tiny_model):
    from quire import LLM, SamplingParams

    options = ("--temperature", 0, "--max-tokens", 5, "--ignore-eos", "--log-level", "error")
    status, out, err = run(capsys, "generate", "the fox", "--model", tiny_model, *options)
    llm = LLM(str(tiny_model), num_kv_blocks=20)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    text = llm.generate("the fox", params, use_tqdm=False)[0].outputs[0].text
    assert (status, out) == (0, f"the fox{text}\n")
    assert "5 tokens in" in err


def test_generate_says_so_when_the_context_ends_the_output(capsys, tiny_model):
    options = ("--temperature", 0, "--ignore-eos", "--log-level", "error", "--num-kv-blocks", 20)
    for max_tokens, words in (
        (300, "warning: the output ends after 254 of max_tokens 300: the context has 256 tokens"),
        (9, None),
    ):
        status, _, err = run(capsys, "generate", "the fox", "--model", tiny_model, "--max-tokens", max_tokens, *options)
        assert status == 0
        assert ("warning" in err) is (words is not None)
        assert words is None or words in err


def test_chat_says_so_when_the_context_ends_an_answer(capsys, tiny_model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the fox\n/exit\n"))
    options = ("--temperature", 0, "--ignore-eos", "--log-level", "error", "--num-kv-blocks", 20)
    status, _, err = run(capsys, "chat", tiny_model, "--max-tokens", 300, *options)
    assert status == 0
    assert "of max_tokens 300: the context has 256 tokens (max_model_len), the prompt" in err
    assert err.endswith("(/reset starts anew)\n")


def test_generate_reads_standard_input_and_can_leave_the_prompt_out(capsys, tiny_model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the fox"))
    options = ("--temperature", 0, "--max-tokens", 3, "--no-echo")
    status, out, _ = run(capsys, "generate", "-", "--model", tiny_model, *options)
    assert status == 0
    assert not out.startswith("the fox")


def test_generate_prints_the_memory_plan_and_can_be_quiet(capsys, tiny_model):
    command = ("generate", "the fox", "--model", tiny_model, "--max-tokens", 2)
    status, out, err = run(capsys, *command)
    assert status == 0
    assert "KV cache" in err
    status, quiet_out, err = run(capsys, *command, "--log-level", "error")
    assert (status, quiet_out) == (0, out)
    assert "KV cache" not in err


def test_chat_answers_each_line_with_the_conversation_so_far(capsys, tiny_model, monkeypatch):
    from quire import LLM, SamplingParams

    monkeypatch.setattr(sys, "stdin", io.StringIO("the fox\n\nthe dog\n/reset\nthe fox\n/exit\nnot read\n"))
    status, out, _ = run(capsys, "chat", tiny_model, "--temperature", 0, "--max-tokens", 4, "--ignore-eos")
    llm = LLM(str(tiny_model), num_kv_blocks=40)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    messages = [{"role": "user", "content": "the fox"}]
    first = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "the dog"}]
    second = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
    assert (status, out) == (0, f"{first}\n{second}\n{first}\n")


def test_chat_goes_on_after_an_interrupted_answer(capsys, tiny_model, monkeypatch):
    import signal

    from quire.worker.step_driver import StepDriver

    real = StepDriver.execute
    steps = []

    def interrupt(self, plan):
        steps.append(plan)
        if len(steps) == 2:
            signal.raise_signal(signal.SIGINT)
        return real(self, plan)

    monkeypatch.setattr(StepDriver, "execute", interrupt)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the fox\nthe dog\n"))
    status, out, err = run(
        capsys, "chat", tiny_model, "--temperature", 0, "--max-tokens", 5, "--ignore-eos", "--log-level", "error"
    )
    assert (status, err) == (0, "")
    assert "[stopped]" in out
    assert len(steps) == 2 + 5


def test_chat_takes_back_a_message_that_is_refused(capsys, tiny_model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the fox " * 400 + "\nthe dog\n"))
    status, out, err = run(capsys, "chat", tiny_model, "--temperature", 0, "--max-tokens", 4)
    assert status == 0
    assert "/reset" in err
    assert out.strip()


def test_model_may_be_given_as_an_option_too(capsys, tiny_model):
    outs = [run(capsys, "inspect", *argv)[1] for argv in (("--model", tiny_model), (tiny_model,))]
    # What is free in memory may have changed between the two.
    assert len({re.sub(r"[0-9.]+ GiB avail", "", out) for out in outs}) == 1


def test_standard_input_that_is_not_text_is_refused(tiny_model):
    command = [sys.executable, "-m", "quire", "generate", "-", "--model", str(tiny_model)]
    done = subprocess.run(command, input=b"\xff\xfe\x80", capture_output=True, check=False)
    assert done.returncode == 1
    assert b"error: standard input is not UTF-8 text" in done.stderr


@pytest.mark.slow
def test_closed_standard_output_is_no_error(tiny_model):
    command = f"{sys.executable} -m quire inspect {tiny_model} >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_inspect_shows_structure_and_memory_without_weights(capsys, tiny_model, tmp_path):
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    status, out, _ = run(capsys, "inspect", tmp_path, "--parameters", "--num-kv-blocks", 7)
    assert status == 0
    for part in ("qwen3 in float32", "2 layers", "num_kv_heads=2", "7 blocks of 16", "layers.1.down.weight"):
        assert part in out


def test_inspect_shows_what_each_pipeline_stage_has(capsys):
    pytest.importorskip("quire.kernels.cpu._native", reason="the native kernels are not built")
    options = ("-pp", 2, "--pipeline-layers", "6,2", "--num-kv-blocks", 16)
    status, out, _ = run(capsys, "inspect", "demo", *options)
    assert status == 0
    stages = [line for line in out.splitlines() if line.startswith("stage ")]
    assert [line.split("; ")[1] for line in stages] == ["layers 0 to 5 and the embedding", "layers 6 to 7 and the LM head"]
    assert ["768.0 KiB" in stages[0], "256.0 KiB" in stages[1]] == [True, True]
    status, out, _ = run(capsys, "inspect", "demo", "-tp", 2, *options)
    ranks = [line for line in out.splitlines() if line.startswith("stage ")]
    assert [line[:15] for line in ranks] == [f"stage {stage}, rank {rank}" for stage in (0, 1) for rank in (0, 1)]
    assert ["384.0 KiB" in line for line in ranks] == [True, True, False, False]
    assert [line.split("; ")[2] for line in ranks[2:]] == ["heads 0 to 1, kv heads 0 to 0", "heads 2 to 3, kv heads 1 to 1"]
    assert not [line for line in out.splitlines() if line.startswith("rank ")]


def test_bench_throughput_writes_its_figures(capsys, tiny_model, tmp_path):
    path = tmp_path / "figures.json"
    options = ("--num-prompts", 3, "--random-input-len", 9, "--random-output-len", 4, "--seed", 1, "--ignore-eos")
    more = ("--no-enable-prefix-caching", "--dtype", "float32", "--output-json", path, "--no-progress")
    status, out, _ = run(capsys, "bench", "throughput", "--model", tiny_model, *options, *more)
    figures = json.loads(path.read_text())
    assert status == 0
    assert "Throughput:" in out
    assert figures["num_requests"] == 3
    assert figures["total_num_tokens"] == 3 * 13
    assert figures["requests_per_second"] == pytest.approx(3 / figures["elapsed_time"])
    assert figures["tokens_per_second"] == pytest.approx(39 / figures["elapsed_time"])
    assert figures["prompt_tokens_per_second"] == pytest.approx(27 / figures["elapsed_time"])
    assert figures["output_tokens_per_second"] == pytest.approx(12 / figures["elapsed_time"])
    assert figures["output_tokens_per_second_of_runs"] == [figures["output_tokens_per_second"]]
    assert figures["provenance"]["num_threads"] == 1
    assert "Of 1 runs" not in out


@pytest.mark.one_in(2)
@pytest.mark.parametrize("num_repeats", [2, 3])
def test_bench_throughput_reports_the_median_when_it_is_repeated(capsys, tiny_model, tmp_path, num_repeats):
    path = tmp_path / "figures.json"
    options = ("--num-prompts", 2, "--input-len", 9, "--output-len", 4, "--repeat", num_repeats, "--output-json", path)
    status, out, _ = run(capsys, "bench", "throughput", "--model", tiny_model, *options, "--no-progress")
    figures = json.loads(path.read_text())
    assert status == 0
    assert f"Of {num_repeats} runs" in out
    rates = sorted(figures["output_tokens_per_second_of_runs"], reverse=True)
    assert len(rates) == num_repeats
    assert figures["output_tokens_per_second"] == rates[num_repeats // 2]


def test_bench_throughput_says_how_idle_pipeline_stages_were(capsys, tmp_path, monkeypatch):
    pytest.importorskip("quire.kernels.cpu._native", reason="the native kernels are not built")
    from quire.worker import pipeline_build
    from tests.thread_workers import ThreadWorkers

    monkeypatch.setattr(pipeline_build, "spawn_workers", ThreadWorkers)
    workload = ("--num-prompts", 4, "--max-num-seqs", 4, "--input-len", 4, "--output-len", 4, "--num-threads", 2)
    path = tmp_path / "figures.json"
    status, out, _ = run(capsys, "bench", "throughput", "--model", "demo", "-pp", 2, *workload, "--output-json", path)
    assert status == 0
    assert re.search(r"^Idle: stage 0 \d+\.\d%, stage 1 \d+\.\d%$", out, re.MULTILINE)
    assert len(json.loads(path.read_text())["stage_idle_shares"]) == 2


def test_bench_latency_writes_its_figures(capsys, tiny_model, tmp_path):
    path = tmp_path / "figures.json"
    options = ("--batch-size", 2, "--input-len", 5, "--output-len", 3, "--num-iters", 2, "--num-iters-warmup", 1)
    status, out, _ = run(capsys, "bench", "latency", "--model", tiny_model, *options, "--output-json", path, "--no-progress")
    figures = json.loads(path.read_text())
    assert status == 0
    assert "Avg latency" in out
    assert len(figures["latencies"]) == 2
    assert figures["avg_latency"] == pytest.approx(sum(figures["latencies"]) / 2)
    assert 0 < figures["median_time_to_first_token"] < figures["avg_latency"]


def test_bench_latency_of_one_token_has_no_time_per_output_token(capsys, tiny_model):
    options = ("--batch-size", 1, "--input-len", 2, "--output-len", 1, "--num-iters", 1, "--num-iters-warmup", 0)
    status, out, _ = run(capsys, "bench", "latency", "--model", tiny_model, *options, "--no-progress")
    assert status == 0
    assert "per output token" not in out


def test_bench_perplexity_compares_precisions_and_writes_its_figures(capsys, tiny_model, tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox " * 20)
    path = tmp_path / "figures.json"
    options = ("--text", tmp_path / "text.txt", "--context", 64, "--against", "int8", "--output-json", path, "--no-progress")
    status, out, _ = run(capsys, "bench", "perplexity", "--model", tiny_model, *options)
    figures = json.loads(path.read_text())
    assert (status, figures["text"]) == (0, "text.txt")
    assert [result["quantization"] for result in figures["results"]] == [None, "int8"]
    assert [line.count("perplexity") for line in out.splitlines()] == [1, 1]
    assert "%" in out.splitlines()[1]


@needs_re2
def test_quantize_writes_a_checkpoint_that_generates(capsys, tiny_model, tmp_path):
    status, out, _ = run(capsys, "quantize", tiny_model, tmp_path / "out", "--to", "int4", "--no-progress")
    assert status == 0
    assert "14 weights quantised" in out
    assert "dB" in out
    status, out, _ = run(capsys, "generate", "the fox", "--model", tmp_path / "out", "--max-tokens", 3, "--log-level", "error")
    assert (status, out[:7]) == (0, "the fox")


@pytest.mark.slow
def test_character_that_the_terminal_lacks_does_not_end_an_answer(tiny_model):
    command = [sys.executable, "-m", "quire", "generate", "the \u00e9", "--model", str(tiny_model), "--max-tokens", "2"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert done.stdout.startswith(b"the ?")
    assert b"KV cache" in done.stderr


@pytest.mark.parametrize(
    "argv, message",
    [
        (("generate", "x", "--model", "/nowhere/at/all"), "/nowhere/at/all"),
        (("generate", "x", "--temperature", "nan"), "temperature"),
        (("generate", "x", "--max-num-seqs", "0"), "max_num_seqs"),
        (("generate", "x", "--num-threads", "100000"), "num_threads must be from 1 to"),
        (("bench", "kernels", "--threads", "100000"), "threads must be from 1 to"),
        (("train-draft", "--kind", "mtp", "demo", "text", "out", "--num-threads", "0"), "num_threads must be from 1 to"),
        (("bench", "throughput", "--num-prompts", "0"), "num_prompts"),
        (("bench", "throughput", "--model", "TINY", "--repeat", "0"), "repeat must be at least 1, got 0"),
        (("bench", "throughput", "--model", "TINY", "--output-json", "/nowhere/x.json"), "/nowhere/x.json"),
        (("bench", "throughput", "--model", "TINY", "--random-input-len", "200", "--random-output-len", "57"), "257 tokens"),
        (("bench", "latency", "--model", "TINY", "--input-len", "200", "--output-len", "57"), "257 tokens"),
        (("inspect", "/"), "config.json"),
        (("quantize", "TINY", "TINY", "--to", "int8"), "not an empty folder"),
        (("bench", "perplexity", "--model", "TINY", "--text", "/nowhere.txt"), "/nowhere.txt"),
        (("generate", "x" * 300, "--model", "TINY"), "300 tokens"),
    ],
)
def test_error_is_one_clear_line(capsys, tiny_model, argv, message):
    argv = [str(tiny_model) if arg == "TINY" else arg for arg in argv]
    status, out, err = run(capsys, *argv, "--log-level", "error")
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_debug_shows_the_traceback(capsys):
    from quire import QuireError

    with pytest.raises(QuireError):
        run(capsys, "inspect", "/", "--debug")


@pytest.mark.parametrize(
    "argv, command, words",
    [
        ((), "", "COMMAND"),
        (("unknown",), "", "unknown"),
        (("bench",), " bench", "KIND"),
        (("generate",), " generate", "prompt"),
        (("generate", "x", "--quantization", "int5"), " generate", "'int5' (choose from"),
        (("generate", "x", "--max-tokens", "five"), " generate", "'five'"),
        (("quantize", "demo", "out"), " quantize", "--to"),
        (("bench", "perplexity"), " bench perplexity", "--text"),
        (("generate", "x", "-pp", "2", "--pipeline-layers", "4;4"), " generate", "must be integers with commas between them"),
    ],
)
def test_bad_usage_is_said_in_one_line_without_all_options(capsys, argv, command, words):
    with pytest.raises(SystemExit) as caught:
        main(list(argv))
    assert caught.value.code == 2
    first, hint = capsys.readouterr().err.splitlines()
    assert first.startswith(f"quire{command}: error: ")
    assert words in first
    assert hint == f"`quire{command} --help` lists the options"


@pytest.mark.parametrize(
    "argv, command, hint",
    [
        (("generate", "x", "--max-token", "5"), "generate", "--max-tokens"),
        (("generate", "x", "--guided-jsn={}"), "generate", "--guided-json"),
        (("bench", "throughput", "--num-prompt", "5"), "bench throughput", "--num-prompts"),
        (("batch", "run", "-i", "a", "-o", "b", "--zzz"), "batch run", None),
        (("serve", "--prot", "3"), "serve", "--port"),
    ],
)
def test_unknown_option_is_answered_by_its_own_command(capsys, argv, command, hint):
    with pytest.raises(SystemExit):
        main(list(argv))
    err = capsys.readouterr().err
    assert err.startswith(f"quire {command}: error: unrecognized arguments: {argv[-1] if hint is None else ''}")
    assert err.endswith(f"\n`quire {command} --help` lists the options\n")
    assert err.count("\n") == 2
    assert ("did you mean" in err) is (hint is not None)
    assert hint is None or f"did you mean {hint}?" in err


def test_option_of_another_engine_is_answered_with_the_one_to_use(capsys):
    hints = {name: f"use {own}" for name, own in RENAMED.items()} | {
        "--enable-chunked-prefill": "leave it out: it is always on",
        "--trust-remote-code": "leave it out: code of a checkpoint is never run",
    }
    parser = make_parser()
    for name, hint in hints.items():
        with pytest.raises(SystemExit):
            parser.parse_args(["serve", "demo", name])
        assert f"unrecognized arguments: {name} ({hint})\n" in capsys.readouterr().err


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "argv",
    [
        ("generate", "x", "--max-num-seqs", "0"),
        ("generate", "x", "--temperature", "nan"),
        ("generate", "x", "--json-schema", '{"a'),
        ("generate", "x", "--speculative", '{"method": "none"}'),
        ("chat", "--max-model-len", "0"),
        ("inspect", "--block-size", "0"),
        ("bench", "throughput", "--max-num-seqs", "0"),
        ("bench", "latency", "--batch-size", "0"),
        ("bench", "speculate", "--text", "/nowhere.txt"),
        ("bench", "constrained", "--text", "/nowhere.txt"),
        ("bench", "perplexity", "--text", "/nowhere.txt"),
        ("bench", "kernels", "--output-json", "/nowhere/x.json"),
        ("calibrate-layers", "demo", "/nowhere.txt"),
        ("train-draft", "--kind", "medusa", "demo", "text", "out", "--minutes", "-1"),
    ],
    ids=" ".join,
)
def test_bad_option_is_refused_before_torch_is_imported(argv):
    code = f"import sys; from quire.cli.main import main; print(main({list(argv)!r}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1 False\n"
    assert done.stderr.startswith("error: ")


def test_error_begins_a_line_when_the_prompt_was_printed_before_it(capsys):
    pytest.importorskip("llguidance")
    status, out, error = run(capsys, "generate", "hello", "--regex", "((", "--max-num-seqs", 2, "--log-level", "error")
    assert (status, out) == (1, "hello\n")
    assert error.startswith("error: ")


def test_generate_keeps_to_a_constraint(capsys, tmp_path):
    pytest.importorskip("llguidance")
    plain = ("--no-echo", "--max-num-seqs", 2, "--log-level", "error")
    fitted = ("--complete-json-within-max-tokens", "--max-tokens", 60)
    schema = tmp_path / "schema.json"
    schema.write_text(
        '{"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": false}'
    )
    with one_compiler():
        for flag, value in (("--json-schema", schema), ("--guided-json", schema.read_text())):
            out = run(capsys, "generate", "As JSON:", flag, value, *plain)[1]
            assert json.loads(out)["n"] in (1, 2)
        assert run(capsys, "generate", "The", "--regex", "a{3}b", *plain)[1] == "aaab\n"
        assert run(capsys, "generate", "The", "--choice", "left", "--choice", "right", *plain)[1] in ("left\n", "right\n")
        assert run(capsys, "generate", "The", "--grammar", 'root ::= "yes" | "no"', *plain)[1] in ("yes\n", "no\n")
        assert isinstance(json.loads(run(capsys, "generate", "The", "--json-object", *fitted, *plain)[1]), dict)


def test_generate_leaves_out_bad_words(capsys):
    pytest.importorskip("llguidance")
    plain = ("--max-num-seqs", 2, "--log-level", "error", "--no-echo", "--max-tokens", 40)
    free = run(capsys, "generate", "It was", *plain)[1]
    words = [word for word in dict.fromkeys(free.split()) if word.isalpha()][:2]
    out = run(capsys, "generate", "It was", "--bad-words", words[0], "--bad-words", words[1], *plain)[1]
    assert not any(word in out for word in words)


def test_constraints_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "x", "--regex", "a", "--choice", "b"])
    assert "not allowed with" in capsys.readouterr().err


def test_help_and_version_load_no_torch():
    code = (
        "import sys; from quire.cli.main import main\n"
        "try: main(['--version'])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "False"


@pytest.mark.slow
def test_closed_pipe_is_not_an_error(tiny_model):
    command = f"{sys.executable} -m quire inspect {tiny_model} --parameters | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to tune")
def test_tune_is_refused_without_a_gpu_and_writes_nothing(capsys, tmp_path):
    status, out, err = run(capsys, "tune", "--output", tmp_path / "table.json")
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert "GPU" in err
    assert not list(tmp_path.iterdir())
