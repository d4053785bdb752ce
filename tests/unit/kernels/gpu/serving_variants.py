"""Which kernels random steps launch that were not found ahead: `python -m ...serving_variants` prints JSON, a line a model.

In a process of its own: where kernels are interpreted their parameters are not known.
"""

import json
import sys

import numpy as np
import torch

from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec, RopeSpec
from quire.kernels.triton.ahead import compile_variant, variant_of
from quire.kernels.triton.feedback import keep_ids_launch
from quire.kernels.triton.launching import noted_launches
from quire.kv.device_pool import DeviceKvPool
from quire.worker.device.graphs import StepGraphs
from quire.worker.device.host_step import SAMPLINGS, HostStep
from quire.worker.device.stepper import DeviceStepper, Kept, StepSizes, TableChanges
from quire.worker.device.variants import NotRecording, meta_decoder, serving_variants

RMS = NormSpec("rms", 1e-6)
MLP = MlpSpec(96, "silu")


def layer(heads=(8, 2), mlp=MLP, **options):
    return LayerSpec(AttentionSpec(*heads, 32, 0.2, RopeSpec(32, 1e4), **options), mlp, attn_in=RMS, mlp_in=RMS)


MODELS = {
    "plain": [layer(qk_norm=RMS)] * 5,
    "windows": [layer(window=40), layer(window=40), layer(), layer(window=40)],
    "experts": [layer(heads=(4, 4), mlp=MoeSpec(8, 2, MLP))] * 2,
}
SIZES = StepSizes(24, 1000, 900)


def random_step(rng):
    """Return a step with any number of sequences and of tokens of each, and of any context."""
    num_sequences = int(rng.integers(1, SIZES.max_num_seqs + 1))
    counts = np.minimum(
        rng.choice([1, 1, 1, 2, 3, 5, 8, 30, 200], num_sequences), SIZES.max_num_batched_tokens // num_sequences
    )
    lengths = np.minimum(counts + rng.choice([0, 10, 300, 850], num_sequences), SIZES.max_model_len).astype(np.int32)
    lines = np.arange(num_sequences, dtype=np.int32)
    tokens = np.zeros(int(counts.sum()), np.int64)
    sampled = np.flatnonzero(rng.random(num_sequences) < rng.choice([0.0, 0.5, 1.0]))
    ends = np.cumsum(counts) - 1
    return HostStep(
        tuple(counts.tolist()), lines, lengths, tokens, tokens, tokens, ends[sampled], lines[sampled], tokens[: len(sampled)]
    )


def missing_variants(spec, kv_dtype, is_in_order):
    """Return names of the kernels that random steps launch in a variant that was not found ahead, and of all that were."""
    kv = KvSpec.of(spec, 64, kv_dtype)
    found = set(serving_variants(spec, kv, SIZES, is_in_order))
    decoder = meta_decoder(spec, SIZES.max_model_len, is_in_order)
    pool = DeviceKvPool(KvSpec.of(decoder.spec, 64, kv_dtype), 5, torch.device("meta"))
    steppers = [DeviceStepper(decoder, pool, SIZES, StepGraphs(recorder)) for recorder in (None, NotRecording())]
    rng = np.random.default_rng(5)
    with torch.inference_mode(), noted_launches() as launches:
        for _ in range(60):
            kept = Kept(*(rng.random(2) < 0.3).tolist())
            step, sampling = random_step(rng), SAMPLINGS[int(rng.integers(2))]
            for stepper in steppers:
                stepper.launch(step, sampling, TableChanges([]), kept)
    return sorted({variant.kernel for variant in set(map(variant_of, launches)) - found}), found


if __name__ == "__main__":
    for name, layers in MODELS.items():
        for kv_dtype, is_in_order in (("bfloat16", False), ("fp8", False), ("bfloat16", True)):
            model = ModelSpec(name, "bfloat16", 3000, 256, tuple(layers), RMS, SIZES.max_model_len)
            missing, variants = missing_variants(model, kv_dtype, is_in_order)
            parameters = sorted({parameter for variant in variants for parameter, _ in variant.arguments})
            described = {"model": name, "kv": kv_dtype, "missing": missing, "count": len(variants), "parameters": parameters}
            print(json.dumps(described), flush=True)
    if "compile" in sys.argv:
        chosen = [variant for variant in variants if variant.kernel in ("scan_rows", "plan_chunks", "attend_chunks")]
        hashes = [compile_variant(variant, 90, has_launchers=False) for variant in chosen]
        last, ids, rows = (
            torch.zeros(count, dtype=dtype) for count, dtype in ((40, torch.int64), (5, torch.int64), (5, torch.int32))
        )
        launch = keep_ids_launch(last, ids, rows)
        hashes.append(compile_variant(variant_of(launch), 90, has_launchers=False))
        launched = launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.constants, **launch.options)
        print(json.dumps({"hashes": hashes, "launched": launched.hash}))
