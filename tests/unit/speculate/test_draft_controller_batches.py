"""The draft controller with batches whose proposer has to catch up, and whose number of sequences changes."""

import random
from statistics import median

import pytest

from quire.speculate.acceptance import RECENT_FADING, AcceptanceRecord
from quire.speculate.draft_controller import DraftController
from quire.speculate.step_costs import StepCosts

NUM_MAX = 4


class Batch:
    """Sequences of `length` tokens that begin together. A step of n sequences and d drafts takes 1 + 0.05 n + each * d, and
    `behind` more for each token that the proposer did not compute while nothing was drafted, the prompt's among them."""

    def __init__(self, seed, share, each, behind=0.0, num_sequences=16, length=192, prompt=100):
        self.rng, self.share, self.each, self.behind = random.Random(seed), share, each, behind
        self.num_sequences, self.length, self.prompt = num_sequences, length, prompt
        self.controller = DraftController(NUM_MAX)

    def plain(self, num_sequences):
        return 1 + 0.05 * num_sequences

    def live(self, num_batches):
        """Return the time that plain steps would have taken, and what was taken."""
        wanted = taken = 0.0
        for _ in range(num_batches):
            wanted += self.length * self.plain(self.num_sequences)
            taken += self.run()
        return wanted, taken

    def run(self):
        left = [self.length] * self.num_sequences
        behind, counts = [self.prompt] * self.num_sequences, [0] * self.num_sequences
        records = [AcceptanceRecord(NUM_MAX, RECENT_FADING) for _ in left]
        self.controller.note_start()
        taken = 0.0
        while left:
            size, num_drafts, caught_up = len(left), sum(counts), 0
            for index, count in enumerate(counts):
                gained = 1
                if count:
                    caught_up += behind[index] if behind[index] > 1 else 0
                    behind[index] = 0
                    accepted = next((depth for depth in range(count) if self.rng.random() >= self.share), count)
                    self.controller.note_verified(records[index], count, range(accepted))
                    gained += accepted
                left[index] -= gained
                behind[index] += 1
            duration = (self.plain(size) + self.each * num_drafts + self.behind * caught_up) * self.rng.lognormvariate(0, 0.05)
            taken += duration
            chosen = [0] * size
            if not self.controller.is_disabled:
                chosen = self.controller.choose([(record, NUM_MAX) for record in records])
            self.controller.note_step(size, num_drafts, duration, caught_up)
            going = [index for index, count in enumerate(left) if count > 0]
            left, behind, counts = [left[i] for i in going], [behind[i] for i in going], [chosen[i] for i in going]
            records = [records[i] for i in going]
        return taken


@pytest.mark.one_in(2)
@pytest.mark.parametrize("each", [0.1, 0.125])
def test_a_batch_loses_little_where_a_proposer_gains_what_it_takes_and_catching_up_is_dear(each):
    rates = []
    for seed in range(5):
        batch = Batch(seed, share=0.8, each=each, behind=0.015)
        batch.live(8)
        wanted, taken = batch.live(40)
        rates.append(wanted / taken)
    assert min(rates) > 0.95
    assert median(rates) > 0.97


def test_a_batch_pays_for_catching_up_where_drafts_gain_more():
    batch = Batch(0, share=0.9, each=0.03, behind=0.005)
    batch.live(10)
    wanted, taken = batch.live(30)
    assert wanted / taken > 1.5


def test_a_ratio_is_that_of_steps_measured_after_plain_ones():
    rng, costs = random.Random(2), StepCosts()
    for _ in range(8):
        costs.note_plain(8, rng.uniform(0.97, 1.03))
    for count in (8, 16, 32) * 10:
        costs.note(8, count, (1.0 + 0.05 * count) * rng.uniform(0.97, 1.03), measures=True)
    for speed in (1.0, 2.0):  # all steps get slower alike, and the ratio stays
        for _ in range(60):
            costs.note(8, 16, speed * 1.8, measures=False)
        assert costs.ratio(8, 16) == pytest.approx(1.8, rel=0.05)
        assert costs.ratio(8, 24) == pytest.approx(2.2, rel=0.05)
        assert costs.plain_s(8) == pytest.approx(speed, rel=0.05)


def test_catching_up_is_no_part_of_what_a_step_with_drafts_takes():
    controller, record = DraftController(NUM_MAX), AcceptanceRecord(NUM_MAX, RECENT_FADING)
    drafts = behind = 0
    for _ in range(400):
        caught_up = behind if drafts else 0
        behind = 0 if drafts else behind + 1
        if drafts:
            controller.note_verified(record, drafts, range(drafts))
        chosen = 0 if controller.is_disabled else controller.choose([(record, NUM_MAX)])[0]
        controller.note_step(1, drafts, 1.0 + 0.1 * drafts + 0.5 * caught_up, caught_up if caught_up > 1 else 0)
        drafts = chosen
    assert controller.costs.ratio(1, NUM_MAX) == pytest.approx(1.4, rel=0.02)
