"""Account: whether drafts go on, by what they have gained and lost so far."""

from __future__ import annotations

from dataclasses import dataclass, field

SHARE = 0.02
"""Of the time, that may be lost by trying."""
TRIAL = 16.0
"""What a trial may lose, in plain steps."""
MOST = 32.0
"""Balance at most: what was gained long ago pays for no more than this."""
_MOST_OF_ONE, _LONE_TRIAL, _LONE_MOST = 48.0, 20.0, 28.0
"""The same for single sequences, one after the other; and for one of them, whose loss others make good."""
_MAX_FAILURES, _LONGEST_SLEEP = 3, 4096
_MOST_DEBT, _STEPS_TO_INVEST, _LONGEST_ATONEMENT = 32.0, 48, 1 << 15
"""Debt with which drafts end, beyond that of so many first steps: what is caught up with then cannot be known not to pay. And
the steps that are slept at most for debt."""


@dataclass(slots=True)
class Account:
    """The balance of what drafts gain beside plain decoding, in times of a step without any, and a fiftieth of the time.

    Drafts go on while it is positive. Then they sleep until a trial has been earned again, longer after each that failed.
    Hence drafts lose in any time T at most TRIAL + MOST + SHARE * T and what one step loses, or those that are told at once
    (pooled_pace.py), however they fare, as long as steps are told rightly; and when they gain, bad luck rarely ends them: a
    walk that drifts upwards seldom falls by MOST.

    What a proposer has to catch up with before it can draft, the prompt or what was slept through, is a debt. What drafts gain
    pays it first; where it grows nevertheless they end, and sleep the longer.

    trial, most  in place of TRIAL and MOST
    """

    trial: float = TRIAL
    most: float = MOST
    balance: float = field(init=False)
    sleep_left: int = 0
    num_failures: int = 0
    has_proven: bool = False
    debt: float = 0.0
    _invested: float = 0.0  # of the debt, that of the first steps
    _steps_to_invest: int = _STEPS_TO_INVEST

    def __post_init__(self) -> None:
        self.balance = self.trial

    def owe(self, took: float) -> None:
        """Take in how many plain steps a proposer took to catch up."""
        self.debt += took
        if self._steps_to_invest > 0:
            self._invested += took

    def earn(self, gained: float, took: float, num_steps: int = 1) -> bool:
        """Take in a step with drafts, or with a look for some, or several; return whether they end for now.

        gained  tokens of a sequence
        took    its time in plain steps
        """
        self.balance += gained - took + SHARE * took
        self._steps_to_invest = max(0, self._steps_to_invest - num_steps)
        if self.debt > 0 and self.balance > self.trial:
            paid = min(self.debt, self.balance - self.trial)
            self.balance -= paid
            self.debt -= paid
            self._invested = min(self._invested, self.debt)
        if self.balance >= self.most:
            self.balance, self.has_proven = self.most, True
        if self.sleep_left > 0 or (self.balance > 0 and self.debt <= self._invested + _MOST_DEBT):
            return False
        self.num_failures = 0 if self.has_proven else min(_MAX_FAILURES, self.num_failures + 1)
        self.has_proven = False
        missing = (self.trial - self.balance) * (1 << max(0, self.num_failures - 1))
        self.sleep_left = min(_LONGEST_SLEEP, round(missing / SHARE)) + min(_LONGEST_ATONEMENT, round(self.debt / SHARE))
        self.balance, self.debt, self._invested, self._steps_to_invest = self.trial, 0.0, 0.0, _STEPS_TO_INVEST
        return True

    def fall_to(self, balance: float) -> None:
        """Take in that it is lower, if it is: drafts end with the next step if nothing is left."""
        self.balance = min(self.balance, balance)

    def sleep(self, num_steps: int = 1) -> None:
        """Take in steps that were slept through."""
        self.sleep_left = max(0, self.sleep_left - num_steps)


def account_for(num_sequences: int) -> Account:
    """Return a new account of all steps in which so many sequences decode."""
    return Account(most=_MOST_OF_ONE) if num_sequences == 1 else Account()


def lone_account() -> Account:
    """Return a new account of one sequence that decodes alone, beside that of all."""
    return Account(_LONE_TRIAL, _LONE_MOST)
