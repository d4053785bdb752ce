"""The native sampler: the bits of its noise, the tokens of the torch sampler, log probabilities, on every instruction set."""

import math
import random

import pytest
import torch

from quire.base.errors import InvariantError
from quire.base.ids import RequestId
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.kernels.cpu.sampling import DrawOptions, SampleStatus, logprobs_of_rows, sample_rows
from quire.kernels.reference.noise import gumbel_from_words, gumbel_noise
from quire.sampling import SamplingRow, sample, sampler

native = pytest.importorskip("quire.kernels.cpu._native", reason="the native kernels are not built")
ISAS = native.supported_isas()
NEVER = -math.inf
SIZES = [1, 2, 5, 15, 16, 17, 63, 64, 65, 257, 1025, 4097]


def generator(seed):
    return torch.Generator().manual_seed(seed)


def options(**fields):
    plain = {
        "inverse_temperature": 1.0,
        "is_greedy": False,
        "top_k": 0,
        "top_p": 1.0,
        "log_min_p": NEVER,
        "seed": 1,
        "position": 7,
    }
    return DrawOptions(**plain | fields)


def make_row(vocab_size, seed, **params):
    request = Request(
        request_id=RequestId("r"),
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(**params),
        seed=seed,
        eos_token_ids=frozenset(),
    )
    return SamplingRow(request, 0, (1, 2, 3), vocab_size)


# What logits may look like; x [R, V] standard normal.
SHAPES = {
    "normal": lambda x: x * 3,
    "flat": lambda x: x * 0.1,
    "equal": lambda x: x * 0,
    "ties": lambda x: (x * 2).round(),
    "peaked": lambda x: torch.where(torch.arange(x.shape[1]) == x.shape[1] // 2, 40.0, x),
    "masked": lambda x: torch.where(x > 0.5, x, NEVER).index_fill(1, torch.tensor([x.shape[1] - 1]), 1.0),
    "huge": lambda x: x * 1e30,
    "denormal": lambda x: x * 1e-42,
    "skewed": lambda x: torch.exp(x * 3),
    "shifted": lambda x: x * 3 - 1e6,
    "deep": lambda x: x * 30,
}


def random_params(rnd, vocab_size):
    params = {"temperature": rnd.choice([0, 1.0, 1.0, 0.7, 0.2, 2.5, 1e-9, 1e9, 1e300])}
    if rnd.random() < 0.4:
        params["top_k"] = rnd.choice([1, 2, 5, 50, 1000, 1024, 5000, max(1, vocab_size - 1), vocab_size])
    if rnd.random() < 0.4:
        params["top_p"] = rnd.choice([1e-9, 0.1, 0.5, 0.9, 0.95, 0.9999, 1 - 1e-12])
    if rnd.random() < 0.3:
        params["min_p"] = rnd.choice([1e-9, 0.001, 0.05, 0.5, 1.0])
    return params


@pytest.mark.covering
@pytest.mark.parametrize("vocab_size", [*SIZES, 30_011])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_tokens_equal_those_of_torch(monkeypatch, shape, vocab_size):
    rnd = random.Random(vocab_size)
    num_rows = 40 if vocab_size < 5000 else 10
    logits = shape(torch.randn(num_rows, vocab_size, generator=generator(vocab_size)))
    rows = [make_row(vocab_size, rnd.randrange(2**63), **random_params(rnd, vocab_size)) for _ in range(num_rows)]
    monkeypatch.setattr(sampler, "load_native", lambda: None)
    expected = sample(logits, rows)
    monkeypatch.setattr(sampler, "load_native", lambda: native)
    assert sample(logits, rows) == expected
    drawn = [-1 if one.token_id is None else one.token_id for one in expected]
    for isa in ISAS:
        found = sample_rows(native, logits, range(num_rows), [sampler.draw_options(row) for row in rows], isa)
        assert [token_id for token_id, _ in found] == drawn


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 50, "top_p": 0.9},
        {"top_k": 5000, "temperature": 3.0},
        {"top_p": 0.95},
        {"top_p": 0.9, "temperature": 5.0},
        {"min_p": 0.02},
        {"temperature": 0},
    ],
    ids=str,
)
def test_tokens_equal_those_of_torch_in_a_large_vocabulary(monkeypatch, fields):
    vocab_size = 152_064
    logits = torch.randn(3, vocab_size, generator=generator(5)) * 2.5
    rows = [make_row(vocab_size, seed, **fields) for seed in range(3)]
    monkeypatch.setattr(sampler, "load_native", lambda: native)
    found = sample(logits, rows)
    monkeypatch.setattr(sampler, "load_native", lambda: None)
    assert found == sample(logits, rows)


@pytest.mark.covering
@pytest.mark.parametrize("top_p", [0.02, 0.4, 0.9, 0.999])
@pytest.mark.parametrize("sampled", ["like_others", "excluded", "lower", "higher"])
def test_flat_nucleus_does_not_depend_on_where_the_kernel_looked_first(monkeypatch, sampled, top_p):
    # Over 1024 blocks: the kernel then guesses the cut from every 64th run of 16 tokens, which here may mislead it.
    vocab_size = 90_000
    logits = torch.randn(6, vocab_size, generator=generator(11)) * 0.7
    logits[:, (torch.arange(vocab_size) // 16) % 64 == 0] += {"like_others": 0, "excluded": NEVER, "lower": -3, "higher": 1}[
        sampled
    ]
    rows = [make_row(vocab_size, seed, top_p=top_p) for seed in range(6)]
    monkeypatch.setattr(sampler, "load_native", lambda: None)
    expected = [one.token_id for one in sample(logits, rows)]
    for isa in ISAS:
        found = sample_rows(native, logits, range(6), [sampler.draw_options(row) for row in rows], isa)
        assert [token_id for token_id, _ in found] == expected


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab_size", [1, 63, 64, 1030, 40_000])
@pytest.mark.parametrize(("seed", "position"), [(0, 0), (2**64 - 1, 2**32 - 1), (123456789123456789, 4711)], ids=str)
def test_noise_has_the_bits_of_the_reference(isa, vocab_size, seed, position):
    noise = torch.full((vocab_size + 1,), math.nan)
    native.sampling_noise(seed, position, vocab_size, noise.data_ptr(), isa)
    expected = gumbel_noise([seed], [position], vocab_size)[0]
    assert torch.equal(noise[:-1].view(torch.int32), expected.view(torch.int32))
    assert noise[-1].isnan()


@pytest.mark.parametrize("isa", ISAS)
def test_noise_of_words_has_the_bits_of_the_reference_at_the_edges(isa):
    edges = [word + step for word in (0, 2**8, 2**23, 2**24, 2**31, 2**32 - 2**8, 1257966797) for step in range(-9, 10)]
    edges += [2**power - 1 for power in range(33)] + [2**32 - 2**power for power in range(33)]
    words = torch.tensor(edges) & 0xFFFFFFFF
    words = torch.cat((words, torch.randint(0, 2**32, (100_000,), generator=generator(2))))
    words = words[: len(words) // 16 * 16]
    packed, noise = words.to(torch.int32), torch.full((len(words),), math.nan)
    native.noise_of_words(packed.data_ptr(), len(words), noise.data_ptr(), isa)
    assert torch.equal(noise.view(torch.int32), gumbel_from_words(words).view(torch.int32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab_size", SIZES)
def test_greedy_takes_the_lowest_id_of_ties(isa, vocab_size):
    for first in range(0, vocab_size, max(1, vocab_size // 9)):
        logits = torch.full((1, vocab_size), -3.0)
        logits[0, first:] = -0.5
        logits[0, vocab_size - 1] = -0.5
        assert sample_rows(native, logits, [0], [options(is_greedy=True)], isa) == [(first, SampleStatus.FINE)]
    zeros = torch.zeros(1, vocab_size)
    zeros[0, 0] = -0.0
    assert sample_rows(native, zeros, [0], [options(is_greedy=True)], isa)[0][0] == 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_tokens_do_not_depend_on_threads_or_other_rows(monkeypatch, isa, num_threads):
    logits = torch.randn(11, 3001, generator=generator(8)) * 2
    each = [options(seed=seed, top_k=[0, 20][seed % 2], top_p=[1.0, 0.9, 0.5][seed % 3]) for seed in range(11)]
    alone = [sample_rows(native, logits, [row], [each[row]], "portable")[0] for row in range(11)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    assert sample_rows(native, logits, range(11), each, isa) == alone
    order = list(reversed(range(11)))
    assert sample_rows(native, logits, order, [each[row] for row in order], isa) == alone[::-1]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("is_greedy", [True, False])
@pytest.mark.parametrize("vocab_size", [1, 17, 64, 301])
def test_unusable_logits_are_refused_wherever_they_stand(isa, is_greedy, vocab_size):
    option = options(is_greedy=is_greedy, top_p=0.9)
    for at in range(0, vocab_size, 7):
        for value, status in [(math.nan, SampleStatus.NAN), (math.inf, SampleStatus.INFINITE)]:
            logits = torch.randn(1, vocab_size, generator=generator(at))
            logits[0, at] = value
            assert sample_rows(native, logits, [0], [option], isa) == [(-1, status)]
            logits[0, -1] = math.nan  # outranks +inf
            assert sample_rows(native, logits, [0], [option], isa) == [(-1, SampleStatus.NAN)]
    nothing = torch.full((1, vocab_size), NEVER)
    assert sample_rows(native, nothing, [0], [option], isa) == [(-1, SampleStatus.NOTHING)]
    for value, status in [(3e38, SampleStatus.OVERFLOW), (-3e38, SampleStatus.UNDERFLOW)]:
        logits = torch.full((1, vocab_size), value)
        expected = (0, SampleStatus.FINE) if is_greedy else (-1, status)
        found = sample_rows(native, logits, [0], [options(is_greedy=is_greedy, inverse_temperature=10.0)], isa)
        assert found == [expected]


@pytest.mark.parametrize("isa", ISAS)
def test_only_the_row_is_read_and_nothing_written(isa):
    padded = torch.full((5, 200), math.nan)
    for width in (1, 15, 16, 64, 65, 150):
        logits = padded[:, 3 : 3 + width]
        logits.copy_(torch.randn(5, width, generator=generator(width)))
        before = padded.clone()
        fields = [{"top_k": 3}, {"top_p": 0.7}, {"log_min_p": -1.0}, {"is_greedy": True}, {}]
        each = [options(**field) for field in fields]
        found = sample_rows(native, logits, range(5), each, isa)
        assert found == sample_rows(native, logits.clone(), range(5), each, isa)
        assert logprobs_of_rows(native, logits, [0] * 5, 1, isa)[0][0][2]
        assert torch.equal(padded.view(torch.int32), before.view(torch.int32))
        logits.fill_(math.nan)


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", ["normal", "ties", "masked", "denormal", "deep", "shifted", "equal"])
@pytest.mark.parametrize("vocab_size", [1, 16, 65, 3001])
def test_log_probabilities_equal_a_plain_computation(isa, shape, vocab_size):
    logits = SHAPES[shape](torch.randn(4, vocab_size, generator=generator(3)))
    exact = logits.double()
    # f32 rounding of the distance from the best (half an ulp of up to 256) and of the sum (1e-6 of the mass).
    budget = {"abs": 2e-5, "rel": 1e-6}
    token_ids = [0, vocab_size - 1, vocab_size // 2, vocab_size // 3]
    for num_top in {0, 1, min(20, vocab_size), vocab_size}:
        found, top_ids, top_values = logprobs_of_rows(native, logits, token_ids, num_top, isa)
        for row, (logprob, rank, is_finite) in enumerate(found):
            values = exact[row].log_softmax(0).tolist()
            assert is_finite
            assert logprob == pytest.approx(values[token_ids[row]], **budget)
            assert rank == 1 + int((exact[row] > exact[row, token_ids[row]]).sum())
            best = exact[row].sort(descending=True, stable=True).indices[:num_top].tolist()
            assert top_ids[row].tolist() == best
            assert top_values[row].tolist() == pytest.approx([values[i] for i in best], **budget)
        assert torch.equal(top_values, logprobs_of_rows(native, logits, token_ids, num_top, "portable")[2])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_log_probabilities_of_unusable_logits_are_marked(isa, value):
    logits = torch.zeros(2, 100)
    logits[1, 99] = value
    assert [is_finite for _, _, is_finite in logprobs_of_rows(native, logits, [0, 0], 3, isa)[0]] == [True, False]


def test_logits_that_the_kernel_cannot_read_are_an_internal_error():
    good = torch.zeros(2, 8)
    for logits in (good.to(torch.bfloat16), good.t(), good[0], torch.zeros(2, 0)):
        with pytest.raises(InvariantError, match="the native sampler takes"):
            sample_rows(native, logits, [0], [options()])
    with pytest.raises(InvariantError, match="the native sampler takes"):
        sample_rows(native, good, [2], [options()])
    with pytest.raises(InvariantError, match="outside a vocabulary of 8"):
        logprobs_of_rows(native, good, [0, 8], 1)
    with pytest.raises(ValueError, match="instruction set"):
        sample_rows(native, good, [0], [options()], "sse9")
