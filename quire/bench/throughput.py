"""Throughput: all requests at once, from the first step to the last output."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from quire.base.errors import ConfigError
from quire.bench.provenance import Provenance, find_provenance
from quire.bench.roofline import needed_bytes, needed_flops
from quire.bench.workload import Workload
from quire.contracts.config import EngineConfig
from quire.contracts.lora import LoRARequest
from quire.engine.llm import LLM
from quire.kernels.peaks import measure_peaks

_WARM_UP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Throughput:
    """The results of one run, the median of several; times in seconds.

    mfu, mbu  utilisation relative to peak rates measured just before the run
    stage_idle_shares  idle share of each pipeline stage during the run; None without stages
    num_adapters       LoRA adapters, which the requests use in turn
    base_output_tokens_per_second_of_runs  of the runs without adapters, each just before one with them
    adapter_slowdown   median over these pairs: time with adapters / time without, minus 1; None without adapters
    """

    elapsed_time: float
    num_requests: int
    total_num_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int
    requests_per_second: float
    tokens_per_second: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    num_steps: int
    mfu: float
    mbu: float
    machine_bytes_per_second: float
    machine_flops_per_second: float
    model: str
    dtype: str
    seed: int
    output_tokens_per_second_of_runs: list[float]
    provenance: Provenance
    stage_idle_shares: tuple[float, ...] | None = None
    num_adapters: int = 0
    base_output_tokens_per_second_of_runs: tuple[float, ...] = ()
    adapter_slowdown: float | None = None

    def describe(self) -> str:
        """Return the results as readable lines."""
        rates = self.output_tokens_per_second_of_runs
        spread = f"Of {len(rates)} runs: {min(rates):.2f} to {max(rates):.2f} output tokens/s; the median follows"
        return "\n".join(
            (
                *([spread] if len(rates) > 1 else []),
                f"Throughput: {self.requests_per_second:.2f} requests/s, {self.tokens_per_second:.2f} total tokens/s, "
                f"{self.output_tokens_per_second:.2f} output tokens/s",
                f"Total num prompt tokens: {self.num_prompt_tokens}",
                f"Total num output tokens: {self.num_output_tokens}",
                f"Elapsed: {self.elapsed_time:.2f} s, {self.num_steps} steps",
                f"Roofline: MFU {self.mfu:.3f} of {self.machine_flops_per_second / 1e9:.0f} GFLOP/s, weights' MBU "
                f"{self.mbu:.3f} of {self.machine_bytes_per_second / 1e9:.1f} GB/s",
                *([] if self.stage_idle_shares is None else [self._describe_stages()]),
                *([] if self.adapter_slowdown is None else [self._describe_adapters(self.adapter_slowdown)]),
            )
        )

    def _describe_stages(self) -> str:
        shares = (f"stage {index} {share:.1%}" for index, share in enumerate(self.stage_idle_shares or ()))
        return f"Idle: {', '.join(shares)}"

    def _describe_adapters(self, slowdown: float) -> str:
        base = statistics.median(self.base_output_tokens_per_second_of_runs)
        return (
            f"LoRA: {self.num_adapters} adapters in turn; without them {base:.2f} output tokens/s, so they take "
            f"{slowdown:.1%} more time"
        )

    def to_json(self) -> str:
        """Return the results as JSON."""
        return json.dumps(asdict(self), indent=2)


def measure_throughput(
    config: EngineConfig,
    workload: Workload,
    show_progress: bool = False,
    num_repeats: int = 1,
    lora_modules: Sequence[tuple[str, str]] = (),
) -> Throughput:
    """Run the workload, after a few warm-up steps with as many tokens; of several runs return the median with the rates of all.

    lora_modules  (name, path) of LoRA adapters, which the requests use in turn. A run without adapters precedes each run

    Every run has its own prompts, so that none is cached. Raises QuireError as LLM does.
    """
    if num_repeats < 1:
        raise ConfigError(f"repeat must be at least 1, got {num_repeats}")
    if len(lora_modules) > config.max_loras:
        raise ConfigError(
            f"lora_modules has {len(lora_modules)} adapters, but max_loras is {config.max_loras}: some would be "
            "loaded during the run; raise max_loras (--max-loras)"
        )
    loras = [LoRARequest(name, number, path) for number, (name, path) in enumerate(lora_modules, start=1)]
    llm = LLM(replace(config, skip_tokenizer_init=True))
    spec = llm.llm_engine.report.spec
    workload.check(llm.llm_engine.report)
    # Steps as large as the measured ones, because memory is allocated at the first step of a size.
    num_warm = min(workload.num_prompts, 1 + _WARM_UP_TOKENS // workload.input_len)
    warm_up = Workload(num_warm, workload.input_len, min(4, workload.output_len), 0, True, workload.temperature)
    prompts = warm_up.prompts(spec, first=1)
    llm.generate(prompts, warm_up.sampling_params(), use_tqdm=False)
    for lora in loras:
        llm.llm_engine.add_lora(lora)
    if loras:
        llm.generate(prompts, warm_up.sampling_params(), use_tqdm=False, lora_request=_in_turn(loras, num_warm))
    # The warm-up used the prompts number 1.
    numbers = (0, *range(2, num_repeats + 1))
    runs: list[Throughput] = []
    base: list[Throughput] = []
    for number in numbers:
        if loras:
            base.append(_run(llm, workload, num_repeats + 1 + number, config.model, show_progress))
        runs.append(_run(llm, workload, number, config.model, show_progress, loras))
    llm.close()
    median = sorted(runs, key=lambda run: run.elapsed_time)[num_repeats // 2]
    slowdowns = [run.elapsed_time / plain.elapsed_time - 1 for run, plain in zip(runs, base, strict=False)]
    return replace(
        median,
        output_tokens_per_second_of_runs=[run.output_tokens_per_second for run in runs],
        num_adapters=len(loras),
        base_output_tokens_per_second_of_runs=tuple(run.output_tokens_per_second for run in base),
        adapter_slowdown=statistics.median(slowdowns) if slowdowns else None,
    )


def _in_turn(loras: Sequence[LoRARequest], count: int) -> list[LoRARequest]:
    """Return the adapter of each of `count` requests."""
    return [loras[index % len(loras)] for index in range(count)]


def _run(
    llm: LLM, workload: Workload, first: int, model: str, show_progress: bool, loras: Sequence[LoRARequest] = ()
) -> Throughput:
    """Return the results of one run, with the machine's peaks measured right before it."""
    report, config = llm.llm_engine.report, llm.llm_engine.config
    machine = measure_peaks(report, num_threads=config.num_threads if config.pipeline_parallel_size > 1 else None)
    prompts = workload.prompts(report.spec, first=first)
    steps_before, stages_before = llm.llm_engine.stats.num_steps, llm.llm_engine.stage_times
    begin = time.perf_counter()
    asked = _in_turn(loras, len(prompts)) if loras else None
    outputs = llm.generate(prompts, workload.sampling_params(), use_tqdm=show_progress, lora_request=asked)
    elapsed = time.perf_counter() - begin
    num_steps, stages = llm.llm_engine.stats.num_steps - steps_before, llm.llm_engine.stage_times
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return Throughput(
        elapsed_time=elapsed,
        num_requests=len(outputs),
        total_num_tokens=num_prompt + num_output,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        requests_per_second=len(outputs) / elapsed,
        tokens_per_second=(num_prompt + num_output) / elapsed,
        prompt_tokens_per_second=num_prompt / elapsed,
        output_tokens_per_second=num_output / elapsed,
        num_steps=num_steps,
        mfu=needed_flops(report, num_prompt, num_output) / elapsed / machine.flops_per_s,
        mbu=needed_bytes(report, num_steps) / elapsed / machine.bytes_per_s,
        machine_bytes_per_second=machine.bytes_per_s,
        machine_flops_per_second=machine.flops_per_s,
        model=model,
        dtype=report.spec.dtype,
        seed=workload.seed,
        output_tokens_per_second_of_runs=[num_output / elapsed],
        provenance=find_provenance(),
        stage_idle_shares=None if stages is None or stages_before is None else stages.since(stages_before).idle_shares,
    )
