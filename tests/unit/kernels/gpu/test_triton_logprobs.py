"""Log probabilities and logits processors on the device are those of quire/sampling."""

import numpy as np
import pytest
import torch

from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.kernels.triton.launching import run_all
from quire.kernels.triton.logprobs import LOGPROB_WIDTH, MAX_TOP, logprob_launches
from quire.kernels.triton.processors import ProcessorOptions, ProcessorTables, count_launch, process_launch
from quire.sampling.logprobs import token_logprobs
from quire.sampling.processors import process_logits
from quire.sampling.row_state import SamplingRow
from quire.worker.device.row_processors import SlotProcessors
from tests.unit.kernels.gpu.conftest import draw

VOCAB = 5003


def logprobs_of(logits, token_ids, num_tops, device):
    out = torch.zeros(len(logits), LOGPROB_WIDTH, dtype=torch.int32, device=device)
    ids = torch.tensor(token_ids, device=device)
    run_all(logprob_launches(out, logits.to(device), ids, torch.tensor(num_tops, dtype=torch.int32, device=device)))
    return out.cpu().numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_log_probabilities_ranks_and_order_are_those_of_the_host(dtype, device):
    logits = 3 * draw(5, VOCAB, seed=2)
    logits[1] = logits[1].round()  # ties everywhere
    logits[2, 7:] = -torch.inf
    logits[3] = torch.where(torch.arange(VOCAB) % 2 == 0, 0.0, -0.0)
    logits = logits.to(dtype)
    token_ids, num_tops = [17, 4999, 3, 40, 5], [5, MAX_TOP, 20, 4, -1]
    found = logprobs_of(logits, token_ids, num_tops, device)
    for index, num_top in enumerate(num_tops[:-1]):
        expected = token_logprobs(logits[index : index + 1], token_ids[index : index + 1], num_top)[0]
        values = found[index].view(np.float32)
        assert found[index, 1] == expected.rank
        assert found[index, 2 : 2 + num_top].tolist() == [token_id for token_id, _ in expected.top]
        wanted = [expected.logprob, *(logprob for _, logprob in expected.top)]
        got = [values[0], *values[2 + MAX_TOP : 2 + MAX_TOP + num_top]]
        np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-6)
    assert not found[-1].any()


def test_a_small_vocabulary_is_listed_as_a_whole(device):
    logits = torch.tensor([[0.5, 2.0, -1.0]])
    found = logprobs_of(logits, [2], [3], device)
    assert found[0, 1:5].tolist() == [3, 1, 0, 2]


def test_tokens_of_the_vocabulary_are_listed_where_no_logit_is_a_number(device):
    logits = torch.full((1, 3), -1, dtype=torch.int32).view(torch.float32)
    assert sorted(logprobs_of(logits, [2], [3], device)[0, 2:5].tolist()) == [0, 1, 2]


PARAMS = [
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(frequency_penalty=0.4, presence_penalty=-0.3),
    SamplingParams(logit_bias={7: 2.5, 9: -1.25, 4000: 2.5}, repetition_penalty=0.8),
    SamplingParams(min_tokens=5, stop_token_ids=[11, 4000]),
    SamplingParams(min_tokens=3, stop_token_ids=[11], logit_bias={11: 100.0}),
    SamplingParams(allowed_token_ids=[3, 7, 9, 4999], presence_penalty=0.5, logit_bias={7: 1.0}),
    SamplingParams(),
]


def rows_and_tables(device, output):
    prompt = (7, 9, 9, 3000)
    rows = [
        SamplingRow(Request(request_id=str(index), prompt_token_ids=prompt, params=params, seed=0), 0, prompt + output, VOCAB)
        for index, params in enumerate(PARAMS)
    ]
    slots = [SlotProcessors.of(row) for row in rows]
    tables = ProcessorTables.zeros(len(rows) + 1, VOCAB, torch.device("cpu"))
    for index, slot in enumerate(slots):
        tables.words[index] = slot.fill
        tables.words[index, torch.from_numpy(slot.token_ids)] = torch.from_numpy(slot.words)
        tables.biases[index, : len(slot.biases)] = torch.from_numpy(slot.biases)
    columns = {
        "rows": torch.arange(len(rows), dtype=torch.int32),
        "is_processed": torch.tensor([row.edits_logits for row in rows], dtype=torch.int32),
        "positions": torch.tensor([row.position for row in rows]),
    }
    for name in ("repetitions", "inverse_repetitions", "frequencies", "presences"):
        columns[name] = torch.tensor([slot.columns[name] for slot in slots], dtype=torch.float32)
    columns["first_endings"] = torch.tensor([slot.columns["first_endings"] for slot in slots])
    options = ProcessorOptions(**{name: columns[name].to(device) for name in ProcessorOptions._fields})
    return rows, ProcessorTables(*(table.to(device) for table in tables)), options


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_processed_logits_have_the_bits_of_the_host_and_sampled_tokens_are_counted(dtype, device):
    rows, tables, options = rows_and_tables(device, (9, 4000, 9))
    logits = (2 * draw(len(rows), VOCAB, seed=3)).to(dtype)
    for token_id in (9, 11, -1):
        out = torch.empty(len(rows), VOCAB, device=device)
        process_launch(out, logits.to(device), tables, options).run()
        expected = logits.float()
        process_logits(expected, rows)
        assert torch.equal(out.cpu(), expected)
        count_launch(tables, torch.full((len(rows),), token_id, device=device), options).run()
        if token_id >= 0:
            for row in rows:
                row.append(token_id)
            options = options._replace(positions=options.positions + 1)
    penalised = slice(0, 3)  # the others need no counts
    assert torch.equal(tables.words[penalised].cpu(), rows_and_tables("cpu", (9, 4000, 9, 9, 11))[1].words[penalised])


def test_what_is_not_finite_stays_so_that_the_sampler_sees_it(device):
    rows, tables, options = rows_and_tables(device, ())
    logits = torch.zeros(len(rows), VOCAB)
    logits[5, 12], logits[5, 13] = torch.nan, torch.inf
    out = torch.empty(len(rows), VOCAB, device=device)
    process_launch(out, logits.to(device), tables, options).run()
    assert bool(out[5, 12].isnan())
    assert out[5, 13:15].tolist() == [float("inf"), float("-inf")]
