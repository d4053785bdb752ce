"""Whole models on a GPU, for bench/gpu.py: decode steps, prompts and a mixed workload, with random weights.

The public engine runs a checkpoint that is written for it; decode steps of models that get random weights on the device are
launched without an engine. Nothing here needs a tokenizer, a server or the network.
"""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_launches import DeviceCapturer, measured_idle_share, stamped_capturer
from numpy.typing import NDArray
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.contracts.kv_spec import KvDtype, KvSpec
from quire.contracts.model_spec import ModelSpec
from quire.kv.device_pool import DeviceKvPool
from quire.model.config_reader import read_model_spec
from quire.model.device_decoder import DeviceDecoder
from quire.model.device_ranks import Collectives, DeviceRanks
from quire.model.device_shards import DeviceShard
from quire.model.lora.device_adapters import DeviceAdapters
from quire.model.parameters import parameter_shapes
from quire.quant.float8 import Float8Weight
from quire.quant.quantize import LINEAR_LEVELS
from quire.quant.weight import QuantizedWeight
from quire.worker.device import build
from quire.worker.device.gpu_executor import BlockTableUpdates, GpuStepExecutor
from quire.worker.device.graphs import StepGraphs
from quire.worker.device.host_step import HostStep
from quire.worker.device.launched_step import StepSizes
from quire.worker.device.precompile import compile_all
from quire.worker.device.variants import ServedModel, serving_variants

Row = dict[str, object]
_BLOCK_SIZE = 64
WARM_UP_STEPS = 3
_STEPS = 56
"""Timed decode steps: with those before them a context of 960 stays below 1,024, and one of 4,000 below 4,096, where a captured
step ends."""
_SCALED_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class Shape:
    """A model of the Qwen3 family by its sizes."""

    name: str
    hidden: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool
    max_positions: int = 40960

    def config(self) -> dict[str, Any]:
        """Return its config.json."""
        return {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.is_tied,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "eos_token_id": self.vocab_size - 1,
            "torch_dtype": "bfloat16",
        }

    def prompt_flops(self, num_tokens: int) -> int:
        """Return the multiplications and additions of one prompt: every layer at every token, the head at the last alone."""
        widths = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim + 3 * self.inner
        attended = 2 * num_tokens**2 * self.num_heads * self.head_dim
        return self.num_layers * (2 * num_tokens * widths * self.hidden + attended) + 2 * self.vocab_size * self.hidden


SMALL = Shape("Qwen3-0.6B", 1024, 3072, 28, 16, 8, 128, 151936, True)
LARGE = Shape("Qwen3-8B", 4096, 12288, 36, 32, 8, 128, 151936, False)
TINY = Shape("tiny", 32, 48, 1, 4, 2, 16, 301, True, 256)


@dataclass(frozen=True, slots=True)
class Place:
    """Where models run: EngineConfig's device and torch's, what it reads and multiplies a second, a folder to write in."""

    engine_device: str
    device: torch.device
    read_bytes_per_s: float
    flops_per_s: float
    folder: Path

    @property
    def is_tiny(self) -> bool:
        """Whether sizes are those of a try without a GPU."""
        return self.device.type != "cuda"


def write_random_model(shape: Shape, folder: Path, seed: int = 0) -> Path:
    """Write a checkpoint of that shape, if it is not there: normal weights of 0.02, norms of 1."""
    return write_checkpoint(folder, shape.config(), dict(stored_shapes(shape)), seed)


def write_checkpoint(
    folder: Path, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], seed: int, **given: torch.Tensor
) -> Path:
    """Write a checkpoint with random weights of these shapes, in bfloat16, and with given tensors, if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "model.safetensors"
    if weights.exists():
        return folder
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(given)
    for name, size in shapes.items():
        drawn = torch.ones(size) if name.endswith("norm.weight") else torch.randn(size, generator=generator) * 0.02
        tensors[name] = drawn.to(torch.bfloat16)
    part = weights.with_suffix(".part")  # a section that is stopped leaves no half of it
    save_file(tensors, str(part), metadata={"format": "pt"})
    part.rename(weights)
    return folder


def stored_shapes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the tensors of its checkpoint."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, shape.hidden)
    yield "model.norm.weight", (shape.hidden,)
    if not shape.is_tied:
        yield "lm_head.weight", (shape.vocab_size, shape.hidden)
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}."
        yield layer + "input_layernorm.weight", (shape.hidden,)
        yield layer + "post_attention_layernorm.weight", (shape.hidden,)
        for name, size in (
            ("q", (q, shape.hidden)),
            ("k", (kv, shape.hidden)),
            ("v", (kv, shape.hidden)),
            ("o", (shape.hidden, q)),
        ):
            yield f"{layer}self_attn.{name}_proj.weight", size
        for name in ("q_norm", "k_norm"):
            yield f"{layer}self_attn.{name}.weight", (shape.head_dim,)
        for name, size in (
            ("gate", (shape.inner, shape.hidden)),
            ("up", (shape.inner, shape.hidden)),
            ("down", (shape.hidden, shape.inner)),
        ):
            yield f"{layer}mlp.{name}_proj.weight", size


def engine_options(place: Place) -> dict[str, Any]:
    """Return the options of engines that are measured."""
    return {
        "device": place.engine_device,
        "skip_tokenizer_init": True,
        "max_num_seqs": 4 if place.is_tiny else 256,
        "max_model_len": 96 if place.is_tiny else 8192 + 64,
        "max_num_batched_tokens": 64 if place.is_tiny else 8192,
        "enable_prefix_caching": False,
        "num_kv_blocks": 16 if place.is_tiny else None,
    }


def engine_rows(place: Place, until_s: float, is_ahead: bool = True) -> Iterator[Row]:
    """Yield what the public engine does with the small model: prompts, decode steps, and the mixed workload.

    is_ahead  steps are planned while the one before runs; else only the mixed workload is run
    """
    shape = TINY if place.is_tiny else SMALL
    folder = write_random_model(shape, place.folder / shape.name)
    capturers = stamp_captures()
    llm = LLM(str(folder), async_scheduling=None if is_ahead else False, **engine_options(place))
    generate(llm, [[1, 2, 3]], [1])
    for length in () if not is_ahead else (9,) if place.is_tiny else (512, 2048, 8192):
        if time.perf_counter() > until_s:
            return
        seconds = min(
            generate(llm, random_prompts(1, (length, length), shape, seed), [1]) for seed in range(1 if place.is_tiny else 3)
        )
        share = shape.prompt_flops(length) / seconds / place.flops_per_s
        yield {"section": "prefill", "model": shape.name, "tokens": length, "tokens_per_s": length / seconds, "share": share}
    if is_ahead:
        yield from engine_decode_rows(place, shape, llm, until_s)
    yield from _mixed_rows(place, shape, llm, capturers, until_s)
    llm.close()


def engine_decode_rows(place: Place, shape: Shape, llm: LLM, until_s: float) -> Iterator[Row]:
    """Yield how fast the public engine decodes, greedily: batch x (n - 1) / (T(n) - T(1)), the best of two."""
    context, num_tokens = (9, 3) if place.is_tiny else (928, 65)  # 960 on average
    for batch in (2,) if place.is_tiny else (1, 8, 64):
        if time.perf_counter() > until_s:
            return
        prompts = random_prompts(batch, (context, context), shape, batch)
        generate(llm, prompts, [num_tokens] * batch, 0.0)
        pairs = [[generate(llm, prompts, [n] * batch, 0.0) for n in (1, num_tokens)] for _ in range(1 if place.is_tiny else 2)]
        seconds = min(last - first for first, last in pairs)
        row: Row = {"section": "engine decode", "model": shape.name, "batch": batch, "context": context + num_tokens // 2}
        yield {**row, "tokens_per_s": batch * (num_tokens - 1) / seconds}


def stamp_captures() -> list[DeviceCapturer]:
    """Have engines that are made from now on stamp the steps that they capture; returns where their capturers will be."""
    found: list[DeviceCapturer] = []

    def make(device: torch.device) -> DeviceCapturer:
        found.append(stamped_capturer(device))
        return found[-1]

    build.CudaGraphCapturer = make
    return found


def _mixed_rows(place: Place, shape: Shape, llm: LLM, capturers: list[DeviceCapturer], until_s: float) -> Iterator[Row]:
    """Yield how fast an engine runs the mixed workload, twice, and how long the GPU waits between steps after its prompts.

    capturers  of engines, this one's last; empty where nothing is captured
    """
    count, sizes = (2, (5, 9)) if place.is_tiny else (256, (100, 1024))
    prompts = random_prompts(count, sizes, shape, 0)
    lengths = [random.Random(1).randint(2, 3) for _ in prompts] if place.is_tiny else _lengths(count, sizes, 1)
    total = sum(lengths)
    for is_first in (True, False):  # the first time, steps of every size are compiled and captured
        if time.perf_counter() > until_s:
            break
        steps = llm.llm_engine.stats.num_steps
        num_spans = len(capturers[-1].spans) if capturers else 0
        seconds = generate(llm, prompts, lengths)
        row: Row = {"section": "mixed", "model": shape.name, "is_first": is_first, "output_tokens": total}
        row["is_ahead"] = llm.llm_engine.config.async_scheduling is not False
        row |= {"tokens_per_s": total / seconds, "steps": llm.llm_engine.stats.num_steps - steps}
        if capturers:
            # All prompts are in the first steps: there are none between those of the second half.
            row |= measured_idle_share(capturers[-1], (len(capturers[-1].spans) - num_spans) // 2)
        yield row


def _lengths(count: int, sizes: tuple[int, int], seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randint(*sizes) for _ in range(count)]


def random_prompts(count: int, sizes: tuple[int, int], shape: Shape, seed: int) -> list[list[int]]:
    """Return so many prompts of random tokens; sizes: the fewest and the most of one."""
    generator = random.Random(seed)
    return [[generator.randrange(shape.vocab_size - 1) for _ in range(length)] for length in _lengths(count, sizes, seed)]


def generate(llm: LLM, prompts: list[list[int]], lengths: list[int], temperature: float = 0.6, **sampling: Any) -> float:
    """Return the seconds that prompts take to get so many tokens each."""
    common = {"temperature": temperature, "seed": 0, "ignore_eos": True, "detokenize": False, **sampling}
    params = [SamplingParams(max_tokens=n, **common) for n in lengths]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    got = [len(output.outputs[0].token_ids) for output in outputs]
    if got != lengths:
        raise RuntimeError(f"asked for {lengths} tokens, got {got}: {outputs[0].outputs[0]}")
    return seconds


@dataclass(frozen=True, slots=True)
class Options:
    """How a model is run.

    weights      of its linear layers: "bf16", "fp8" (blocks of 128 x 128) or "int4" (groups of 128)
    is_in_order  deterministic
    kv_format    of the KV cache but that of the first and of the last layer, which is the model's own
    """

    weights: str = "bf16"
    is_in_order: bool = False
    kv_format: KvDtype | None = None


class RandomModel(NamedTuple):
    """A model with random weights on the device, and what its steps are run with.

    common  what all of its rows say
    """

    shape: Shape
    decoder: DeviceDecoder
    kv: KvSpec
    sizes: StepSizes
    num_blocks: int
    weight_bytes: int
    common: Row

    def stepper(self, place: Place, capturer: DeviceCapturer | None, adapters: DeviceAdapters | None = None) -> GpuStepExecutor:
        """Return what launches its steps, over a KV pool of its own."""
        pool = DeviceKvPool(self.kv, self.num_blocks, place.device)
        return GpuStepExecutor(self.decoder, pool, self.sizes, StepGraphs(capturer), None, adapters)


def decode_cases(place: Place) -> list[tuple[int, int]]:
    """Return how many sequences of how much context decode steps are timed with."""
    if place.is_tiny:
        return [(2, 40)]
    return [(1, 960), (1, 4000), (8, 960), (4, 960), (16, 960), (64, 960), (64, 4000), (256, 960)]


def make_model(
    place: Place, shape: Shape, options: Options, compiled: list[Row], communicator: Collectives | None = None
) -> RandomModel:
    """Return a model on the device, once its kernels are compiled, of which `compiled` gets a row.

    communicator  of a group of one rank, whose steps have collectives; None: there are no ranks
    """
    (place.folder / f"{shape.name}-config").mkdir(parents=True, exist_ok=True)
    (place.folder / f"{shape.name}-config" / "config.json").write_text(json.dumps(shape.config()))
    spec = read_model_spec(place.folder / f"{shape.name}-config", "auto")
    cases = decode_cases(place)
    num_blocks = max(count * (-(-(length + 256) // _BLOCK_SIZE)) for count, length in cases)
    kv = KvSpec.of(spec, _BLOCK_SIZE, options.kv_format or spec.dtype)
    if options.kv_format is not None:
        kv = kv.with_layers((0, len(spec.layers) - 1), spec.dtype)
    common: Row = {"model": shape.name, "weights": options.weights, "is_in_order": options.is_in_order}
    common |= {} if options.kv_format is None else {"kv": kv.format_name}
    sizes = StepSizes(max(count for count, _ in cases), prompt_lengths(place)[0], shape.max_positions)
    if not place.is_tiny:  # the interpreter compiles nothing
        compiled.append({"section": "compile", **common, **_compile_ahead(spec, options, kv, sizes)})
    parameters = _random_parameters(spec, place.device, options.weights)
    weight_bytes = _read_bytes(parameters, shape)
    ranks = None
    if communicator is not None:
        ranks = DeviceRanks(communicator, DeviceShard.of(spec, 0, (1.0,), options.is_in_order))
    decoder = DeviceDecoder(spec, parameters, shape.max_positions, place.device, None, options.is_in_order, ranks)
    return RandomModel(shape, decoder, kv, sizes, num_blocks, weight_bytes, common)


def prompt_lengths(place: Place) -> list[int]:
    """Return the tokens of the prompts that are timed, the longest first."""
    return [9] if place.is_tiny else [8192, 2048, 512, 64]


def decode_rows(place: Place, shape: Shape, until_s: float, options: Options = Options()) -> Iterator[Row]:
    """Yield the times of steps of a model with random weights on the device: decode steps as captured graphs and one by one,
    and steps with a prompt, the same ways."""
    compiled: list[Row] = []
    model = make_model(place, shape, options, compiled)
    yield from compiled
    kinds = ((True, True), (False, True)) if place.is_tiny else ((True, True), (True, False), (False, True))
    for is_captured, model.decoder.is_fused in kinds:
        # Each kind has its own KV pool, of half of the device where models are large: the last one's is gone by then.
        yield from _rows_of_kind(place, model, is_captured, until_s)
        release_memory(place.device)


def release_memory(device: torch.device) -> None:
    """Give back what nobody refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _rows_of_kind(place: Place, model: RandomModel, is_captured: bool, until_s: float) -> Iterator[Row]:
    shape, decoder, kv, cases = model.shape, model.decoder, model.kv, decode_cases(place)
    capturer = stamped_capturer(place.device) if is_captured else None
    stepper = model.stepper(place, capturer)
    chosen = cases if decoder.is_fused and is_captured else cases[: 5 if is_captured else 0 if place.is_tiny else 1]
    for count, length in chosen:
        if time.perf_counter() > until_s:
            break
        num_steps = 2 if place.is_tiny else _STEPS
        seconds = time_steps(stepper, count, length, num_steps)
        bound_s = (model.weight_bytes + count * length * kv.bytes_per_token) / place.read_bytes_per_s
        row: Row = {"section": "decode", **model.common, "is_captured": is_captured, "is_fused": decoder.is_fused}
        row |= {"batch": count, "context": length, "step_us": seconds * 1e6, "tokens_per_s": count / seconds}
        row["share"] = bound_s / seconds
        yield row if capturer is None else row | measured_idle_share(capturer, num_steps)
    for prompt in prompt_lengths(place) if decoder.is_fused else []:  # which is the same for them
        if time.perf_counter() > until_s:
            break
        seconds = time_prompt(stepper, prompt, 1 if place.is_tiny else 5)
        row = {"section": "prompt", **model.common, "is_captured": prompt <= stepper.prompts.max_tokens, "tokens": prompt}
        row["step_us"] = seconds * 1e6
        yield row | {"tokens_per_s": prompt / seconds, "share": shape.prompt_flops(prompt) / seconds / place.flops_per_s}
    stepper.close()


def adapter_rows(place: Place, shape: Shape, until_s: float) -> Iterator[Row]:
    """Yield the times of captured steps whose tokens have LoRA adapters: none, one, or several in turn."""
    compiled: list[Row] = []
    model = make_model(place, shape, Options(), compiled)
    yield from compiled
    num_adapters, rank, num_steps = (2, 4, 2) if place.is_tiny else (8, 16, _STEPS)
    held = DeviceAdapters(model.decoder.spec, num_adapters, rank, place.device)
    for matrices in held.tensors():
        matrices.normal_(std=0.02)
    capturer = stamped_capturer(place.device)
    stepper = model.stepper(place, capturer, held)
    decodes, prompts = ([(2, 40)], [9]) if place.is_tiny else ([(1, 960), (8, 960), (64, 960)], [512, 2048])
    for count, length in [*decodes, *((0, length) for length in prompts)]:
        for used in (0, 1, num_adapters):
            if used > max(count, 1):
                continue
            if time.perf_counter() > until_s:
                return
            numbers = np.arange(count or length, dtype=np.int32) % used if used else None
            row: Row = {"section": "adapters", "model": shape.name, "rank": rank, "adapters": used}
            if count:
                seconds = time_steps(stepper, count, length, num_steps, numbers)
                row |= {"batch": count, "context": length, "tokens_per_s": count / seconds}
            else:
                seconds = time_prompt(stepper, length, 1 if place.is_tiny else 5, numbers)
                row |= {"tokens": length}
            yield row | {"step_us": seconds * 1e6} | ({"error": capturer.errors[0]} if capturer.errors else {})
    stepper.close()


def _compile_ahead(spec: ModelSpec, options: Options, kv: KvSpec, sizes: StepSizes, arch: int = 90) -> Row:
    """Compile what steps of a model launch, in processes that know nothing of the GPU.

    One after the other, as they are launched first, kernels would take most of a section's time.
    """
    started = time.perf_counter()
    parameters = _random_parameters(spec, torch.device("meta"), options.weights)
    model = ServedModel(spec, parameters, None, options.is_in_order, kv_dtypes=kv.layer_dtypes)
    variants = serving_variants(model, kv, sizes)
    errors = compile_all(variants, arch)
    row: Row = {"variants": len(variants), "seconds": time.perf_counter() - started}
    return row | {"num_failed": len(errors), "error": errors[0]} if errors else row


def _random_parameters(spec: ModelSpec, device: torch.device, weights: str) -> dict[str, Any]:
    dtype = getattr(torch, spec.dtype)
    found: dict[str, Any] = {}
    for name, size in parameter_shapes(spec).items():
        if "norm" in name or name.endswith(("attn_in.weight", "mlp_in.weight")):
            found[name] = torch.ones(size, dtype=dtype, device=device)
        elif weights == "bf16" or not name.startswith("layers.") or len(size) != 2:
            found[name] = torch.randn(size, dtype=dtype, device=device) * 0.02
        elif weights == "fp8":
            codes = torch.randn(size, dtype=dtype, device=device).to(torch.float8_e4m3fn)
            grid = [-(-side // _SCALED_COLUMNS) for side in size]
            scale = torch.full(grid, 0.02, dtype=torch.float32, device=device)
            found[name] = Float8Weight(codes, scale, (_SCALED_COLUMNS, _SCALED_COLUMNS))
        else:
            codes = torch.randint(-8, 8, size, dtype=torch.int8, device=device)
            num_groups = max(1, size[1] // _SCALED_COLUMNS)
            scale = torch.full((size[0], num_groups), 0.004, dtype=torch.float32, device=device)
            found[name] = QuantizedWeight(codes, scale, None, LINEAR_LEVELS)
    return found


def _read_bytes(parameters: Mapping[str, Any], shape: Shape) -> int:
    """Return the bytes of weights that a decode step reads."""
    total = 0
    for name, weight in parameters.items():
        if isinstance(weight, torch.Tensor):
            total += weight.nbytes if name != "embed.weight" or shape.is_tied else 0
        else:
            bits = 4 if isinstance(weight, QuantizedWeight) else 8
            total += weight.codes.numel() * bits // 8 + weight.scale.nbytes
    return total


def time_prompt(stepper: GpuStepExecutor, num_tokens: int, num_times: int, adapters: NDArray[np.int32] | None = None) -> float:
    """Return the median seconds of a step with that many tokens of one prompt, captured where the stepper captures such.

    adapters  see HostStep
    """
    changes = BlockTableUpdates([(0, 0, tuple(range(-(-num_tokens // _BLOCK_SIZE))))])
    places, line = np.arange(num_tokens), np.zeros(1, np.int32)
    lengths = np.full(1, num_tokens, np.int32)
    of_tokens = np.ones(num_tokens, np.int64), places, places, places[-1:]
    step = HostStep((num_tokens,), line, lengths, *of_tokens, line, lengths.astype(np.int64), adapters=adapters)
    times: list[float] = []
    for _ in range(num_times + 1):
        started = time.perf_counter()
        stepper.read_sampled(stepper.launch(step, "plain", changes))
        times.append(time.perf_counter() - started)
        changes = BlockTableUpdates([])
    return float(np.median(times[1:]))


def time_steps(
    stepper: GpuStepExecutor, count: int, length: int, num_steps: int, adapters: NDArray[np.int32] | None = None
) -> float:
    """Return the median seconds of a step, with its read-back, of so many sequences of about that length.

    adapters  see HostStep
    """
    per_line = -(-(length + num_steps + WARM_UP_STEPS) // _BLOCK_SIZE)
    changes = BlockTableUpdates([(line, 0, tuple(range(line * per_line, (line + 1) * per_line))) for line in range(count)])
    lines = np.arange(count, dtype=np.int32)
    ids = np.ones(count, np.int64)
    times: list[float] = []
    for step in range(num_steps + WARM_UP_STEPS):
        positions = np.full(count, length + step - 1)
        slots = lines.astype(np.int64) * per_line * _BLOCK_SIZE + positions
        lengths = (positions + 1).astype(np.int32)
        rows = np.arange(count)
        host = HostStep((1,) * count, lines, lengths, ids, positions, slots, rows, lines, positions + 1, adapters=adapters)
        started = time.perf_counter()
        stepper.read_sampled(stepper.launch(host, "plain", changes))
        times.append(time.perf_counter() - started)
        ids, changes = np.full(count, -1), BlockTableUpdates([])
    return float(np.median(times[WARM_UP_STEPS:]))
