"""Recurrent mixers: runs that are cut anywhere give what whole ones give, and states are kept where they are asked for."""

import pytest
import torch

from quire.kernels.reference.recurrent import StateRows, causal_conv, gated_delta_inputs, recur

LENGTHS = (9, 1, 5)


def starts_of(lengths):
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def convolve(inputs, pool, starts, rows):
    return causal_conv(inputs["x"], inputs["weight"], inputs["bias"], pool, starts, rows)


def apply_delta(inputs, pool, starts, rows):
    qkv = (inputs["q"], inputs["k"], inputs["v"])
    return recur(gated_delta_inputs(qkv, inputs["decay"], inputs["beta"]), pool, starts, rows)


def conv_inputs(num_tokens):
    return {"x": torch.randn(num_tokens, 6)}, {"weight": torch.randn(6, 4), "bias": torch.randn(6)}, (6, 3), convolve


def delta_inputs(num_tokens):
    tokens = {"q": torch.randn(num_tokens, 2, 5), "k": torch.randn(num_tokens, 2, 5), "v": torch.randn(num_tokens, 4, 3)}
    tokens |= {"decay": -torch.rand(num_tokens, 4), "beta": torch.rand(num_tokens, 4)}
    return tokens, {}, (4, 5, 3), apply_delta


@pytest.mark.parametrize("make", [conv_inputs, delta_inputs])
def test_run_that_is_cut_gives_what_a_whole_one_gives(make):
    torch.manual_seed(0)
    num_tokens, starts = sum(LENGTHS), starts_of(LENGTHS)
    tokens, others, shape, run = make(num_tokens)
    whole_pool = torch.full((9, *shape), torch.nan)
    # The first sequence keeps its state after 4 tokens and at its end.
    whole = run(tokens | others, whole_pool, starts, StateRows([-1, -1, -1], [[(4, 0), (9, 1)], [(1, 2)], []]))
    pool = torch.full((9, *shape), torch.nan)
    first = {name: torch.cat((part[:4], part[10:12])) for name, part in tokens.items()}
    begun = run(first | others, pool, [0, 4, 6], StateRows([-1, -1], [[(4, 3)], [(0, 5), (2, 4)]]))
    second = {name: torch.cat((part[4:9], part[12:15])) for name, part in tokens.items()}
    rest = run(second | others, pool, [0, 5, 8], StateRows([3, 4], [[(5, 3)], []]))  # a row may be read and written
    torch.testing.assert_close(torch.cat((begun[:4], rest[:5])), whole[:9])
    torch.testing.assert_close(torch.cat((begun[4:], rest[5:])), whole[10:])
    torch.testing.assert_close(pool[3], whole_pool[1])
    assert (pool[5] == 0).all()
    assert whole_pool[:3].isfinite().all()
    assert whole_pool[3:].isnan().all()


def test_delta_rule_is_the_recurrence():
    torch.manual_seed(1)
    tokens, _, shape, run = delta_inputs(6)
    found = run(tokens, torch.empty(0, *shape), [0, 6], StateRows.none(1))
    state = torch.zeros(4, 5, 3)
    for index in range(6):
        q, k = (torch.nn.functional.normalize(tokens[name][index], dim=-1).repeat_interleave(2, 0) for name in "qk")
        state = tokens["decay"][index].exp()[:, None, None] * state
        wrong = tokens["v"][index] - (state * k[:, :, None]).sum(1)
        state = state + k[:, :, None] * (tokens["beta"][index][:, None] * wrong)[:, None]
        torch.testing.assert_close(found[index], (state * q[:, :, None]).sum(1) * 5**-0.5, atol=1e-5, rtol=1e-4)
