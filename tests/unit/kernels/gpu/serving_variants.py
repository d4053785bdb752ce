"""Which kernels random steps launch that were not found ahead: `python -m ...serving_variants MODE` prints JSON.

MODE is plain, compile, bound, heads, narrow or ahead with a folder to write checkpoints in, or keys with forward or backward:
by what all kernels are found that are used in this order.

In a process of its own: where kernels are interpreted their parameters are not known.
"""

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import triton

from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import AttentionSpec, GateClamp, LayerSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec, RopeSpec
from quire.kernels.reference.attention import AttentionMetadata, TreeInput
from quire.kernels.triton import attention, launching
from quire.kernels.triton.bound import BoundLauncher, compiled_of
from quire.kernels.triton.cache_keys import hash_callees
from quire.kernels.triton.last_token_buffer import scatter_ids_launch
from quire.kernels.triton.launching import collected_launches
from quire.kernels.triton.precompile import variant_of
from quire.kernels.triton.tile_table import active_table
from quire.kernels.triton.variant import AbsentDriver, compile_variant
from quire.kv.device_pool import DeviceKvPool
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.heads.head_spec import LayerHead
from quire.model.heads.stored import body_shapes
from quire.model.parameters import parameter_shapes
from quire.model.token_runs import TreePlaces
from quire.quant.policy import DEVICE_POLICIES
from quire.worker.device import step_launcher
from quire.worker.device.block_table_updates import BlockTableUpdates
from quire.worker.device.draft_chains import DraftCache, HeadChains
from quire.worker.device.gpu_executor import GpuStepExecutor
from quire.worker.device.graphs import StepGraphs
from quire.worker.device.host_step import HostStep, full_step
from quire.worker.device.launched_step import Kept, StepSizes
from quire.worker.device.precompile import CompileJob, Precompilation, compile_all
from quire.worker.device.variants import (
    NotCapturing,
    ServedHead,
    ServedModel,
    head_variants,
    meta_decoder,
    meta_head,
    serving_variants,
)
from quire.worker.step_executor import Moves
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.kernels.gpu.noting_driver import FUNCTION, NotingDriver
from tests.unit.kernels.gpu.quantized_checkpoints import SIZES as QUANTIZED_SIZES
from tests.unit.kernels.gpu.quantized_checkpoints import write

ROOT = Path(__file__).resolve().parents[4]
META = torch.device("meta")
RMS = NormSpec("rms", 1e-6)
MLP = MlpSpec(96, "silu")


def run_without_interpreter(cache, *arguments):
    """Return what this module prints where kernels are not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.unit.kernels.gpu.serving_variants", *arguments]
    environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def layer(heads=(8, 2), mlp=MLP, **options):
    return LayerSpec(AttentionSpec(*heads, 32, 0.2, RopeSpec(32, 1e4), **options), mlp, attn_in=RMS, mlp_in=RMS)


MODELS = {
    "plain": [layer(qk_norm=RMS)] * 5,
    "windows": [layer(window=40), layer(window=40), layer(), layer(window=40)],
    "sinks": [
        layer(
            mlp=MoeSpec(4, 2, MlpSpec(96, "silu", has_bias=True, clamp=GateClamp(7.0, 1.702)), has_router_bias=True),
            window=window,
            has_sinks=True,
            has_qkv_bias=True,
            has_o_bias=True,
        )
        for window in (40, None)
    ],
    "experts": [layer(heads=(4, 4), mlp=MoeSpec(8, 2, MLP))] * 2,
}
NARROW = [
    *(("qwen3", method) for method in ("gptq", "int8", "fp8", "fp8-rows", "--int8", "--int4", "--fp8")),
    *(("qwen3_moe", method) for method in ("awq", "fp8", "--int4", "--fp8")),
]
"""Family and form; "--" is for weights that are quantised while they are loaded."""
SIZES = StepSizes(24, 1000, 900, 60, has_drafts=True, has_trees=True, has_processors=True)
SHORT = SIZES._replace(max_model_len=100)


def random_step(rng, sizes):
    """Return a step with any number of sequences and of tokens of each, and of any context."""
    num_sequences = int(rng.integers(1, sizes.max_num_seqs + 1))
    most = min(sizes.max_num_batched_tokens // num_sequences, sizes.max_model_len)
    counts = np.minimum(rng.choice([1, 1, 1, 2, 3, 5, 8, 30, 200], num_sequences), most)
    lengths = np.minimum(counts + rng.choice([0, 10, 300, 850], num_sequences), sizes.max_model_len).astype(np.int32)
    lines = np.arange(num_sequences, dtype=np.int32)
    tokens = np.zeros(int(counts.sum()), np.int64)
    sampled = np.flatnonzero(rng.random(num_sequences) < rng.choice([0.0, 0.5, 1.0]))
    ends = np.cumsum(counts) - 1
    others = np.setdiff1d(np.arange(len(tokens)), ends[sampled])
    drafts = others[: int(rng.integers(sizes.max_num_drafts + 1) * rng.integers(2))]
    trees = None
    if sizes.has_trees and rng.random() < 0.3:
        trees = TreePlaces(tokens, np.zeros(num_sequences, np.int32), np.zeros(len(tokens), np.uint64))
    places = np.zeros(len(sampled) + len(drafts), np.int64)
    sampled_rows = np.concatenate((lines[sampled], np.zeros(len(drafts), np.int32)))
    logit_rows = np.concatenate((ends[sampled], drafts))
    counted = tuple(counts.tolist()), lines, lengths, tokens, tokens, tokens
    return HostStep(*counted, logit_rows, sampled_rows, places, len(drafts), trees)


def missing_variants(model, kv_dtype, sizes):
    """Return names of the kernels that random steps launch in a variant that was not found ahead, and of all that were."""
    decoder = meta_decoder(model, sizes.max_model_len)
    cached = decoder.spec if decoder.ranks is None else decoder.ranks.shard.cached_spec
    kv = replace(KvSpec.of(cached, 64, kv_dtype), layer_dtypes=model.kv_dtypes)
    return missing_of(decoder, kv, sizes, set(serving_variants(model, kv, sizes)))


def missing_of(decoder, kv, sizes, found):
    """Return what missing_variants does, of which `found` was found ahead."""
    pool = DeviceKvPool(kv, 5, META)
    steppers = [GpuStepExecutor(decoder, pool, sizes, StepGraphs(capturer)) for capturer in (None, NotCapturing())]
    rng = np.random.default_rng(5)
    with torch.inference_mode(), collected_launches() as launches:
        for _ in range(30):
            kept = Kept(*(rng.random(2) < 0.3).tolist())
            samplings = steppers[0].samplings
            step, sampling = random_step(rng, sizes), samplings[int(rng.integers(len(samplings)))]
            has_moves = sizes.has_trees and rng.random() < 0.3
            moves = Moves([5, 6, 9], [4, 5, 8], [0, 2, 3]) if has_moves else None
            for stepper in steppers:
                launched = stepper.launch(step, sampling, BlockTableUpdates([], (), moves), kept)
                if launched.deferred is not None and launched.logits is not None:
                    stepper.sample_deferred(launched, {})
    launched = set(map(variant_of, launches))
    return sorted({variant.kernel for variant in launched - found}), launched, found


def pass_variants(head, kv, sizes):
    """Return what random passes of trees launch, of the first level or of one behind it."""
    cache = DraftCache(DeviceKvPool(kv, 5, META))
    chains = HeadChains(head, GpuStepExecutor(head, cache.pool, sizes, StepGraphs()), cache, sizes)
    rng = np.random.default_rng(6)
    with torch.inference_mode(), collected_launches() as launches:
        for _ in range(30):
            has_trees, step = bool(rng.integers(2)), random_step(rng, sizes)
            most = 30 if has_trees else sizes.max_model_len  # tokens of a level
            counts = np.minimum(step.counts, most)
            num_tokens, lengths = int(counts.sum()), np.maximum(step.context_lens, counts)
            nothing = torch.zeros(num_tokens, dtype=torch.int64)
            tables = torch.zeros(len(counts), -(-int(lengths.max()) // kv.block_size), dtype=torch.int64)
            ends = np.cumsum(counts)
            num_drafts = torch.tensor(counts + rng.integers(20), dtype=torch.int32)
            trees = TreeInput(num_drafts, nothing) if has_trees else None
            attention = AttentionMetadata(nothing, [0, *ends.tolist()], lengths.tolist(), tables, trees)
            features = torch.empty(num_tokens, head.inputs.shape[1], dtype=head.dtype, device=META)
            rows = list(range(num_tokens)) if has_trees else (ends - 1).tolist()
            chains.enter(nothing, nothing, attention, cache, features, rows)
    return set(map(variant_of, launches))


def describe(name, model, kv_dtype="bfloat16", sizes=SIZES):
    """Print what was found of a model, and return its variants."""
    missing, launched, variants = missing_variants(model, kv_dtype, sizes)
    parameters = sorted({parameter for variant in variants for parameter, _ in variant.arguments})
    kernels = sorted({variant.kernel for variant in launched})
    described = {"model": name, "kv": kv_dtype, "missing": missing, "count": len(variants), "parameters": parameters}
    print(json.dumps({**described, "kernels": kernels}), flush=True)
    return variants


def describe_head(name, model, entry, norm):
    """Print what was found of a head beside a model."""
    sizes = SIZES._replace(max_num_drafts=0)
    own = LayerSpec(AttentionSpec(8, 2, 32, 0.2, RopeSpec(32, 1e4)), MLP, attn_in=norm, mlp_in=RMS)
    body = ModelSpec(name, "bfloat16", 700, 256, (own,), RMS, SIZES.max_model_len)
    taps, is_beside = (0, 2, 3) if entry == "beside" else (), entry == "beside"
    shapes = body_shapes(body, 512 if is_beside else 256)
    del shapes["embed.weight"]
    shapes |= {"fuse.weight": (256, 768 if is_beside else 512), "embed_norm.weight": (256,)}
    parameters = {key: torch.empty(size, dtype=torch.bfloat16, device=META) for key, size in shapes.items()}
    vocabulary = torch.arange(700, dtype=torch.int32)
    head = LayerHead(entry, body, taps, RMS, None, True, False, False, parameters, vocabulary)
    served = ServedHead.of(head, KvSpec.of(body, 64, "bfloat16"), sizes)
    one, found = meta_head(model, served), set(head_variants(model, served))
    missing, launched, _ = missing_of(one, served.kv, sizes, found)
    in_passes = pass_variants(one, served.kv, sizes)
    missing, launched = sorted({*missing, *(variant.kernel for variant in in_passes - found)}), launched | in_passes
    kernels = sorted({variant.kernel for variant in launched})
    print(json.dumps({"model": name, "missing": missing, "count": len(found), "kernels": kernels}), flush=True)


def plain_models():
    """Return by name the models with plain weights."""
    found = {}
    for name, layers in MODELS.items():
        spec = ModelSpec(name, "bfloat16", 3000, 256, tuple(layers), RMS, SIZES.max_model_len)
        shapes = parameter_shapes(spec).items()
        parameters = {key: torch.empty(size, dtype=torch.bfloat16, device=META) for key, size in shapes}
        found[name] = ServedModel(spec, parameters)
    return found


def quantized_models(folder):
    """Yield name and model of those with quantised weights, which are written below a folder."""
    for family, method in NARROW:
        name = f"{family}-{method}"
        policy = DEVICE_POLICIES[method.removeprefix("--")] if method.startswith("--") else None
        changes = {"num_hidden_layers": 4, "torch_dtype": "bfloat16"}
        if policy is None:
            path = write(folder / name, family, method, **changes)[0]
        else:
            path = write_checkpoint(folder / name, family, **QUANTIZED_SIZES, **changes)
        spec = read_model_spec(path)
        yield name, ServedModel(spec, open_parameters(path, spec), policy)


def compile_some(variants):
    """Compile some variants, and print by what they are found when they are launched."""
    chosen = [variant for variant in variants if variant.kernel in ("scan_rows", "plan_chunks", "attend_chunks")]
    failed = compile_all([chosen[0]._replace(kernel="missing"), *chosen], 90)
    count = num_cubins()
    hashes = [compile_variant(variant, 90) for variant in chosen]
    launch = keep_launch()
    hashes.append(compile_variant(variant_of(launch), 90))
    launched = launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.constants, **launch.options)
    print(json.dumps({"hashes": hashes, "launched": launched.hash, "failed": failed, "num_cubins": count}))


class FailingProcess(subprocess.Popen):
    """A process that does not compile what it is asked for."""

    def __init__(self, command, **options):
        super().__init__([sys.executable, "-c", "import sys; sys.exit('no compiler')"], **options)


def num_cubins():
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin")))


def compile_ahead(folder):
    """Compile checkpoints ahead of which two are stored alike, the last one without a server, and print what became of it."""
    for name, method in (("first", "int8"), ("second", "int8"), ("other", "fp8")):
        path, _ = write(folder / name, "qwen3", method, torch_dtype="bfloat16")
        spec = read_model_spec(path)
        order = CompileJob(path, spec, None, False, KvSpec.of(spec, 64, "bfloat16"), StepSizes(1, 4, 16), 90, active_table())
        if name == "other":
            subprocess.Popen = FailingProcess
        ahead = Precompilation(order, open_parameters(path, spec))
        ahead.wait_for(keep_launch())
        at_launch = num_cubins()
        told = {"is_needed": ahead.is_needed, "is_compiled": ahead.wait(), "num_at_launch": at_launch}
        print(json.dumps({**told, "num_cubins": num_cubins()}))


def argument_sizes(cubin):
    """Return the sizes of a kernel's arguments, by its machine code, and check that nothing lies between them but alignment."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-elf", file.name], capture_output=True, text=True, check=True).stdout
    pattern = r"Ordinal : 0x(\w+)\s+Offset  : 0x(\w+)\s+Size    : 0x(\w+)"
    places = sorted(tuple(int(part, 16) for part in found) for found in re.findall(pattern, text))
    end = 0
    for _, offset, size in places:
        assert offset == -(-end // size) * size
        end = offset + size
    return [size for *_, size in places]


def bind_launches():
    """Launch each kernel of a decode step and of a prompt once, and print whether it was launched with packed arguments."""
    decoder = meta_decoder(plain_models()["plain"], SIZES.max_model_len)
    pool = DeviceKvPool(KvSpec.of(decoder.spec, 64, "bfloat16"), 1, META)
    executor = GpuStepExecutor(decoder, pool, SIZES, StepGraphs())
    with torch.inference_mode(), collected_launches() as launches:
        for count in (1, 100):
            executor.launch(full_step(count, 1, count, executor.padding_slot), "plain", BlockTableUpdates([]))
    active = AbsentDriver(90)
    active.utils = SimpleNamespace(load_binary=lambda *_: (1, FUNCTION, 0, 0, 1024))
    triton.runtime.driver.set_active(active)
    for launch in {launch.kernel.fn.__name__: launch for launch in launches}.values():
        compiled = compiled_of(launch)
        driver = NotingDriver(argument_sizes(compiled.kernel))
        BoundLauncher(driver).run(launch)
        by_triton = launch.kernel.warmup(grid=(1,), **launch.arguments, **launch.constants, **launch.options).hash
        variant = compile_variant(variant_of(launch), 90)
        keys = {"has_key_of_triton": compiled.hash == by_triton, "has_key_of_variant": compiled.hash == variant}
        told = [*driver.launched[0][:3]] if driver.launched else []
        is_launched = told == [(*launch.grid, 1, 1)[:3], 32 * launch.num_warps, compiled.metadata.shared]
        print(json.dumps({"kernel": launch.kernel.fn.__name__, "is_launched": is_launched, **keys}))
        triton.runtime.driver.set_active(active)


def keep_launch():
    kinds = (40, torch.int64), (5, torch.int64), (5, torch.int32)
    return scatter_ids_launch(*(torch.zeros(count, dtype=dtype) for count, dtype in kinds))


def print_keys(order):
    """Print the key of every kernel and of every function that kernels call, asked for one after the other."""
    names = sorted(path.stem for path in Path(launching.__file__).parent.glob("[!_]*.py"))
    modules = [importlib.import_module(f"quire.kernels.triton.{name}") for name in names]
    parts = [part for module in modules for part in vars(module).items()]
    functions = {name: part for name, part in parts if isinstance(part, triton.JITFunction)}
    keys = {}
    for name in sorted(functions, reverse=order == "backward"):
        hash_callees(functions[name])
        keys[name] = functions[name].cache_key
    print(json.dumps(keys))


if __name__ == "__main__":
    mode, *rest = sys.argv[1:]
    if mode == "keys":
        print_keys(*rest)
        sys.exit()
    if mode == "ahead":
        compile_ahead(Path(rest[0]))
        sys.exit()
    if mode == "bound":
        bind_launches()
        sys.exit()
    if mode == "heads":
        describe_head("eagle3", plain_models()["plain"], "beside", RMS)
        describe_head("eagle", plain_models()["windows"], "joined", None)
        sys.exit()
    if mode == "narrow":
        for title, narrow in quantized_models(Path(rest[0])):
            describe(title, narrow, sizes=SIZES._replace(has_trees=False))
        sys.exit()
    models = plain_models()
    if mode == "ranks":
        for title, is_in_order in itertools.product(("plain", "experts"), (False, True)):
            describe(title, models[title]._replace(is_in_order=is_in_order, shares=(1.0, 1.0)))
        describe("homes", models["plain"]._replace(shares=(1.0, 1.0), has_homes=True))
        shared = models["sinks"]._replace(shares=(1.0, 1.0), context_size=2)
        describe("context", shared, sizes=SIZES._replace(has_trees=False))
        sys.exit()
    for title, plain in models.items():
        for kv, in_order in (("bfloat16", False), ("fp8", False), ("bfloat16", True)):
            last_variants = describe(title, plain._replace(is_in_order=in_order), kv)
    describe("experts of short sequences", models["experts"], sizes=SHORT)
    attention.LONG_CHUNK = step_launcher.LONG_CHUNK = 512
    describe("long runs", models["windows"]._replace(kv_dtypes=("bfloat16", "k8v4", "k8v4", "bfloat16")), "k8v4")
    if mode == "compile":
        compile_some(last_variants)
