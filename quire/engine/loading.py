"""Loads what an engine runs: the runner with the model, and the tokenizer."""

from __future__ import annotations

from quire.base.errors import RequestError
from quire.base.shared_reads import shared_reads
from quire.contracts.config import EngineConfig
from quire.contracts.memory import ModelReport
from quire.grammar.vocabulary import Vocabulary, read_vocabulary
from quire.text.tokenizer import Tokenizer, load_tokenizer
from quire.worker.build import build_runner
from quire.worker.inspect import inspect_model
from quire.worker.step_driver import EngineRunner


def load_runner_and_tokenizer(config: EngineConfig) -> tuple[EngineRunner, ModelReport, Tokenizer | None]:
    """Load the model and its tokenizer; None: the config asks for no tokenizer, or the model has none.

    Raises ConfigError, ModelFormatError or UnsupportedError when they cannot be loaded as configured.
    """
    with shared_reads():
        # A tokenizer or chat template that the config names may be invalid: it is read before the weights, which take long.
        has_own = (config.tokenizer or config.chat_template) is not None and not config.skip_tokenizer_init
        template = config.chat_template
        tokenizer = load_tokenizer(inspect_model(config).tokenizer_folder, template) if has_own else None
        runner, report = build_runner(config)
        try:
            if tokenizer is None and not config.skip_tokenizer_init:
                tokenizer = load_tokenizer(report.tokenizer_folder, template)
        except BaseException:
            # Its threads would keep running while the process ends.
            runner.close()
            raise
    return runner, report, tokenizer


def vocabulary_of(tokenizer: Tokenizer | None, vocab_size: int) -> Vocabulary:
    """Return the vocabulary for grammars. Raises RequestError if there is no tokenizer."""
    if tokenizer is None:
        raise RequestError("constraints on outputs need a tokenizer, and the model has none", "structured_outputs")
    return read_vocabulary(tokenizer, vocab_size)
