"""Read-backs of several steps at a time."""

import torch

from quire.worker.device.staging import NUM_READBACKS, Part, Readback, Staging


def test_what_a_step_read_back_stays_when_the_next_one_writes_the_same_tensor():
    source = torch.zeros(5, dtype=torch.int64)
    readback = Readback(source)
    places = []
    for step in range(NUM_READBACKS):
        source.fill_(step)
        places.append(readback.start(3))
    source.fill_(-1)
    assert [readback.wait(place, 3).tolist() for place in places] == [[step] * 3 for step in range(NUM_READBACKS)]


def test_nothing_is_copied_when_a_step_has_no_tokens():
    source = torch.ones(4, dtype=torch.int64)
    readback = Readback(source)
    assert readback.wait(readback.start(0), 0).tolist() == []


def test_what_is_sent_is_what_the_buffer_held_when_steps_wait_for_another_stage():
    staging = Staging(64, torch.device("cpu"), num_steps=3)
    staged = staging.arrange([Part("rows", torch.int64, 4)])
    for step in range(4):
        staging.wait()
        staged.host["rows"][:] = step
        staging.send(staged.end)
        assert staged.device["rows"].tolist() == [step] * 4
