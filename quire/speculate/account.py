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


@dataclass(slots=True)
class Account:
    """The balance of what drafts gain beside plain decoding, in times of a step without any, and a fiftieth of the time.

    Drafts go on while it is positive. Then they sleep until a trial has been earned again, longer after each that failed.
    Hence drafts lose in any time T at most TRIAL + MOST + SHARE * T and what one step loses, or those that are told at once
    (pooled_pace.py), however they fare, as long as steps are told rightly; and when they gain, bad luck rarely ends them: a
    walk that drifts upwards seldom falls by MOST.

    trial, most  in place of TRIAL and MOST
    """

    trial: float = TRIAL
    most: float = MOST
    balance: float = field(init=False)
    sleep_left: int = 0
    num_failures: int = 0
    has_proven: bool = False

    def __post_init__(self) -> None:
        self.balance = self.trial

    def earn(self, gained: float, took: float) -> bool:
        """Take in a step with drafts, or with a look for some; return whether they end for now.

        gained  tokens of a sequence
        took    its time in plain steps
        """
        self.balance += gained - took + SHARE * took
        if self.balance >= self.most:
            self.balance, self.has_proven = self.most, True
        if self.balance > 0 or self.sleep_left > 0:
            return False
        self.num_failures = 0 if self.has_proven else min(_MAX_FAILURES, self.num_failures + 1)
        self.has_proven = False
        missing = (self.trial - self.balance) * (1 << max(0, self.num_failures - 1))
        self.sleep_left = min(_LONGEST_SLEEP, round(missing / SHARE))
        self.balance = self.trial
        return True

    def sleep(self, num_steps: int = 1) -> None:
        """Take in steps that were slept through."""
        self.sleep_left = max(0, self.sleep_left - num_steps)


def account_for(num_sequences: int) -> Account:
    """Return a new account of all steps in which so many sequences decode."""
    return Account(most=_MOST_OF_ONE) if num_sequences == 1 else Account()


def lone_account() -> Account:
    """Return a new account of one sequence that decodes alone, beside that of all."""
    return Account(_LONE_TRIAL, _LONE_MOST)
