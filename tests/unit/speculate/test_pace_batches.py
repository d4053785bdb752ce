"""The pace of batches whose proposer has to catch up, whose number of sequences changes, and whose times were misjudged."""

import random
from statistics import median

import pytest

from quire.speculate.account import SHARE, TRIAL, Account
from quire.speculate.draft_cost import DraftCost
from quire.speculate.pooled_pace import PooledPace as Pace
from quire.speculate.records import RECENT_FADING, AcceptanceRecord
from quire.speculate.step_costs import StepCosts

NUM_MAX = 4


class Batch:
    """Sequences of `length` tokens that begin together. A step of n sequences and d drafts takes 1 + 0.05 n + each * d, and
    `behind` more for each token that the proposer did not compute while nothing was drafted, the prompt's among them."""

    def __init__(self, seed, share, each, behind=0.0, num_sequences=16, length=192, prompt=100):
        self.rng, self.share, self.each, self.behind = random.Random(seed), share, each, behind
        self.num_sequences, self.length, self.prompt = num_sequences, length, prompt
        self.pace = Pace(NUM_MAX)

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
        self.pace.note_start()
        taken = 0.0
        while left:
            size, num_drafts, caught_up = len(left), sum(counts), 0
            for index, count in enumerate(counts):
                gained = 1
                if count:
                    caught_up += behind[index] if behind[index] > 1 else 0
                    behind[index] = 0
                    accepted = next((depth for depth in range(count) if self.rng.random() >= self.share), count)
                    self.pace.note_verified(records[index], count, range(accepted))
                    gained += accepted
                left[index] -= gained
                behind[index] += 1
            duration = (self.plain(size) + self.each * num_drafts + self.behind * caught_up) * self.rng.lognormvariate(0, 0.05)
            taken += duration
            chosen = [0] * size
            if not self.pace.is_asleep:
                chosen = self.pace.choose([(record, NUM_MAX) for record in records])
            if caught_up:
                self.pace.note_catch_up(caught_up)
            self.pace.note_step(size, num_drafts, duration)
            going = [index for index, count in enumerate(left) if count > 0]
            left, behind, counts = [left[i] for i in going], [behind[i] for i in going], [chosen[i] for i in going]
            records = [records[i] for i in going]
        return taken


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


def test_what_drafts_gain_pays_what_is_owed_before_it_counts():
    account = Account()
    account.owe(20.0)
    for _ in range(7):
        assert not account.earn(gained=4.0, took=1.5)
    assert account.balance == TRIAL
    assert account.debt == pytest.approx(20.0 - 7 * (2.5 + SHARE * 1.5))
    account.earn(gained=4.0, took=1.5)
    assert account.debt == 0.0
    assert account.balance > TRIAL


def test_drafts_end_when_what_is_owed_grows_though_each_step_gains_a_little():
    account = Account()
    for step in range(2000):
        if step % 100 == 0:
            account.owe(20.0)
        if account.earn(gained=1.1, took=1.0):
            break
    assert 200 < step < 1000
    assert account.sleep_left > 32 / SHARE


def test_a_first_trial_may_cost_whatever_is_to_be_caught_up_with_but_its_failure_is_slept_for():
    account = Account()
    account.owe(200.0)
    num_steps = 1
    while not account.earn(gained=1.0, took=2.0):
        num_steps += 1
    assert num_steps == pytest.approx(TRIAL, abs=2)
    assert account.sleep_left == pytest.approx((TRIAL + 200.0) / SHARE, rel=0.1)


def test_what_many_drafts_take_is_not_forgotten_while_few_are_drafted():
    rng, cost = random.Random(0), DraftCost(16)
    for _ in range(20):
        cost.note(50, 4.2 * rng.uniform(0.95, 1.05))
    for _ in range(400):
        cost.note(rng.choice((5, 6, 7)), rng.uniform(1.2, 1.5))
    assert cost.ratio(50) == pytest.approx(4.2, rel=0.03)
    assert cost.ratio(6) == pytest.approx(1.35, rel=0.05)


def test_more_drafts_never_seem_cheaper():
    rng, cost = random.Random(1), DraftCost(8)
    for _ in range(300):
        cost.note(rng.randrange(1, 40), rng.uniform(1.0, 3.0))
    ratios = [cost.ratio(count) for count in range(60)]
    assert ratios[0] == 1.0
    assert ratios == sorted(ratios)


def note(costs, num_sequences, num_drafts, duration_s, times=1):
    for _ in range(times):
        kind = costs.kind(num_sequences, num_drafts, num_drafts, looks=False)
        costs.note(num_sequences, num_drafts, kind, duration_s, num_equal=2)


def test_a_number_of_sequences_that_never_had_drafts_is_measured_where_it_is_met():
    costs = StepCosts(NUM_MAX)
    note(costs, 8, 0, 1.0, times=8)
    note(costs, 16, 0, 2.0, times=8)
    note(costs, 16, 32, 5.0, times=100)
    note(costs, 8, 30, 3.0, times=8)
    assert costs.ratio(8, [])(30) == pytest.approx(3.0, rel=0.05)
    assert costs.plain_s(8) == pytest.approx(1.0, rel=0.05)


def test_plain_steps_tell_how_far_what_was_believed_of_them_had_gone_astray():
    costs = StepCosts(NUM_MAX)
    note(costs, 16, 0, 1.0, times=8)
    note(costs, 16, 8, 1.2, times=12)
    note(costs, 16, 8, 1.5, times=200)  # what drafts take has changed, and it seems that the machine has
    assert costs.plain_s(16) == pytest.approx(1.25, rel=0.02)
    note(costs, 16, 0, 1.0, times=6)
    assert costs.pin() == pytest.approx(1.0 / 1.25, rel=0.02)
    assert costs.plain_s(16) == pytest.approx(1.0, rel=0.02)
    assert costs.pin() is None


def test_too_few_plain_steps_tell_nothing():
    costs = StepCosts(NUM_MAX)
    note(costs, 16, 0, 1.0, times=8)
    note(costs, 16, 8, 1.2, times=12)
    note(costs, 16, 0, 2.0, times=3)
    assert costs.pin() is None


def test_a_balance_that_was_believed_too_high_falls_and_never_rises():
    account = Account()
    account.fall_to(3.0)
    account.fall_to(20.0)
    assert account.balance == 3.0
    account.fall_to(-5.0)
    assert account.earn(gained=1.0, took=1.0)
    assert account.sleep_left > 0
