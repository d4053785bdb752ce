"""Launches in the shapes of real models, compiled without a GPU: `python -m ...shipped_launches ARCH NAME...` prints JSON.

ARCH is the compute capability of the GPU that they would run on, such as 90. In a process of its own: where kernels are
interpreted none can be compiled.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from quire.contracts.model_spec import AttentionSpec, GateClamp, IndexerSpec, LatentSpec, MlpSpec, MoeSpec, NormSpec, RopeSpec
from quire.contracts.sparse_spec import BlockIndexerSpec
from quire.kernels.reference.attention import AttentionMetadata, TreeInput
from quire.kernels.reference.recurrent import Recurrence
from quire.kernels.triton.activation import activate_launch
from quire.kernels.triton.adding import add_parts_launch
from quire.kernels.triton.attention import KvCache, attend_launches
from quire.kernels.triton.compiling import compile_launch
from quire.kernels.triton.device_traits import DeviceTraits, choose_traits
from quire.kernels.triton.float8 import float8_launches
from quire.kernels.triton.fused_attention import ProjectedAttention
from quire.kernels.triton.fused_linear import Epilogue, fused_linear_launch
from quire.kernels.triton.fused_quantized import fused_quantized_launch
from quire.kernels.triton.head_products import multiply_heads_launch
from quire.kernels.triton.hopper_linear import large_batch_launches
from quire.kernels.triton.indexer import IndexInputs, score_keys_launch
from quire.kernels.triton.kv_move import move_tokens_launch
from quire.kernels.triton.last_token_buffer import gather_inputs_launches, scatter_ids_launch
from quire.kernels.triton.launching import Launch, collected_launches
from quire.kernels.triton.linear import dequantize_launch, in_order_launches, multiply_launches
from quire.kernels.triton.logprobs import LOGPROB_WIDTH, logprob_launches
from quire.kernels.triton.lora import add_low_rank, group_pairs, group_rows
from quire.kernels.triton.moe import ExpertBiases, ExpertExtras, expert_launches
from quire.kernels.triton.norm import Norm, add_and_normalize_launch
from quire.kernels.triton.page_copy import PageLayout, copy_pages_launch
from quire.kernels.triton.processors import NUM_BIASES, ProcessorOptions, ProcessorTables, count_launch, process_launch
from quire.kernels.triton.qk_rope_store import Projections, Rope, place_heads_launch
from quire.kernels.triton.quantized_weights import DeviceQuantizedWeight
from quire.kernels.triton.recurrent import causal_conv_launch, recur_launch
from quire.kernels.triton.rotated_codes import PACKED, width_of
from quire.kernels.triton.sampling import Choices, RowOptions, sample_launches
from quire.kernels.triton.step import DeviceAttentionMetadata, DeviceStateRows
from quire.kernels.triton.tile_table import TileRule, TileTable, active_table, using
from quire.kernels.triton.tiles import LargeBatchTile

META = torch.device("meta")
BF16 = torch.bfloat16
PLAIN_TILE = {"is_specialized": False, "keys": 128, "num_stages": 2, "takes_turns": False}


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device=META)


def kv_cache(num_heads, block_size, head_dim, kv_dtype):
    """kv_dtype: u8 for codes of four bits; (i8, u8) for keys and values."""
    dtypes = kv_dtype if isinstance(kv_dtype, tuple) else (kv_dtype, kv_dtype)
    return [meta(4096, num_heads, block_size, width_of(dtype, head_dim), dtype=dtype) for dtype in dtypes]


def attention_launches(
    count=1, head_dim=128, heads=(32, 8), kv_dtype=BF16, dtype=BF16, block_size=64, has_tree=False, num_tokens=4096,
    has_sinks=False, is_in_order=False, prompt_tile=PLAIN_TILE, **spec
):  # fmt: skip
    num_sequences, length = 4, num_tokens
    starts = [count * index for index in range(num_sequences + 1)]
    trees = None
    if has_tree:
        trees = TreeInput(torch.full((num_sequences,), count - 1), torch.zeros(starts[-1], dtype=torch.int64))
    tables = torch.zeros(num_sequences, 1024, dtype=torch.int64)
    step = AttentionMetadata(torch.zeros(starts[-1]), starts, [length] * num_sequences, tables, trees)
    q = meta(starts[-1], heads[0], head_dim, dtype=dtype)
    cache = kv_cache(heads[1], block_size, head_dim, kv_dtype)
    if kv_dtype != dtype:
        cache += [meta(4096, heads[1], block_size, dtype=torch.float32)] * 2
    latent = spec.get("latent")
    if latent is not None:
        cache[1] = cache[0]
    attention = AttentionSpec(*heads, head_dim, head_dim**-0.5, **spec)
    sinks = meta(heads[0]) if has_sinks else None
    device_step = DeviceAttentionMetadata.of(step, META)
    out = meta(*q.shape[:2], attention.value_size if latent is None else latent.kv_rank, dtype=dtype)
    slopes = meta(heads[0], dtype=torch.float32) if attention.alibi_slopes else None
    table = TileTable("any", "9.0", {"attention-prefill-hopper": (TileRule({}, prompt_tile),)})
    with using(table.over(active_table())):
        return attend_launches(out, q, KvCache(*cache), device_step, attention, sinks, is_in_order, slopes)


def specialized_launches(keys=128, num_stages=2, takes_turns=False, **options):
    tile = {"is_specialized": True, "keys": keys, "num_stages": num_stages, "takes_turns": takes_turns}
    return attention_launches(count=1024, prompt_tile=tile, **options)


def latent_launches(num_heads=128, **options):
    latent = LatentSpec(1536, 512, 128, 64, 128, NormSpec("rms", 1e-6))  # DeepSeek-V3's
    return attention_launches(head_dim=576, heads=(num_heads, 1), latent=latent, **options)


def index_scores(has_blocks=False):
    norm, num_heads = NormSpec("rms", 1e-6), 4 if has_blocks else 64  # MiniMax-M3's, DeepSeek-V3.2's
    indexer = BlockIndexerSpec(4, 128, 128, 16, 1, norm) if has_blocks else IndexerSpec(64, 128, 2048, norm)
    weights = None if has_blocks else meta(4, 64, dtype=torch.float32)
    index = IndexInputs(meta(4, num_heads, 128), weights, meta(4096, 1, 64, 128))
    tables = torch.zeros(4, 1024, dtype=torch.int64)
    step = AttentionMetadata(torch.zeros(4), [0, 1, 2, 3, 4], [3000] * 4, tables, None)
    device_step = DeviceAttentionMetadata.of(step, META)
    out = meta(4, *([num_heads] if has_blocks else []), 3000, dtype=torch.float32)
    return score_keys_launch(out, index, meta(4, dtype=torch.int32), device_step, indexer, 0)


def head_products(num_tokens, num_inputs, num_outputs):
    weights = meta(128, num_inputs, num_outputs)
    return multiply_heads_launch(meta(num_tokens, 128, num_outputs), meta(num_tokens, 128, num_inputs), weights)


FP8 = torch.float8_e4m3fn
F32, I32, I64 = torch.float32, torch.int32, torch.int64


def norm_launch(width, is_sandwich=False):
    x, norm = meta(512, width), Norm(NormSpec("rms", 1e-6), meta(width))
    return add_and_normalize_launch(meta(512, width), x, x, meta(512, width), norm, norm if is_sandwich else None)


def add_parts(num_ranks, width, residual_scale=1.0):
    return add_parts_launch(meta(64, width), meta(num_ranks, 64, width), residual_scale)


def heads_launch(num_tokens, kv_dtype=BF16):
    qkv = meta(num_tokens, (32 + 2 * 8) * 128)
    parts = (part.unflatten(1, (-1, 128)) for part in qkv.split([4096, 1024, 1024], 1))
    cache = kv_cache(8, 64, 128, kv_dtype)
    if kv_dtype != BF16:
        cache += [meta(4096, 8, 64, dtype=F32)] * 2
    norm = Norm(NormSpec("rms", 1e-6), meta(128))
    rope = Rope(RopeSpec(128, 1e6), meta(40960, 128, dtype=F32))
    places = meta(num_tokens, dtype=I64)
    return place_heads_launch(
        meta(num_tokens, 32, 128), Projections(*parts), KvCache(*cache), places, places, rope, (norm, norm)
    )


def sampler_launch(index, has_cuts, vocab_size=151936, has_masks=True):
    dtypes = (F32, I32, I32, torch.float64, F32, I64, I64)
    options = RowOptions(
        *(meta(64, dtype=dtype) for dtype in dtypes), meta(64, vocab_size // 32, dtype=I32) if has_masks else None
    )
    choices = Choices(meta(64, dtype=I64), meta(64, dtype=I32))
    return sample_launches(choices, meta(64, vocab_size, dtype=F32), options, has_cuts)[index]


def processor_launch(is_counting=False, vocab_size=151936):
    tables = ProcessorTables(meta(257, vocab_size, dtype=I32), meta(257, NUM_BIASES, dtype=F32))
    options = ProcessorOptions(*(meta(64, dtype=dtype) for dtype in (I32, I32, F32, F32, F32, F32, I64, I64)))
    if is_counting:
        return count_launch(tables, meta(64, dtype=I64), options)
    return process_launch(meta(64, vocab_size, dtype=F32), meta(64, vocab_size), tables, options)


def logprob_launch(index, vocab_size=151936):
    out, ids, num_tops = meta(64, LOGPROB_WIDTH, dtype=I32), meta(64, dtype=I64), meta(64, dtype=I32)
    return logprob_launches(out, meta(64, vocab_size), ids, num_tops)[index]


def expert_weights(dtype, scale_rows, inner, width):
    """Of 128 experts; torch.uint8: of 4-bit integers."""
    shapes = (2 * inner, width), (width, inner)
    if dtype == BF16:
        return [meta(128, *shape) for shape in shapes]
    return [quantized_weight(dtype, scale_rows, shape=(128 * rows, columns)) for rows, columns in shapes]


def expert_launch(index, num_tokens, dtype=BF16, scale_rows=1, is_in_order=False, extra=None, inner=768, width=2048):
    x, weights = meta(num_tokens, width), expert_weights(dtype, scale_rows, inner, width)
    out, logits, spec = meta(num_tokens, width), meta(num_tokens, 128), MoeSpec(128, 8, MlpSpec(inner, "silu"))
    with collected_launches():  # of routes that adapters read
        return expert_launches(out, x, logits, spec, *weights, is_in_order, extra)[index]


def adapted_expert_launch(index, num_tokens, dtype, inner=768, width=2048):
    """Experts whose products get what adapters add."""
    added = {"gate_up": meta(8 * num_tokens, 2 * inner), "down": meta(8 * num_tokens, width)}
    extra = ExpertExtras(adapters=lambda experts: lambda name, x, num_slots: added[name])
    return expert_launch(index, num_tokens, dtype, extra=extra)


def lora_launch(index, num_tokens, has_experts, rank=16, num_adapters=8):
    """Of q, k and v, or of the gate and up of 128 experts."""
    numbers, flags = meta(num_tokens, dtype=I32), meta(num_adapters, dtype=I32)
    outputs, count, num_slots = ((768, 768), 128, 8) if has_experts else ((4096, 512, 512), 1, 1)
    with collected_launches() as launches:
        groups = group_rows(numbers, num_adapters)
        if has_experts:
            launches.clear()
            groups = group_pairs(numbers, flags, meta(num_tokens * num_slots, dtype=I32), count)
        y, a = meta(num_tokens * num_slots, sum(outputs)), meta(num_adapters * count, len(outputs) * rank, 2048)
        b = [meta(num_adapters * count, rows, rank) for rows in outputs]
        add_low_rank(y, meta(num_tokens, 2048), a, b, groups, num_slots)
    return launches[index]


def clamped_expert_launch(index, num_tokens, is_packed):
    """gpt-oss of 20 billion parameters."""
    width, num_experts = 2880, 32
    spec = MoeSpec(num_experts, 4, MlpSpec(width, "silu", has_bias=True, clamp=GateClamp(7.0, 1.702)), has_router_bias=True)
    x, logits = meta(num_tokens, width), meta(num_tokens, num_experts)
    shapes = (num_experts, 2 * width, width), (num_experts, width, width)
    weights = [
        DeviceQuantizedWeight(meta(e * n, k // 2, dtype=torch.uint8), meta(e * n, k // 32, dtype=F32), None, 32, 1, 32, None)
        if is_packed
        else meta(e, n, k)
        for e, n, k in shapes
    ]
    biases = ExpertBiases(*(meta(e, n) for e, n, _ in shapes))
    return expert_launches(meta(num_tokens, width), x, logits, spec, *weights, extra=ExpertExtras(biases))[index]


def quantized_weight(dtype, scale_rows=1, has_offset=False, shape=(12288, 4096)):
    num_rows, num_columns = shape
    codes = meta(num_rows, num_columns // (2 if dtype == torch.uint8 else 1), dtype=dtype)
    scales = meta(num_rows // scale_rows, num_columns // 128, dtype=F32)
    return DeviceQuantizedWeight(codes, scales, scales if has_offset else None, 128, scale_rows, 128, -8)


def linear_launch(dtype, num_tokens, index=0, **options):
    weight = quantized_weight(dtype, **options)
    num_rows, num_columns = weight.shape
    return multiply_launches(meta(num_tokens, num_rows), meta(num_tokens, num_columns), weight)[index]


def large_batch_launch(num_tokens, tile, has_offset=False, run=128, base=-8, dtype=BF16):
    weight = replace(quantized_weight(torch.uint8, has_offset=has_offset), run=run, base=base)
    out, x = (meta(num_tokens, size, dtype=dtype) for size in weight.shape)
    return large_batch_launches(out, x, weight, LargeBatchTile(*tile))[0]


def dequantize(dtype, ids=None):
    weight = quantized_weight(dtype, has_offset=dtype == torch.uint8)
    return dequantize_launch(meta(weight.shape[0] if ids is None else len(ids), weight.shape[1]), weight, ids)


def dense_launch(num_tokens, dtype=BF16, shape=(12288, 4096), index=0):
    x, weight = meta(num_tokens, shape[1], dtype=dtype), meta(*shape, dtype=dtype)
    return in_order_launches(meta(num_tokens, shape[0], dtype=dtype), x, weight)[index]


def float8_launch(index, num_tokens, group_size=128, shape=(12288, 4096)):
    num_rows, num_columns = shape
    scale_rows = 128 if group_size < num_columns else 1
    scales = meta(num_rows // scale_rows, num_columns // group_size, dtype=F32)
    weight = DeviceQuantizedWeight(meta(*shape, dtype=FP8), scales, None, group_size, scale_rows, 128, 0)
    return float8_launches(meta(num_tokens, num_rows), meta(num_tokens, num_columns), weight)[index]


def few_launch(num_tokens, shape, has_norm, dtype=BF16, **epilogue):
    num_rows, num_columns = shape
    norm = Norm(NormSpec("rms", 1e-6), meta(num_columns, dtype=dtype)) if has_norm else None
    found = Epilogue(**epilogue)
    out = meta(num_tokens, num_rows // 2 if found.is_gated else num_rows, dtype=dtype)
    return fused_linear_launch(out, meta(num_tokens, num_columns, dtype=dtype), meta(*shape, dtype=dtype), norm, found)


def codes_launch(num_tokens, dtype, shape, has_norm, x_dtype=BF16, scale_rows=1, **epilogue):
    num_rows, num_columns = shape
    weight = quantized_weight(dtype, scale_rows, shape=shape)
    norm = Norm(NormSpec("rms", 1e-6), meta(num_columns, dtype=x_dtype)) if has_norm else None
    found = Epilogue(**epilogue)
    out = meta(num_tokens, num_rows // 2 if found.is_gated else num_rows, dtype=x_dtype)
    return fused_quantized_launch(out, meta(num_tokens, num_columns, dtype=x_dtype), weight, norm, found)


def projected_launch(heads=(32, 8), head_dim=128, dtype=BF16, kv_dtype=BF16, block_size=64, **spec):
    num_sequences, num_heads, num_kv_heads = 2, *heads
    places, starts = meta(num_sequences, dtype=I64), meta(num_sequences + 1, dtype=I32)
    step = DeviceAttentionMetadata.of_decode(
        places, starts, meta(num_sequences, dtype=I32), meta(num_sequences, 640, dtype=I32), 40960
    )
    cache = [meta(4096, num_kv_heads, block_size, head_dim, dtype=kv_dtype)] * 2
    if kv_dtype != dtype:
        cache += [meta(4096, num_kv_heads, block_size, dtype=F32)] * 2
    rope = Rope(RopeSpec(head_dim, 1e6), meta(40960, head_dim, dtype=F32))
    norm = Norm(NormSpec("rms", 1e-6), meta(head_dim, dtype=dtype))
    attention = ProjectedAttention(
        AttentionSpec(*heads, head_dim, head_dim**-0.5, rope.spec, **spec), rope, (norm, norm), meta(8, num_kv_heads, dtype=I32)
    )
    out, qkv = (meta(num_sequences, count * head_dim, dtype=dtype) for count in (num_heads, num_heads + 2 * num_kv_heads))
    return attention.launch(out, qkv, KvCache(*cache), step, places)


def feedback_launch(index):
    ids, rows = meta(64, dtype=I64), meta(64, dtype=I32)
    tables, last = meta(257, 640, dtype=I32), meta(257, dtype=I64)
    launches = gather_inputs_launches(ids, meta(64, 640, dtype=I32), ids, rows, rows, last, tables)
    return [*launches, scatter_ids_launch(last, ids, rows)][index]


def move_launch(kv_dtype=BF16):
    cache = [meta(4096, 8, 64, 128, dtype=kv_dtype)] * 2
    if kv_dtype != BF16:
        cache += [meta(4096, 8, 64, dtype=F32)] * 2
    return move_tokens_launch(KvCache(*cache), meta(9, dtype=I64), meta(9, dtype=I64), meta(5, dtype=I32))


def page_launch(to_pages):
    layout = PageLayout.of([0, 1 << 29], [131072, 131072], META)
    memory, pages = meta(1 << 28, dtype=F32), meta(36, 262144, dtype=torch.uint8)
    return copy_pages_launch(memory, pages, layout, meta(9, dtype=I64), meta(9, dtype=I64), to_pages)


def recur_of(heads, k_dim, v_dim, key_heads=None, decay=None, has_beta=False, has_rates=False):
    count = 64
    q, k = (meta(count, key_heads or heads, k_dim, dtype=F32) for _ in range(2))
    v, out = (meta(count, heads, v_dim, dtype=F32) for _ in range(2))
    beta = meta(count, heads, dtype=F32) if has_beta else None
    rates = meta(heads, k_dim, v_dim, dtype=F32) if has_rates else None
    inputs = Recurrence(q, k, v, meta(count, heads, *(decay or ()), dtype=F32), beta, rates)
    pool, rows = meta(16, heads, k_dim, v_dim, dtype=F32), DeviceStateRows(*(meta(n, dtype=I32) for n in (4, count, count)))
    return recur_launch(out, inputs, pool, meta(5, dtype=I32), rows)


def conv_launch(channels, num_taps, has_bias, dtype=BF16):
    x, out = (meta(64, channels, dtype=dtype) for _ in range(2))
    bias = meta(channels, dtype=dtype) if has_bias else None
    rows = DeviceStateRows(*(meta(n, dtype=I32) for n in (4, 64, 64)))
    pool = meta(16, channels, num_taps - 1, dtype=dtype)
    return causal_conv_launch(out, x, meta(channels, num_taps, dtype=dtype), bias, pool, meta(5, dtype=I32), rows)


def decode(kv_dtype=BF16, **options):
    return lambda: attention_launches(kv_dtype=kv_dtype, **options)[1]


def prefill(kv_dtype=BF16, **options):
    return lambda: attention_launches(1024, kv_dtype=kv_dtype, **options)[0]


def verify(kv_dtype=BF16, **options):
    return decode(kv_dtype, count=4, has_tree=True, **options)


GATED = {"activation": "silu", "is_gated": True}
GEMMA = {"heads": (16, 8), "softcap": 50.0}

LAUNCHES: dict[str, Callable[[], Launch]] = {
    "decode": decode(),
    "decode-small-values": decode(head_dim=192, v_dim=128, heads=(64, 4)),
    "prefill-small-values": prefill(head_dim=192, heads=(64, 8), v_dim=128, window=128),
    "decode-small-values-window": decode(head_dim=192, heads=(64, 8), v_dim=128, window=128, has_sinks=True),
    "prefill-small-values-whole": prefill(head_dim=192, heads=(64, 4), v_dim=128),
    "prefill-alibi": prefill(heads=(40, 40), alibi_slopes=(0.5,) * 40),
    "decode-alibi": decode(heads=(40, 40), alibi_slopes=(0.5,) * 40),
    "decode-plan": lambda: attention_launches()[0],
    "decode-merge": lambda: attention_launches()[2],
    "decode-fp8": decode(FP8),
    "decode-4-bit": decode(PACKED),
    "decode-k8v4": decode((torch.int8, PACKED)),
    "unrotate": lambda: attention_launches(kv_dtype=PACKED)[-1],
    "verify-tree-4-bit": verify(PACKED),
    "prefill-4-bit": prefill(PACKED),
    "prefill-k8v4": prefill((torch.int8, PACKED)),
    "decode-latent": lambda: latent_launches()[1],
    "decode-latent-merge": lambda: latent_launches()[2],
    "decode-latent-in-order": lambda: latent_launches(is_in_order=True)[1],
    "prefill-latent": lambda: latent_launches(count=1024)[0],
    "verify-tree-latent": lambda: latent_launches(count=4, has_tree=True)[0],
    "decode-latent-chosen": lambda: latent_launches(block_size=1)[1],
    "index-scores": index_scores,
    "index-block-scores": lambda: index_scores(has_blocks=True),
    "heads-into-latent": lambda: head_products(64, 128, 512),
    "decode-int8": decode(torch.int8),
    "decode-d64": decode(head_dim=64, heads=(32, 8)),
    "decode-d80": decode(head_dim=80, heads=(32, 32)),
    "decode-d256-window": decode(head_dim=256, heads=(16, 8), window=4096, softcap=50.0),
    "decode-page16": decode(block_size=16),
    "decode-f32": decode(torch.float32, dtype=torch.float32),
    "verify-tree": verify(),
    "prefill": prefill(),
    "prefill-mha": prefill(heads=(32, 32)),
    "prefill-fp8": prefill(FP8),
    "prefill-window": prefill(window=4096),
    "prefill-d64": prefill(head_dim=64),
    "prefill-d256": prefill(head_dim=256, **GEMMA),
    "prefill-page16": prefill(block_size=16),
    "prefill-f32": prefill(torch.float32, dtype=torch.float32),
    "prefill-tree": lambda: attention_launches(count=64, has_tree=True)[0],
    "decode-in-order": decode(is_in_order=True),
    "decode-merge-in-order": lambda: attention_launches(is_in_order=True)[2],
    "decode-fp8-in-order": decode(FP8, is_in_order=True),
    "decode-d256-in-order": decode(head_dim=256, heads=(16, 8), is_in_order=True),
    "prefill-in-order": prefill(is_in_order=True),
    "prefill-fp8-in-order": prefill(FP8, is_in_order=True),
    "prefill-d256-in-order": prefill(head_dim=256, heads=(16, 8), is_in_order=True),
    "decode-group7": decode(heads=(28, 4)),
    "decode-group32": decode(heads=(32, 1)),
    "prefill-split": lambda: attention_launches(count=32, num_tokens=32768)[0],
    "prefill-merge": lambda: attention_launches(count=32, num_tokens=32768)[1],
    "prefill-window-fp8": prefill(FP8, window=4096),
    "prefill-d192-int8": prefill(torch.int8, head_dim=192, heads=(16, 8)),
    "prefill-d256-fp8": prefill(FP8, head_dim=256, **GEMMA),
    "prefill-d256-window": prefill(head_dim=256, **GEMMA, window=4096),
    "decode-whole": lambda: attention_launches(num_tokens=200)[0],
    "decode-whole-sinks": lambda: attention_launches(num_tokens=200, has_sinks=True)[0],
    "decode-merge-sinks": lambda: attention_launches(has_sinks=True)[2],
    "decode-f16": decode(torch.float16, dtype=torch.float16),
    "decode-d96": decode(head_dim=96, heads=(32, 32)),
    "decode-d112": decode(head_dim=112, heads=(32, 32)),
    "decode-d192": decode(head_dim=192, heads=(16, 8)),
    "decode-window-fp8": decode(FP8, window=1024),
    "prefill-specialized": lambda: specialized_launches()[0],
    "prefill-specialized-turns": lambda: specialized_launches(num_stages=3, takes_turns=True)[0],
    "prefill-specialized-64": lambda: specialized_launches(keys=64, num_stages=4)[0],
    "prefill-specialized-d64": lambda: specialized_launches(head_dim=64, heads=(16, 8))[0],
    "prefill-specialized-f16": lambda: specialized_launches(dtype=torch.float16, kv_dtype=torch.float16)[0],
    "prefill-f16": prefill(torch.float16, dtype=torch.float16),
    "prefill-int8": prefill(torch.int8),
    "prefill-sinks": prefill(has_sinks=True),
    "prefill-d96": prefill(head_dim=96, heads=(32, 32)),
    "prefill-d192": prefill(head_dim=192, heads=(16, 8)),
    "recur-qwen3-next": lambda: recur_of(32, 128, 128, 16, has_beta=True),
    "recur-kimi": lambda: recur_of(32, 128, 128, decay=(128,), has_beta=True),
    "recur-mamba2": lambda: recur_of(128, 128, 64, 8),
    "recur-mamba1": lambda: recur_of(1, 16, 8192, decay=(8192,), has_rates=True),
    "conv-qwen3-next": lambda: conv_launch(8192, 4, False),
    "conv-lfm2": lambda: conv_launch(2048, 3, False),
    "conv-mamba2-f32": lambda: conv_launch(10240, 4, True, F32),
    "norm": lambda: norm_launch(4096),
    "parts-2": lambda: add_parts(2, 4096),
    "parts-8": lambda: add_parts(8, 8192, 0.5),
    "parts-8-sum": lambda: add_parts(8, 5376, None),
    "norm-sandwich": lambda: norm_launch(5376, is_sandwich=True),
    "activate": lambda: activate_launch(meta(64, 12288), *meta(64, 24576).chunk(2, -1), "silu"),
    "heads-decode": lambda: heads_launch(8),
    "heads-prefill": lambda: heads_launch(2048),
    "heads-fp8": lambda: heads_launch(8, FP8),
    "heads-int8": lambda: heads_launch(8, torch.int8),
    "heads-4-bit": lambda: heads_launch(8, PACKED),
    "heads-4-bit-1024": lambda: heads_launch(1024, PACKED),
    "heads-k8v4": lambda: heads_launch(8, (torch.int8, PACKED)),
    "sample-process": processor_launch,
    "sample-count": lambda: processor_launch(is_counting=True),
    "logprobs-scan": lambda: logprob_launch(0),
    "logprobs-gather": lambda: logprob_launch(1),
    "logprobs-gather-262144": lambda: logprob_launch(1, 262144),
    "sample-scan": lambda: sampler_launch(0, has_cuts=False),
    "sample-scan-cut": lambda: sampler_launch(0, has_cuts=True),
    "sample-choose": lambda: sampler_launch(1, has_cuts=False),
    "sample-weigh": lambda: sampler_launch(1, has_cuts=True),
    "sample-collect": lambda: sampler_launch(2, has_cuts=True),
    "sample-choose-cut": lambda: sampler_launch(3, has_cuts=True),
    "sample-choose-cut-262144": lambda: sampler_launch(3, has_cuts=True, vocab_size=262144, has_masks=False),
    "moe-route": lambda: expert_launch(0, 8),
    "moe-count": lambda: expert_launch(1, 64),
    "moe-sort": lambda: expert_launch(2, 64),
    "moe-gate-up-1": lambda: expert_launch(1, 1),
    "moe-down-1": lambda: expert_launch(2, 1),
    "moe-gate-up-64": lambda: expert_launch(3, 64),
    "moe-gate-up-256": lambda: expert_launch(3, 256),
    "moe-gate-up-1024": lambda: expert_launch(3, 1024),
    "moe-gate-up-4096": lambda: expert_launch(3, 4096),
    "moe-down-4096": lambda: expert_launch(4, 4096),
    "moe-4-1": lambda: expert_launch(1, 1, torch.uint8),
    "moe-4-1024": lambda: expert_launch(3, 1024, torch.uint8),
    "moe-fp8-64": lambda: expert_launch(3, 64, FP8, 128),
    "moe-fp8-4096": lambda: expert_launch(3, 4096, FP8, 128, True),
    "moe-fp8-down-4096": lambda: expert_launch(4, 4096, FP8, 128, True),
    "moe-float8-4096": lambda: expert_launch(4, 4096, FP8, 128),
    "moe-float8-down-4096": lambda: expert_launch(6, 4096, FP8, 128),
    "moe-clamped-1": lambda: clamped_expert_launch(1, 1, False),
    "moe-clamped-4096": lambda: clamped_expert_launch(3, 4096, False),
    "moe-clamped-4-64": lambda: clamped_expert_launch(3, 64, True),
    "moe-clamped-4-4096": lambda: clamped_expert_launch(3, 4096, True),
    "moe-clamped-4-down-4096": lambda: clamped_expert_launch(4, 4096, True),
    "moe-sum": lambda: expert_launch(5, 64),
    "moe-adapted-64": lambda: adapted_expert_launch(2, 64, BF16),
    "moe-adapted-down-64": lambda: adapted_expert_launch(3, 64, BF16),
    "moe-adapted-4096": lambda: adapted_expert_launch(2, 4096, BF16),
    "moe-adapted-4-64": lambda: adapted_expert_launch(2, 64, torch.uint8),
    "lora-shrink": lambda: lora_launch(2, 16, False),
    "lora-expand": lambda: lora_launch(3, 16, False),
    "lora-shrink-64": lambda: lora_launch(2, 16, False, rank=64),
    "lora-expand-64": lambda: lora_launch(3, 16, False, rank=64),
    "lora-number-pairs": lambda: lora_launch(0, 16, True),
    "lora-sort-pairs": lambda: lora_launch(2, 512, True),
    "lora-shrink-experts": lambda: lora_launch(3, 512, True),
    "lora-expand-experts": lambda: lora_launch(4, 512, True),
    "feedback-ids": lambda: feedback_launch(0),
    "feedback-tables": lambda: feedback_launch(1),
    "feedback-keep": lambda: feedback_launch(2),
    "move": lambda: move_launch(),
    "pages-saved": lambda: page_launch(True),
    "pages-loaded": lambda: page_launch(False),
    "move-fp8": lambda: move_launch(FP8),
    "verify-chain": lambda: attention_launches(count=4)[1],
    "verify-chain-long": lambda: attention_launches(count=6)[0],
    "verify-tree-long": lambda: attention_launches(count=12, has_tree=True, num_tokens=32768)[0],
    "verify-tree-window": verify(window=1024),
    "verify-tree-fp8": verify(FP8),
    "verify-tree-d64": verify(head_dim=64),
    "verify-tree-d256": verify(head_dim=256, **GEMMA),
    "linear-4": lambda: linear_launch(torch.uint8, 1),
    "linear-4-offset": lambda: linear_launch(torch.uint8, 1, has_offset=True),
    "linear-4-64": lambda: linear_launch(torch.uint8, 64),
    "linear-4-offset-64": lambda: linear_launch(torch.uint8, 64, has_offset=True),
    "linear-8-offset": lambda: linear_launch(torch.int8, 16, has_offset=True),
    "linear-8": lambda: linear_launch(torch.int8, 1),
    "linear-4-4096": lambda: linear_launch(torch.uint8, 4096, shape=(4096, 4096)),
    "linear-add": lambda: linear_launch(torch.uint8, 16, index=1),
    "linear-large-batch": lambda: large_batch_launch(2048, (256, 3)),
    "linear-large-batch-offset": lambda: large_batch_launch(65, (128, 4), has_offset=True),
    "linear-large-batch-f16": lambda: large_batch_launch(100, (64, 6), run=64, dtype=torch.float16),
    "linear-large-batch-floats": lambda: large_batch_launch(256, (256, 6), run=32, base=None),
    "dequantize-4": lambda: dequantize(torch.uint8),
    "dequantize-fp8-rows": lambda: dequantize(FP8, meta(64, dtype=I64)),
    "dense-1": lambda: dense_launch(1),
    "dense-32": lambda: dense_launch(32),
    "dense-64": lambda: dense_launch(64),
    "dense-256": lambda: dense_launch(256),
    "dense-4096": lambda: dense_launch(4096),
    "dense-4096-splits": lambda: dense_launch(4096, shape=(4096, 4096)),
    "dense-odd": lambda: dense_launch(4096, shape=(4001, 4096)),
    "dense-f32": lambda: dense_launch(64, F32),
    "linear-fp8": lambda: linear_launch(FP8, 1, scale_rows=128),
    "linear-fp8-64": lambda: linear_launch(FP8, 64, scale_rows=128),
    "float8-quantize": lambda: float8_launch(0, 1024),
    "float8-quantize-token": lambda: float8_launch(0, 1024, group_size=12288, shape=(4096, 12288)),
    "float8-128": lambda: float8_launch(1, 128),
    "float8-1024": lambda: float8_launch(1, 1024),
    "float8-1024-token": lambda: float8_launch(1, 1024, group_size=4096),
    "few-qkv": lambda: few_launch(1, (4096, 1024), True),
    "few-gate-up": lambda: few_launch(1, (6144, 1024), True, **GATED),
    "few-o": lambda: few_launch(1, (1024, 2048), False, residual_scale=1.0),
    "few-down": lambda: few_launch(1, (1024, 3072), False, residual_scale=1.0),
    "few-gate-up-large": lambda: few_launch(1, (24576, 4096), True, **GATED),
    "few-down-large": lambda: few_launch(1, (4096, 12288), False, residual_scale=1.0),
    "few-f32": lambda: few_launch(1, (6144, 1024), True, F32, **GATED),
    "few-qkv-8": lambda: few_launch(8, (4096, 1024), True),
    "few-gate-up-8": lambda: few_launch(2, (6144, 1024), True, **GATED),
    "few-down-8": lambda: few_launch(8, (1024, 3072), False, residual_scale=1.0),
    "few-gate-up-16": lambda: few_launch(16, (6144, 1024), True, **GATED),
    "few-down-16": lambda: few_launch(16, (1024, 3072), False, residual_scale=1.0),
    "few-gate-up-large-8": lambda: few_launch(8, (24576, 4096), True, activation="gelu", is_gated=True),
    "few-gate-up-large-16": lambda: few_launch(16, (24576, 4096), True, **GATED),
    "few-qkv-large-16": lambda: few_launch(16, (6144, 4096), True),
    "few-down-large-8": lambda: few_launch(8, (4096, 12288), False, residual_scale=1.0),
    "codes-qkv-fp8": lambda: codes_launch(1, FP8, (6144, 4096), True, scale_rows=128),
    "codes-down-fp8": lambda: codes_launch(1, FP8, (4096, 12288), False, scale_rows=128, residual_scale=1.0),
    "codes-gate-up-4": lambda: codes_launch(1, torch.uint8, (24576, 4096), True, **GATED),
    "codes-down-4": lambda: codes_launch(1, torch.uint8, (4096, 12288), False, residual_scale=1.0),
    "codes-gate-up-fp8-8": lambda: codes_launch(8, FP8, (24576, 4096), True, scale_rows=128, **GATED),
    "codes-gate-up-4-8": lambda: codes_launch(8, torch.uint8, (24576, 4096), True, **GATED),
    "codes-down-fp8-8": lambda: codes_launch(8, FP8, (4096, 12288), False, scale_rows=128, residual_scale=1.0),
    "codes-down-4-8": lambda: codes_launch(8, torch.uint8, (4096, 12288), False, residual_scale=1.0),
    "codes-gate-up-4-8-f16": lambda: codes_launch(8, torch.uint8, (24576, 4096), True, torch.float16, **GATED),
    "few-down-large-16": lambda: few_launch(9, (4096, 12288), False, residual_scale=1.0),
    "few-f32-16": lambda: few_launch(9, (6144, 1024), True, F32, **GATED),
    "projected": lambda: projected_launch(),
    "projected-small": lambda: projected_launch((16, 8)),
    "projected-fp8": lambda: projected_launch(kv_dtype=FP8),
    "projected-int8": lambda: projected_launch(kv_dtype=torch.int8),
    "projected-d256-window": lambda: projected_launch((16, 8), 256, window=4096, softcap=50.0),
    "projected-page16": lambda: projected_launch(block_size=16),
    "projected-group16": lambda: projected_launch((32, 2)),
    "projected-f32": lambda: projected_launch(dtype=F32, kv_dtype=F32),
}

_MATRIX, _COPIES, _LOCAL = ("HGMMA", "QGMMA", "IGMMA", "HMMA"), "LDGSTS", ("LDL", "STL")
# The next kernel may begin, this one waits for the one before, lines are brought to the L2 cache, programs count themselves.
_DEPENDENT = ("PREEXIT", "ACQBULK", "UBLKPF", "ATOMG")


def describe(name, arch):
    """Return what a launch compiles to, as JSON may hold it."""
    compiled = compile_launch(LAUNCHES[name](), arch)
    counts = {
        opcode: compiled.count(opcode)
        for opcode in (*_MATRIX, _COPIES, "UTMALDG", "WARPGROUP.DEPBAR", "FFMA", "SHFL", *_LOCAL, *_DEPENDENT)
    }
    return {
        "registers": compiled.num_registers,
        "stack": compiled.stack_bytes,
        "shared": compiled.shared_bytes,
        "wide_copies": compiled.count_wide_copies(),
        "wide_loads": compiled.count("LDG.E.128"),
        "early_loads": compiled.num_early_loads,
        **{opcode: number for opcode, number in counts.items() if number},
    }


if __name__ == "__main__":
    target = DeviceTraits.of_arch(int(sys.argv[1]))
    choose_traits(target)
    for chosen in sys.argv[2:] or LAUNCHES:
        print(json.dumps({"name": chosen, **describe(chosen, target.arch)}), flush=True)
