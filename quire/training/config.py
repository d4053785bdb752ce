"""DraftTraining: options of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire.base.errors import ConfigError
from quire.base.threads import check_num_threads

Kind = Literal["eagle3", "medusa", "mtp"]
KINDS: tuple[Kind, ...] = ("eagle3", "medusa", "mtp")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTraining:
    """Options of a training run. Raises ConfigError.

    model             the target model: a folder, a hub id or the name of a bundled model
    text              a text file, or a folder whose .txt and .md files are used, including subfolders
    out               folder to write the head to; the state for resuming is in its subfolder `training`
    minutes           of training, in total over all resumed runs; generating the text is not included
    sequence_tokens   tokens of a training sequence
    prompt_tokens     tokens of text at the start of a sequence; the model generates the rest; sequence_tokens: all of it is
                      text
    num_sequences     maximum number of sequences; they are used repeatedly
    sampled_share     share of the sequences that the model samples at temperature 0.8; the others are greedy
    batch_tokens      tokens of a training step
    num_steps_ahead   tokens ahead that are learned: steps of an unrolled eagle3 or mtp head, heads of medusa
    draft_vocab_size  number of the most frequent tokens, to which drafts of eagle3 and medusa are limited; None: at most 32000
    aux_hidden_state_layers        eagle3: ascending layers whose inputs are read; None: 2, n // 2, n - 3
    learning_rate     of the matrices, for which the Muon optimiser is used; others get a quarter
    start_from        a head of the same kind and shapes to train further, with its own tokens; None: fresh weights
    """

    kind: Kind
    model: str
    text: Path
    out: Path
    minutes: float = 60.0
    sequence_tokens: int = 256
    prompt_tokens: int = 96
    num_sequences: int = 10_000
    sampled_share: float = 0.25
    batch_tokens: int = 4096
    num_steps_ahead: int = 4
    draft_vocab_size: int | None = None
    aux_hidden_state_layers: tuple[int, ...] | None = None
    learning_rate: float = 2e-3
    start_from: str | None = None
    num_threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        for name, low in (("sequence_tokens", 32), ("prompt_tokens", 1), ("num_sequences", 8), ("num_steps_ahead", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}")
        check_num_threads("num_threads", self.num_threads)
        if self.prompt_tokens > self.sequence_tokens:
            raise ConfigError(
                f"prompt_tokens must be at most sequence_tokens, {self.sequence_tokens}, got {self.prompt_tokens}"
            )
        if self.batch_tokens < self.sequence_tokens:
            raise ConfigError(f"batch_tokens must be at least sequence_tokens, {self.sequence_tokens}, got {self.batch_tokens}")
        if self.num_steps_ahead >= self.sequence_tokens // 2:
            raise ConfigError(f"num_steps_ahead must be below half of sequence_tokens, got {self.num_steps_ahead}")
        if self.minutes <= 0 or self.learning_rate <= 0 or not 0 <= self.sampled_share <= 1:
            raise ConfigError("minutes and learning_rate must be above 0, sampled_share from 0 to 1")
        if self.start_from is not None and self.draft_vocab_size is not None:
            raise ConfigError("draft_vocab_size cannot be set with start_from: the draft vocabulary is that of the head")
        layers = self.aux_hidden_state_layers
        if layers is not None and self.kind != "eagle3":
            raise ConfigError(f"aux_hidden_state_layers are only for kind eagle3, got {list(layers)} with kind {self.kind}")
        if layers is not None and (len(layers) != 3 or list(layers) != sorted(set(layers))):
            raise ConfigError(f"aux_hidden_state_layers must be three layers, low to high, got {layers}")
