"""Logits of the native decoder depend on nothing but the sequence: to the bit the same alone, in chunks and in any batch."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import cast

import pytest
import torch

from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import Dtype
from quire.kernels.native import load_native
from quire.kernels.reference.attention import AttentionMetadata
from quire.kv.pool import KvPool
from quire.model.checkpoint import load_parameters
from quire.model.config_reader import read_model_spec
from quire.model.native_decoder import NativeDecoder
from quire.model.resolve import resolve_model
from quire.model.token_runs import adapter_rows
from quire.quant.policy import POLICIES, parameter_quantizer
from quire.quant.weight import QuantizedWeight
from tests.lora_adapter import load_random_adapter
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.model.quantised_checkpoint import CONFIGS, WEIGHTS, write_quantised

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")

BLOCK_SIZE = 16
# Attention takes the softmax of 256 cached tokens at once: shorter, as long, and longer.
LENGTHS = (1, 5, 16, 33, 90, 256, 275)
CHUNKS = (1, 1, 1, 1, 2, 3, 7, 13, 16, 17, 29, 64, 200)
FAMILIES = ("qwen3", "mistral", "gemma2", "qwen3_moe", "gpt_oss")  # of the fixture
PRECISIONS = {
    "f32": ("float32", None),
    "bf16": ("bfloat16", None),
    "bf16-short": ("bfloat16", None),
    "f16": ("float16", None),
    "int8": ("bfloat16", "int8"),
    "int4": ("bfloat16", "int4"),
    "f32-int8": ("float32", "int8"),
    "fp8": ("bfloat16", "fp8"),
    "f32-fp8": ("float32", "fp8"),
}


TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
STORED = {
    "gptq-act-order": None,
    "awq": None,
    "int8": None,
    "int8-tokens": {
        **CONFIGS["int8"],
        "config_groups": {"g": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": TOKENS}},
    },
}
"""Formats and their configs, where they are not those that write_quantised has."""
TRAITS = {
    "gptq-act-order": (True, True, False),
    "awq": (True, False, False),
    "int8": (False, False, False),
    "int8-tokens": (False, False, True),
}
"""Whether weights have zero points and an order of their columns, and inputs are quantised by token."""


@contextmanager
def on_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield count
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def threads(request):
    with on_threads(request.param):
        yield request.param


def build(folder, precision):
    dtype, quantization = PRECISIONS[precision]
    spec = read_model_spec(folder, dtype)
    parameters = load_parameters(folder, spec)
    quantize = None if quantization is None else parameter_quantizer(parameters, spec, POLICIES[quantization]).quantized
    with pytest.MonkeyPatch.context() as patch:
        if precision == "bf16-short":
            patch.setattr("quire.model.native_model.SHORT_FROM", 0)
        return NativeDecoder(load_native(), spec, parameters, max_model_len=max(LENGTHS), quantize=quantize)


class Bench:
    """Sequences and a cache whose blocks are dealt out in a random order; what is computed is remembered per position.

    keys  of the sequences' adapters, "": none
    """

    def __init__(self, decoder, sequences, rng, kv_dtype=None, keys=None):
        self.decoder, self.sequences, self.keys = decoder, sequences, keys
        dtype = "float32" if decoder.spec.dtype == "float16" else decoder.spec.dtype
        shape = KvSpec.of(decoder.spec, BLOCK_SIZE, cast("Dtype", kv_dtype or dtype))
        counts = [-(-len(tokens) // BLOCK_SIZE) for tokens in sequences]
        order = list(range(sum(counts)))
        rng.shuffle(order)
        self.kv = KvPool(shape, len(order))
        self.tables = torch.zeros(len(sequences), max(counts), dtype=torch.int64)
        for index, count in enumerate(counts):
            self.tables[index, :count] = torch.tensor([order.pop() for _ in range(count)])
        self.done = [0] * len(sequences)
        self.logits = [{} for _ in sequences]

    def step(self, parts, is_wanted=lambda: True):
        """Compute the next `count` tokens of sequence `index` for each (index, count), in this order."""
        tokens, positions, starts, wanted = [], [], [0], []
        for index, count in parts:
            first = self.done[index]
            tokens += self.sequences[index][first : first + count]
            positions += range(first, first + count)
            wanted += [(starts[-1] + i, index, first + i) for i in range(count) if is_wanted()]
            starts.append(starts[-1] + count)
            self.done[index] += count
        indices = [index for index, _ in parts]
        owners = torch.tensor(indices).repeat_interleave(torch.tensor([count for _, count in parts]))
        where = torch.tensor(positions)
        slots = self.tables[owners, where // BLOCK_SIZE] * BLOCK_SIZE + where % BLOCK_SIZE
        lengths = [self.done[index] for index in indices]
        adapters = adapter_rows(self.keys and [self.keys[index] for index in indices], starts)
        step = AttentionMetadata(slots, starts, lengths, self.tables[indices], adapters=adapters)
        logits = self.decoder.step(torch.tensor(tokens), where, step, self.kv, [row for row, _, _ in wanted])
        for (_, index, position), row in zip(wanted, logits, strict=True):
            self.logits[index][position] = row

    def unfinished(self):
        return [index for index, tokens in enumerate(self.sequences) if self.done[index] < len(tokens)]

    def left(self, index):
        return len(self.sequences[index]) - self.done[index]


def random_sequences(vocab_size, rng):
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in LENGTHS]


def logits_alone(decoder, sequences, rng, kv_dtype=None, keys=None):
    """Return the logits [T, vocab_size] of each sequence computed by itself, all its tokens at once."""
    found = []
    for index, tokens in enumerate(sequences):
        bench = Bench(decoder, [tokens], rng, kv_dtype, keys and [keys[index]])
        bench.step([(0, len(tokens))])
        found.append(torch.stack([bench.logits[0][position] for position in range(len(tokens))]))
    return found


def assert_same(bench, alone):
    for index, found in enumerate(bench.logits):
        for position, logits in found.items():
            assert torch.equal(logits, alone[index][position]), (LENGTHS[index], position)


def check_mixtures(decoder, seed, kv_dtype=None, keys=None):
    """Compare whole sequences alone with random chunks of random batches, of which all rows or a few are asked for."""
    rng = random.Random(seed)
    sequences = random_sequences(decoder.spec.vocab_size, rng)
    alone = logits_alone(decoder, sequences, rng, kv_dtype, keys)
    assert all(logits.isfinite().all() for logits in alone)
    bench = Bench(decoder, sequences, rng, kv_dtype, keys)
    while waiting := bench.unfinished():
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        parts = [(index, min(rng.choice(CHUNKS), bench.left(index))) for index in chosen]
        share = rng.choice((0.1, 1.0, 1.0))
        bench.step(parts, lambda share=share: rng.random() < share)
    assert sum(map(len, bench.logits)) > sum(LENGTHS) / 3
    assert_same(bench, alone)


ADAPTED = {
    "all": r".*",
    "some": r"layers\.0\.(?:v|down|router)|layers\.1\.(?:q|k|gate|experts\.[02]\.(?:up|down))",
}
"""Key of an adapter -> names of its modules."""


@pytest.mark.covering
@pytest.mark.parametrize("precision", PRECISIONS)
def test_logits_with_adapters_are_the_same_to_the_bit_in_random_batches(tiny_family, precision):
    """Also those of sequences without an adapter, which alone take the fused operations."""
    turn = list(PRECISIONS).index(precision) + FAMILIES.index(tiny_family.name)
    keys = ["", "all", "some", "all", "", "some", "all"]
    with on_threads(1 + turn % 2) as threads:
        decoder = build(tiny_family, precision)
        for key, names in ADAPTED.items():
            load_random_adapter(decoder, key, names)
        check_mixtures(decoder, seed=threads, keys=keys)
        rng = random.Random(8)
        tokens = random_sequences(decoder.spec.vocab_size, rng)[3]
        base, adapted = (logits_alone(decoder, [tokens], rng, keys=[key])[0] for key in ("", "some"))
        assert not torch.allclose(base, adapted, atol=0.05)


# Where threads take turns each precision, family and format meets one as well as two.
@pytest.mark.covering
@pytest.mark.parametrize("precision", PRECISIONS)
def test_logits_are_the_same_to_the_bit_in_random_batches(tiny_family, precision):
    turn = list(PRECISIONS).index(precision) + FAMILIES.index(tiny_family.name)
    with on_threads(1 + turn % 2) as threads:
        check_mixtures(build(tiny_family, precision), seed=threads)


@pytest.mark.covering
@pytest.mark.parametrize("precision", ["f32", "bf16", "int4"])
def test_logits_with_sinks_and_clamped_experts_are_the_same_to_the_bit_in_random_batches(tmp_path, precision, threads):
    check_mixtures(build(write_checkpoint(tmp_path / "gpt_oss", "gpt_oss"), precision), seed=threads)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "model, precision",
    [
        ("demo", "bf16"),
        pytest.param("demo", "int4", marks=pytest.mark.slow),
        pytest.param("demo-moe", "bf16", marks=pytest.mark.slow),
        pytest.param("demo-moe", "int8", marks=pytest.mark.slow),
    ],
)
def test_logits_of_bundled_models_are_the_same_to_the_bit_in_random_batches(model, precision, threads):
    check_mixtures(build(resolve_model(model), precision), seed=threads)


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", STORED)
def test_logits_of_stored_integers_are_the_same_to_the_bit_in_random_batches(tmp_path, kind, dtype, family):
    folder, _ = write_quantised(tmp_path, family, kind.partition("-")[0], quantization=STORED[kind])
    spec = read_model_spec(folder, dtype)
    parameters = load_parameters(folder, spec)
    weight = parameters["layers.0.o.weight"]
    assert isinstance(weight, QuantizedWeight)
    assert (weight.offset is not None, weight.columns is not None, weight.is_token_quantized) == TRAITS[kind]
    turn = list(STORED).index(kind) + (dtype == "float16") + (family == "qwen3_moe")
    with on_threads(1 + turn % 2) as threads:
        check_mixtures(NativeDecoder(load_native(), spec, parameters, max_model_len=max(LENGTHS)), seed=threads)


@pytest.mark.covering
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("precision", ["f32", "bf16", "int8", "int4"])
def test_logits_are_the_same_to_the_bit_when_the_cache_has_eight_bits(tiny_family, precision, kv_dtype):
    check_mixtures(build(tiny_family, precision), seed=3, kv_dtype=kv_dtype)


def test_keys_of_a_cache_are_read_as_they_were_stored_but_for_rounding(tmp_path):
    decoder = build(write_checkpoint(tmp_path / "model", "qwen3"), "f32")
    sequences = random_sequences(decoder.spec.vocab_size, random.Random(8))[4:5]
    found = {}
    for kv_dtype in ("float32", "bfloat16", "int8", "fp8", "k8v4"):
        bench = Bench(decoder, sequences, random.Random(9), kv_dtype)
        bench.step([(0, len(sequences[0]))])
        # Those of the first layer depend on no other keys.
        found[kv_dtype] = decoder.cached_keys(bench.kv, 0, bench.tables[0])[:, : len(sequences[0])]
    exact = found["float32"]
    largest = exact.abs().amax(-1, keepdim=True)
    errors = {"bfloat16": exact.abs() / 2**8, "int8": largest / 253, "fp8": exact.abs() / 15 + largest / 448 / 2**10}
    errors["k8v4"] = errors["int8"]
    assert largest.min() > 0.01
    for kv_dtype, error in errors.items():
        assert ((found[kv_dtype] - exact).abs() <= error).all(), kv_dtype


@pytest.mark.covering
@pytest.mark.parametrize("precision", PRECISIONS)
def test_logits_are_the_same_to_the_bit_when_decoded_token_by_token(tiny_family, precision):
    decoder, rng = build(tiny_family, precision), random.Random(4)
    sequences = random_sequences(decoder.spec.vocab_size, rng)
    alone = logits_alone(decoder, sequences, rng)
    bench = Bench(decoder, sequences, rng)
    while waiting := bench.unfinished():
        bench.step([(index, 1) for index in waiting])
    assert_same(bench, alone)


@pytest.mark.covering
def test_logits_are_the_same_to_the_bit_when_the_number_of_threads_changes_between_steps(tiny_family, threads):
    decoder, rng = build(tiny_family, "bf16"), random.Random(5)
    sequences = random_sequences(decoder.spec.vocab_size, rng)
    alone = logits_alone(decoder, sequences, rng)
    bench = Bench(decoder, sequences, rng)
    while waiting := bench.unfinished():
        torch.set_num_threads(rng.randint(1, 3))
        bench.step([(index, min(40, bench.left(index))) for index in waiting])
    assert_same(bench, alone)


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9])
def test_logits_are_the_same_to_the_bit_wherever_weights_are_expected(tiny_family, precision, rows):
    found = []
    for is_near in (False, True):
        decoder, rng = build(tiny_family, precision), random.Random(7)
        decoder.plan.is_near = is_near
        bench = Bench(decoder, [random_sequences(decoder.spec.vocab_size, rng)[3]], rng)
        while bench.unfinished():
            bench.step([(0, min(rows, bench.left(0)))])
        found.append(bench.logits[0])
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(logits, found[1][position]) for position, logits in found[0].items())


@pytest.mark.parametrize("precision", ["bf16", "int4"])
def test_logits_asked_for_later_are_those_of_the_step(tiny_family, precision):
    decoder, rng = build(tiny_family, precision), random.Random(6)
    sequences = random_sequences(decoder.spec.vocab_size, rng)[3:5]
    alone = torch.cat(logits_alone(decoder, sequences, rng))
    bench = Bench(decoder, sequences, rng)
    step = decoder.step
    decoder.step = lambda *arguments: step(*arguments, keeps_all=True)
    bench.step([(0, len(sequences[0])), (1, len(sequences[1]))], lambda: False)
    for first, last in ((0, 1), (30, 40), (0, len(alone))):
        assert torch.equal(decoder.logits_at(first, last), alone[first:last])
