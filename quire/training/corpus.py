"""The training sequences: text, or prompts from it that the model itself continues."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from quire.base.errors import ConfigError
from quire.base.logging import get_logger
from quire.contracts.sampling_params import SamplingParams
from quire.engine.llm import LLM
from quire.text.tokenizer import Tokenizer
from quire.training.config import DraftTraining

logger = get_logger(__name__)

_BATCH_SEQUENCES = 64
_MAX_PIECE_CHARACTERS = 1 << 20


def read_sequences(options: DraftTraining, folder: Path, show_progress: bool) -> NDArray[np.int32]:
    """Return the training sequences [N, sequence_tokens], created at the first call and cached in `folder`.

    Raises ConfigError if the text is too short.
    """
    file = folder / f"sequences-{_fingerprint(options)}.npy"
    if not file.is_file():
        made = _make_sequences(options, show_progress)
        with (folder / "sequences.tmp").open("wb") as stream:
            np.save(stream, made)
        (folder / "sequences.tmp").replace(file)
    return np.load(file, mmap_mode="r")


def _fingerprint(options: DraftTraining) -> str:
    parts = (
        *(_digest(file) for file in _text_files(options.text)),
        *(options.model, options.text.resolve(), options.sequence_tokens, options.prompt_tokens, options.num_sequences),
        *(options.sampled_share, options.seed),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _make_sequences(options: DraftTraining, show_progress: bool) -> NDArray[np.int32]:
    llm = LLM(options.model, num_threads=options.num_threads, max_num_seqs=_BATCH_SEQUENCES, enable_prefix_caching=False)
    stream = _tokenize(options.text, llm.get_tokenizer(), show_progress)
    length = options.prompt_tokens
    num_windows = len(stream) // length
    if num_windows < 8:
        raise ConfigError(f"{options.text} holds {len(stream)} tokens, too few for 8 sequences of {length}; give more text")
    generator = np.random.default_rng(options.seed)
    chosen = generator.permutation(num_windows)[: options.num_sequences]
    prompts = np.stack([stream[window * length : (window + 1) * length] for window in chosen])
    try:
        return prompts if length == options.sequence_tokens else _continue(llm, prompts, options, show_progress)
    finally:
        llm.close()


def _text_files(text: Path) -> list[Path]:
    files = sorted(p for p in text.rglob("*") if p.suffix in (".txt", ".md")) if text.is_dir() else [text]
    if not files:
        raise ConfigError(f"{text} holds no .txt or .md file; give a text file or a folder of them")
    return files


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error})") from error


def _tokenize(text: Path, tokenizer: Tokenizer, show_progress: bool) -> NDArray[np.int32]:
    files = _text_files(text)
    found: list[NDArray[np.int32]] = []
    for file in tqdm(files, "reading text", disable=not show_progress):
        try:
            content = file.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{file} cannot be read as UTF-8 text ({error})") from error
        for begin in range(0, len(content), _MAX_PIECE_CHARACTERS):
            ids = tokenizer.encode(content[begin : begin + _MAX_PIECE_CHARACTERS], add_special_tokens=False)
            found.append(np.array(ids, dtype=np.int32))
    return np.concatenate(found)


def _continue(llm: LLM, prompts: NDArray[np.int32], options: DraftTraining, show_progress: bool) -> NDArray[np.int32]:
    """Return the prompts with the model's continuations."""
    out = np.empty((len(prompts), options.sequence_tokens), dtype=np.int32)
    out[:, : options.prompt_tokens] = prompts
    num_sampled = round(options.sampled_share * _BATCH_SEQUENCES)
    for begin in tqdm(range(0, len(prompts), _BATCH_SEQUENCES), "the model writes", disable=not show_progress):
        part = prompts[begin : begin + _BATCH_SEQUENCES]
        params = [
            SamplingParams(
                temperature=0.8 if index < num_sampled else 0.0,
                seed=options.seed + begin + index,
                max_tokens=options.sequence_tokens - options.prompt_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            for index in range(len(part))
        ]
        answers = llm.generate([{"prompt_token_ids": prompt.tolist()} for prompt in part], params, use_tqdm=False)
        out[begin : begin + len(part), options.prompt_tokens :] = [answer.outputs[0].token_ids for answer in answers]
    return out
