"""Attention, norms, rope and the sampler at shapes that hypothesis draws, on every instruction set of this machine."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.cpu.sampling import sample_rows
from quire.kernels.reference.rope import rotate as rotate_reference
from quire.sampling import sample, sampler
from tests.unit.kernels.cpu import test_elementwise as elementwise
from tests.unit.kernels.cpu import test_native_attention as attention
from tests.unit.kernels.cpu import test_native_sampler as sampling

native = pytest.importorskip("quire.kernels.cpu._native", reason="the native kernels are not built")
EACH_ISA = st.sampled_from(native.supported_isas())

quickly = settings(max_examples=80, derandomize=True, deadline=None)

SETUPS = st.builds(
    lambda kv_heads, group, half, **fields: attention.Setup(
        num_heads=kv_heads * group, kv_heads=kv_heads, head_dim=2 * half, **fields
    ),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 6),
    half=st.integers(1, 50),
    block_size=st.sampled_from([16, 32, 48]),
    cache=st.sampled_from(list(attention.DTYPES)),
    is_bf16=st.booleans(),
    window=st.one_of(st.just(0), st.integers(1, 300)),
    softcap=st.sampled_from([0.0, 3.0]),
    has_sinks=st.booleans(),
)
RUNS = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=4)


@quickly
@given(setup=SETUPS, runs=RUNS, isa=EACH_ISA, threads=st.integers(1, 3))
def test_attention_agrees_with_float64_at_any_shape(setup, runs, isa, threads):
    cache = attention.Cache(setup, [length for length, _ in runs], isa=isa)
    rows = [(index, length, min(length, count)) for index, (length, count) in enumerate(runs)]
    q, sinks = attention.queries_of(setup, rows), attention.sinks_of(setup)
    out = attention.attend(cache, rows, q, sinks=sinks, isa=isa, num_threads=threads)
    largest = max(cache.stored(index)[1].abs().max() for index in range(len(rows)))
    budget = attention.budget_of(setup) * largest
    assert (out.double() - attention.reference(cache, rows, q, sinks)).abs().max() <= budget


@quickly
@given(
    rows=st.integers(1, 9),
    size=st.integers(1, 2500),
    is_layer=st.booleans(),
    has_bias=st.booleans(),
    isa=EACH_ISA,
    threads=st.integers(1, 3),
)
def test_norm_matches_f64_at_any_shape(rows, size, is_layer, has_bias, isa, threads):
    x, weight = elementwise.random(rows, size, seed=size) * 3 + 1, elementwise.random(size, seed=1)
    bias = elementwise.random(size, seed=2) if has_bias else None
    want = elementwise.norm_f64(x, weight, bias, is_layer=is_layer)
    got = elementwise.run_norm(x, weight, bias, isa, is_layer=is_layer, threads=threads)
    scale = want.abs().amax(-1, keepdim=True).clamp(min=1.0) * 8
    assert ((got.double() - want).abs() / scale).max() <= elementwise.norm_budget(x)


@quickly
@given(
    rows=st.integers(1, 7),
    heads=st.integers(1, 9),
    halves=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    isa=EACH_ISA,
    threads=st.integers(1, 3),
)
def test_rotate_gives_the_bits_of_the_reference_at_any_shape(rows, heads, halves, isa, threads):
    half, head_dim = min(halves), 2 * max(halves)
    x = elementwise.random(rows, heads, head_dim, seed=half)
    angles = torch.arange(rows)[:, None] * torch.logspace(0, -4, half)
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    y, memory = elementwise.guarded(x)
    native.rotate(y.data_ptr(), *x.shape, 2 * half, cos.data_ptr(), sin.data_ptr(), threads, isa)
    assert torch.equal(y, rotate_reference(x, cos[:, None], sin[:, None]))
    elementwise.assert_ends_untouched(memory)


@quickly
@given(
    vocab_size=st.integers(1, 3000),
    shape=st.sampled_from(list(sampling.SHAPES)),
    seed=st.integers(0, 2**32),
    isa=EACH_ISA,
)
def test_tokens_equal_those_of_torch_at_any_size(vocab_size, shape, seed, isa):
    rnd = random.Random(seed)
    logits = sampling.SHAPES[shape](torch.randn(4, vocab_size, generator=sampling.generator(seed)))
    rows = [
        sampling.make_row(vocab_size, rnd.randrange(2**63), **sampling.random_params(rnd, vocab_size))
        for _ in range(len(logits))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "load_native", lambda: None)
        expected = [-1 if one.token_id is None else one.token_id for one in sample(logits, rows)]
    found = sample_rows(native, logits, range(len(rows)), [sampler.draw_options(row) for row in rows], isa)
    assert [token_id for token_id, _ in found] == expected
