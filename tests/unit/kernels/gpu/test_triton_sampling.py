"""The device's sampler gives the tokens of the CPU's, bit for bit of the noise and the masses."""

import math

import pytest
import torch
import triton
import triton.language as tl

from quire.base.errors import InvariantError
from quire.contracts.sampling_params import SamplingParams
from quire.kernels.cpu.sampling import DrawOptions, SampleStatus
from quire.kernels.reference import mass
from quire.kernels.reference.noise import gumbel_noise
from quire.kernels.triton import noise, sampling
from quire.kernels.triton.sampling import row_options, sample_rows
from quire.sampling.truncation import has_truncation, truncate
from tests.unit.kernels.gpu.conftest import draw

VOCAB = 5003
PLAIN = DrawOptions(1.0, False, 0, 1.0, -math.inf, 7, 11)
GREEDY = PLAIN._replace(is_greedy=True)


@triton.jit(do_not_specialize=["key_low", "key_high", "position", "stream"])
def write_noise(run_ptr, tokens_ptr, ids_ptr, key_low, key_high, position, stream, BLOCK: tl.constexpr):
    """Write the noise of tokens 4096 on, and of given ones."""
    places = tl.arange(0, BLOCK)
    key_low, key_high = key_low.to(tl.uint32), key_high.to(tl.uint32)
    position, stream = position.to(tl.uint32), stream.to(tl.uint32)
    tl.store(run_ptr + places, noise.noise_of_run(4096, key_low, key_high, position, stream, BLOCK))
    ids = tl.load(ids_ptr + places)
    tl.store(tokens_ptr + places, noise.noise_of_tokens(ids, key_low, key_high, position, stream))


@triton.jit
def write_masses(depth_ptr, out_ptr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + places, noise.fixed_point_exp(tl.load(depth_ptr + places)))


@pytest.mark.parametrize("seed, position", [(0, 0), (0x9234567890ABCDEF, 0xFFFFFFFF), (1, 3)])
def test_noise_has_the_bits_of_the_reference(seed, position, device):
    run, tokens = torch.empty(2048, device=device), torch.empty(2048, device=device)
    ids = torch.randint(0, 150_000, (2048,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    write_noise[(1,)](
        run, tokens, ids.to(device), seed & 0xFFFFFFFF, seed >> 32, position, 2, BLOCK=2048, enable_fp_fusion=False
    )
    expected = gumbel_noise([seed], [position], 150_000, stream=2)[0]
    assert torch.equal(run.cpu(), expected[4096:6144])
    assert torch.equal(tokens.cpu(), expected[ids.long()])


def test_masses_have_the_bits_of_the_reference(device):
    depth = torch.cat(
        (-40 * torch.rand(8189, generator=torch.Generator().manual_seed(3)) ** 2, torch.tensor([0.0, -0.0, -math.inf]))
    )
    units = torch.empty(8192, dtype=torch.int64, device=device)
    write_masses[(4,)](depth.to(device), units, BLOCK=2048, enable_fp_fusion=False)
    assert torch.equal(units.cpu(), mass.fixed_point_exp(depth))


def expected_token(logits, options):
    """Return what quire/sampling would take: an oracle in torch alone."""
    values = logits.float() * (1.0 if options.is_greedy else torch.tensor(options.inverse_temperature, dtype=torch.float32))
    if options.token_mask is not None:
        bits = ((options.token_mask[:, None] >> torch.arange(32)) & 1).bool().flatten()[: len(logits)]
        values = values.masked_fill(~bits, -math.inf)
    if options.is_greedy:
        return int(values.argmax())
    scores = values + gumbel_noise([options.seed], [options.position], len(logits))[0]
    params = SamplingParams(top_k=options.top_k, top_p=options.top_p, min_p=math.exp(options.log_min_p), temperature=1.0)
    if has_truncation(params, len(logits)):
        kept = torch.cat([part.token_ids for part in truncate(values[None], [0], [params])])
        scores = torch.full_like(scores, -math.inf).index_copy_(0, kept, scores[kept])
    return int(scores.argmax())


def check(logits, options, device, **keywords):
    found = sample_rows(logits.to(device), row_options(options, logits.shape[1], device), **keywords)
    assert found.statuses.tolist() == [0] * len(options)
    assert found.tokens.tolist() == [expected_token(row, each) for row, each in zip(logits, options, strict=True)]


def random_logits(num_rows, spread, seed=0, vocab=VOCAB):
    return spread * draw(num_rows, vocab, seed=seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_tokens_are_those_of_the_cpu_when_nothing_is_cut(dtype, device):
    logits = random_logits(4, 3.0).to(dtype)
    options = [PLAIN, GREEDY, PLAIN._replace(inverse_temperature=1 / 0.7, seed=2**63 + 5), PLAIN._replace(position=2**32 - 1)]
    check(logits, options, device, has_cuts=False)


CUTS = {
    "top-k": {"top_k": 40},
    "top-p": {"top_p": 0.9},
    "min-p": {"log_min_p": math.log(0.05)},
    "all": {"top_k": 25, "top_p": 0.8, "log_min_p": math.log(0.02)},
    "one": {"top_k": 1},
    "least mass": {"top_p": 1e-9},
    "most mass": {"top_p": 1 - 1e-12, "inverse_temperature": 2.0},
}


SPREADS = [pytest.param(0.1, id="flat", marks=pytest.mark.slow), pytest.param(2.0, id="usual"), pytest.param(12.0, id="peaked")]


@pytest.mark.parametrize("spread", SPREADS)
def test_tokens_are_those_of_the_cpu_when_rows_are_cut(spread, device):
    options = [PLAIN._replace(seed=seed, **cut) for seed, cut in enumerate(CUTS.values())]
    options += [GREEDY._replace(top_k=5), PLAIN]
    logits = random_logits(len(options), spread, seed=4)
    logits[0] = (logits[0] * 4).round() / 4  # ties at the cut
    logits[1] = (logits[1] * 4).round() / 4
    check(logits, options, device)


@pytest.mark.slow
def test_tokens_are_those_of_the_cpu_when_a_list_of_candidates_would_be_too_long(device):
    options = [PLAIN._replace(top_k=4500), PLAIN._replace(top_p=0.98), PLAIN._replace(top_k=4600, top_p=0.9)]
    check(random_logits(3, 0.01), options, device)


def test_masked_tokens_are_never_taken_and_never_counted(device):
    generator = torch.Generator().manual_seed(5)
    mask = torch.randint(-(2**31), 2**31, (-(-VOCAB // 32),), generator=generator, dtype=torch.int64).to(torch.int32)
    lone = torch.zeros_like(mask)
    lone[77] = 1 << 9
    options = [row._replace(token_mask=mask) for row in (PLAIN, GREEDY, PLAIN._replace(top_k=9), PLAIN._replace(top_p=0.5))]
    options += [PLAIN._replace(top_k=3, token_mask=lone), PLAIN]
    check(random_logits(len(options), 2.0), options, device)


def test_ties_go_to_the_lowest_token_and_zeros_of_both_signs_tie(device):
    logits = torch.zeros(2, VOCAB)
    logits[:, ::2] = -0.0
    logits[1, 100] = 1.0
    check(logits, [GREEDY, PLAIN._replace(top_k=2)], device)
    plain = torch.full((1, VOCAB), -5.0)
    plain[0, [4999, 4000, 17]] = 2.0
    check(plain, [GREEDY], device)


def test_failing_rows_say_why_and_spoil_no_others(device):
    logits = random_logits(6, 1.0)
    logits[0, 4001] = math.nan
    logits[1, 5] = math.inf
    logits[2] = -math.inf
    logits[3, 0], logits[4] = 1e38, -1e38
    hot = PLAIN._replace(inverse_temperature=1e5)
    for cut in ({}, {"top_k": 3, "top_p": 0.5}):
        options = [row._replace(**cut) for row in (PLAIN, PLAIN, PLAIN, hot, hot, PLAIN)]
        found = sample_rows(logits.to(device), row_options(options, VOCAB, device), has_cuts=bool(cut))
        wanted = ["NAN", "INFINITE", "NOTHING", "OVERFLOW", "UNDERFLOW", "FINE"]
        assert [SampleStatus(status).name for status in found.statuses.tolist()] == wanted
        assert found.tokens.tolist() == [-1] * 5 + [expected_token(logits[5], options[5])]


def test_small_vocabularies_are_sampled_too(device):
    for vocab in (1, 2, 33):
        check(random_logits(2, 1.0, vocab=vocab), [PLAIN, PLAIN._replace(top_p=0.4)], device)


def test_options_that_do_not_fit_are_refused(device):
    options = row_options([PLAIN], VOCAB, device)
    with pytest.raises(InvariantError, match="top_ps"):
        sample_rows(torch.zeros(1, VOCAB, device=device), options._replace(top_ps=options.top_ps.float()))
    with pytest.raises(InvariantError, match="logits"):
        sampling.sample_rows(torch.zeros(1, VOCAB, dtype=torch.int32, device=device), options)
