"""The training loop: resumable, and the same batches whenever it stops and goes on."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from quire.base.errors import ConfigError, ModelFormatError, UnsupportedError
from quire.base.logging import get_logger
from quire.contracts.speculative import MAX_SPECULATIVE_TOKENS
from quire.model.config_reader import read_model_spec
from quire.model.heads.build import check_head
from quire.model.heads.stored import HeadFolder
from quire.model.resolve import resolve_model
from quire.training.config import DraftTraining
from quire.training.corpus import read_sequences
from quire.training.heads import aux_hidden_state_layers, build_head
from quire.training.medusa_tree import choose_tree, measure_ranks, store_tree
from quire.training.start import StartingHead
from quire.training.target import Target
from quire.training.trainable import check_trainable

logger = get_logger(__name__)

_SAVE_S = 60.0
_WARM_UP_STEPS = 20
_DEFAULT_DRAFT_VOCAB = 32_000
_MAX_HELD_OUT = 64


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """What came of it.

    agreement  of each token ahead the share of held-out places where head and model agree on the most likely token
    """

    folder: Path
    num_parameters: int
    num_steps: int
    seconds: float
    agreement: list[float]


@dataclass(slots=True)
class _Progress:
    step: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list[float])
    origin: dict[str, object] = field(default_factory=dict[str, object])


def train_draft(options: DraftTraining, show_progress: bool = True) -> TrainedHead:
    """Train a head, or go on training it, and write it. Raises ConfigError or UnsupportedError."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    torch.manual_seed(options.seed)
    spec = read_model_spec(resolve_model(options.model))
    check_trainable(spec, options)
    start = None if options.start_from is None else StartingHead(options.start_from)
    work = options.out / "training"
    work.mkdir(parents=True, exist_ok=True)
    sequences = read_sequences(options, work, show_progress)
    held_out = sequences[-min(_MAX_HELD_OUT, len(sequences) // 8) :]
    sequences = sequences[: len(sequences) - len(held_out)]
    target = Target(options.model, options.sequence_tokens, aux_hidden_state_layers(options, len(spec.layers)))
    draft_ids = _draft_ids(options, sequences, target.spec.vocab_size) if start is None else start.draft_ids
    head = build_head(target, options, draft_ids or range(target.spec.vocab_size))
    _check_readable(options, head, target)
    if start is not None:
        start.load_into(head)
    optimizers = _make_optimizers(head, options)
    progress = _resume(work / "state.pt", head, optimizers, _origin(options, head))
    _run(
        options,
        head,
        target,
        sequences,
        optimizers,
        progress,
        tqdm(total=round(options.minutes * 60), disable=not show_progress),
    )
    trained = _write(options, head, progress, _agreement(head, target, held_out, options))
    if options.kind == "medusa":
        # Where nothing is the model's own, the text has to do.
        num_given = min(options.prompt_tokens, options.sequence_tokens // 2)
        store_tree(options.out, choose_tree(measure_ranks(target, options.out, held_out, num_given), MAX_SPECULATIVE_TOKENS))
    return trained


def _check_readable(options: DraftTraining, head: Any, target: Target) -> None:
    """Find out before the training that what is written could not be read. Raises UnsupportedError."""
    try:
        check_head(HeadFolder(options.out, head.config(), head.tensors()), options.kind, target.spec)
    except (ModelFormatError, UnsupportedError) as error:
        raise UnsupportedError(f"heads of kind {options.kind} cannot be trained for {options.model}: {error}") from error


def _draft_ids(options: DraftTraining, sequences: NDArray[np.int32], vocab_size: int) -> list[int]:
    """Return the tokens that may be drafted, the most frequent ones, in order of their ids."""
    size = min(vocab_size, options.draft_vocab_size or _DEFAULT_DRAFT_VOCAB)
    counts = np.bincount(np.asarray(sequences).ravel(), minlength=vocab_size)
    return sorted(np.argsort(-counts, kind="stable")[:size].tolist())


def _make_optimizers(head: nn.Module, options: DraftTraining) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al., 2024) for the matrices inside, AdamW for output heads, norms and biases."""
    named = list(head.named_parameters())
    matrices = [p for n, p in named if p.dim() == 2 and "lm_head" not in n]
    others = [p for n, p in named if p.dim() != 2 or "lm_head" in n]
    rate = options.learning_rate
    found: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate / 4, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in found:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return found


def _origin(options: DraftTraining, head: Any) -> dict[str, object]:
    """Return what must be the same where a run goes on: what the head reads and says, and what it started from."""
    said = {name: tensor.tolist() for name, tensor in head.tensors().items() if not tensor.is_floating_point()}
    return {"model": options.model, "start_from": options.start_from, "config": head.config(), "tokens to draft": said}


def _resume(file: Path, head: nn.Module, optimizers: list[torch.optim.Optimizer], origin: dict[str, object]) -> _Progress:
    if not file.is_file():
        return _Progress(origin=origin)
    state = torch.load(file)
    stored: dict[str, object] = state.get("origin", {})
    other = next((name for name, value in origin.items() if stored.get(name) != value), None)
    if other is not None:
        raise ConfigError(f"{file} is of a head of which these options differ: {other}; give another folder, or remove it")
    head.load_state_dict(state["head"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    logger.info("goes on at step %d, after %.1f minutes", state["step"], state["seconds"] / 60)
    return _Progress(state["step"], state["seconds"], origin=origin)


def _save(file: Path, head: nn.Module, optimizers: list[torch.optim.Optimizer], progress: _Progress) -> None:
    state: dict[str, Any] = {
        "head": head.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": progress.step,
        "seconds": progress.seconds,
        "origin": progress.origin,
    }
    temporary = file.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(file)


def _batch(sequences: NDArray[np.int32], step: int, options: DraftTraining) -> Tensor:
    """Return the token ids [B, L] of a step, which depend on its number alone."""
    size = max(1, min(len(sequences), options.batch_tokens // options.sequence_tokens))
    per_round = len(sequences) // size
    order = np.random.default_rng((options.seed, step // per_round)).permutation(len(sequences))
    chosen = order[step % per_round * size : (step % per_round + 1) * size]
    return torch.from_numpy(np.asarray(sequences[np.sort(chosen)]).astype(np.int64))


def _run(
    options: DraftTraining,
    head: Any,
    target: Target,
    sequences: NDArray[np.int32],
    optimizers: list[torch.optim.Optimizer],
    progress: _Progress,
    bar: tqdm[Any],
) -> None:
    budget_s = options.minutes * 60
    bar.update(round(progress.seconds))
    last_save_s = progress.seconds
    while progress.seconds < budget_s:
        begin = time.monotonic()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                spent = progress.seconds / budget_s
                group["lr"] = group["base_lr"] * min(1.0, (progress.step + 1) / _WARM_UP_STEPS) * (1 - spent)
        token_ids = _batch(sequences, progress.step, options)
        rows = target.compute(token_ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, shares = head.losses(token_ids, rows)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.seconds += time.monotonic() - begin
        bar.update(min(bar.total, round(progress.seconds)) - bar.n)
        bar.set_postfix_str(
            f"step {progress.step} loss {float(loss.detach()):.3f} agree {' '.join(f'{float(s):.2f}' for s in shares)}"
        )
        if progress.seconds - last_save_s > _SAVE_S:
            last_save_s = progress.seconds
            _save(options.out / "training" / "state.pt", head, optimizers, progress)
    _save(options.out / "training" / "state.pt", head, optimizers, progress)
    bar.close()


@torch.no_grad()
def _agreement(head: Any, target: Target, held_out: NDArray[np.int32], options: DraftTraining) -> list[float]:
    size = max(1, options.batch_tokens // options.sequence_tokens)
    parts: list[Tensor] = []
    for begin in range(0, len(held_out), size):
        token_ids = torch.from_numpy(np.asarray(held_out[begin : begin + size]).astype(np.int64))
        rows = target.compute(token_ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            shares = head.losses(token_ids, rows)[1]
        parts.append(torch.stack(shares) * len(token_ids))
    return (torch.stack(parts).sum(0) / len(held_out)).tolist()


def _write(options: DraftTraining, head: Any, progress: _Progress, agreement: list[float]) -> TrainedHead:
    tensors = head.tensors()
    file = options.out / "model.safetensors"
    save_file(tensors, str(file), metadata={"format": "pt"})
    file.chmod(0o644)
    (options.out / "config.json").write_text(json.dumps(head.config(), indent=2) + "\n", encoding="utf-8")
    num_parameters = sum(p.numel() for p in head.parameters())
    trained = TrainedHead(options.out, num_parameters, progress.step, progress.seconds, agreement)
    (options.out / "README.md").write_text(_model_card(options, trained), encoding="utf-8")
    return trained


def _model_card(options: DraftTraining, trained: TrainedHead) -> str:
    shares = ", ".join(f"{share:.3f}" for share in trained.agreement)
    written = options.sequence_tokens - options.prompt_tokens
    return f"""# {options.out.name}

A head of kind {options.kind} that drafts for `{options.model}`, trained by `quire train-draft --kind {options.kind}`:

    quire serve {options.model} --speculative '{{"method": "{options.kind}", "model": "{options.out.name}"}}'

| | |
|---|---|
| parameters | {trained.num_parameters:,} (bf16) |
| training | {trained.num_steps:,} steps of {options.batch_tokens:,} tokens, {trained.seconds / 60:.0f} minutes |
| sequences | {options.prompt_tokens} tokens of text, then {written} of the model's own, {options.sampled_share:.0%} sampled |
| agreement | {shares} of held-out places, by tokens ahead: the likeliest token is the model's |
"""
