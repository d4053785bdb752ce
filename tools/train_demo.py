"""Train the bundled demo models on public-domain prose, resumably, on a CPU.

    python tools/train_demo.py tokenizer --text classic_prose.txt --work build/train
    python tools/train_demo.py train demo --minutes 80 --threads 1 --work build/train
    python tools/train_demo.py export demo --work build/train --out quire/demo_models/demo
    python tools/train_demo.py copies demo --from quire/demo_models/demo --minutes 40 --threads 2 --work build/train
    python tools/train_demo.py export demo --stage copies --work build/train --out quire/demo_models/demo
    python tools/train_demo.py distill demo-draft --from quire/demo_models/demo-draft --teacher quire/demo_models/demo \\
        --minutes 30 --work build/train
    python tools/train_demo.py export demo-draft --stage distill --work build/train --out quire/demo_models/demo-draft

`train` may be stopped at any time and started again with the same arguments: it resumes from its last checkpoint. The
learning rate follows the share of the time budget that is spent, so a slower machine trains on fewer tokens, not on a
broken schedule. Whole books are held out; the loss that `export` writes into the model card is measured on them.
`copies` trains an exported model further, resumably too, with a share of windows that quote, copy and edit a passage of the
same books, so that the model can go on with a text that its prompt holds. `distill` trains a smaller model further to say what
another says, on texts that this one has written, on prose and on copies: then it can draft for it.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import asdict
from pathlib import Path

import torch
from demo_model import MAX_POSITIONS, SHAPES, VOCAB_SIZE, DemoModel, Shape
from torch import Tensor, nn

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_BOOKS = ("The Yellow Face", "Lady Susan", "The Prince and the Pauper")
SEPARATORS = ("\n\n", "\n", " ", "\n\n---\n\n")
"""What stands between a passage and its copy."""
COPY_SHARE = 0.3
"""Of the windows of `copies`."""
DRILL_PROGRESS, DRILL_SHARE, DRILL_LENGTH = 0.15, 0.7, 256
"""The first part of `copies` and `distill` drills: more windows, short ones, of short passages, half of them words without a
sense, at the full learning rate. Without it a model does not begin to look for what it has read before: 1.2 million tokens of
the second part of `copies` alone left the loss of a second copy where that of the first was."""
WRITTEN_SHARE, DISTILLED_COPY_SHARE = 0.6, 0.2
"""Of the windows of `distill`: those that the teacher has written, and those that copy; the others are prose."""
WRITTEN_LENGTH, WRITTEN_PROMPT, NUM_WRITTEN, SAMPLED_SHARE = 512, 96, 4000, 0.25
"""Tokens of a text of the teacher's, how many of them are of the books, the texts, and the share that is not greedy."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] | trim }}\n\n{% endfor %}"


def read_books(path: Path) -> tuple[list[str], list[str]]:
    """Return the cleaned texts of the training books and of the held-out books."""
    train, held_out = [], []
    for book in path.read_text(encoding="utf-8").split("\f"):
        head, _, body = book.partition("-------")
        body = re.sub(r"[“”]", '"', body).replace("’", "'").replace("‘", "'").replace("_", "")
        body = re.sub(r"[ \t]+", " ", body)
        body = re.sub(r"\n\s*\n+", "\n\n", body).strip()
        title = re.search(r"# Title: (.*)", head)
        is_held_out = title is not None and title.group(1).strip() in HELD_OUT_BOOKS
        (held_out if is_held_out else train).append(body)
    if len(held_out) != len(HELD_OUT_BOOKS):
        raise SystemExit(f"{path}: expected the held-out books {HELD_OUT_BOOKS}, found {len(held_out)} of them")
    return train, held_out


def train_tokenizer(text: Path, work: Path) -> None:
    """Write tokenizer.json (byte-level BPE) and the token ids of both splits into `work`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    train, held_out = read_books(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(train, trainer)
    work.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(work / "tokenizer.json"))
    for name, books in (("train", train), ("held_out", held_out)):
        ids: list[int] = []
        for book in books:
            ids += [*tokenizer.encode(book).ids, 0]
        torch.save(torch.tensor(ids, dtype=torch.int16), work / f"{name}.pt")
        (work / f"{name}.txt").write_text("\n\n".join(books), encoding="utf-8")
        print(f"{name}: {len(books)} books, {len(ids):,} tokens, {sum(map(len, books)) / len(ids):.2f} characters a token")


def has_bf16() -> bool:
    """Return whether the CPU multiplies bfloat16; where it does not, float32 is several times faster."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_bf16())


def make_optimizers(model: DemoModel) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al., 2024) for the hidden matrices, AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    muon = torch.optim.Muon(matrices, lr=4e-3, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return [muon, adamw]


def batch_at(ids: Tensor, step: int, num_tokens: int, length: int) -> tuple[Tensor, Tensor]:
    """Draw the windows of one step; they depend on the step alone, so that a resumed run sees the same ones."""
    generator = torch.Generator().manual_seed(1_000_003 * 17 + step)
    starts = torch.randint(0, len(ids) - length - 1, (num_tokens // length,), generator=generator)
    window = torch.stack([ids[s : s + length + 1] for s in starts]).long()
    return window[:, :-1], window[:, 1:]


def copy_window(ids: Tensor, separators: list[Tensor], length: int, generator: torch.Generator) -> Tensor:
    """Return [length] tokens in which a passage of the books is quoted again and again, now and then with some words edited.

    An edit is kept in the copies behind it, so that the last copy, not the first, is what to go on with.
    """

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    size = round(8 * 25 ** float(torch.rand((), generator=generator)))
    begin = draw(0, len(ids) - 2 * size)
    passage = ids[begin : begin + size].clone()
    if draw(0, 4) == 0:  # words without a sense: nothing but the copy says what comes next
        passage = ids[torch.randint(0, len(ids), (size,), generator=generator)]
    between = separators[draw(0, len(separators))]
    pieces: list[Tensor] = []
    total = 0
    while total < length:
        is_edited = draw(0, 3) == 0
        if is_edited:
            edits = torch.rand(size, generator=generator) < 0.03
            others = torch.randint(0, len(ids), (size,), generator=generator)
            passage = torch.where(edits, ids[others], passage)
        cut = draw(0, size // 2) if pieces and draw(0, 4) == 0 else 0
        pieces += [passage[cut:], between]
        total += size - cut + len(between)
    return torch.cat(pieces)[:length]


def drill_window(ids: Tensor, separators: list[Tensor], length: int, generator: torch.Generator) -> Tensor:
    """Return [length] tokens: some prose, then a short passage, or as many words without a sense, again and again."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    size = round(8 * 8 ** float(torch.rand((), generator=generator)))
    places = torch.randint(0, len(ids), (size,), generator=generator)
    if draw(0, 2) == 0:
        places = torch.arange(size) + draw(0, len(ids) - size)
    begin = draw(0, len(ids) - 40)
    lead, between = ids[begin : begin + draw(0, 40)], separators[draw(0, len(separators))]
    return torch.cat([lead, *[ids[places], between] * (length // size + 1)])[:length]


def batch_with_copies(
    ids: Tensor, separators: list[Tensor], step: int, num_tokens: int, length: int, *, is_drill: bool
) -> tuple[Tensor, Tensor]:
    """Return a batch as `batch_at` does, in which a share of the windows copies."""
    inputs, targets = batch_at(ids, step, num_tokens, length)
    generator = torch.Generator().manual_seed(2_000_003 * 17 + step)
    draw_window, share = (drill_window, DRILL_SHARE) if is_drill else (copy_window, COPY_SHARE)
    for row in range(len(inputs)):
        if float(torch.rand((), generator=generator)) < share:
            window = draw_window(ids, separators, length + 1, generator).long()
            inputs[row], targets[row] = window[:-1], window[1:]
    return inputs, targets


def batch_to_distill(ids: Tensor, separators: list[Tensor], written: Tensor, step: int, num_tokens: int) -> Tensor:
    """Return the windows [B, WRITTEN_LENGTH] of a step of `distill`: texts of the teacher's, copies and prose."""
    inputs, _ = batch_at(ids, step, num_tokens, WRITTEN_LENGTH)
    generator = torch.Generator().manual_seed(3_000_017 * 17 + step)
    for row in range(len(inputs)):
        drawn = float(torch.rand((), generator=generator))
        if drawn < WRITTEN_SHARE:
            inputs[row] = written[int(torch.randint(0, len(written), (1,), generator=generator))].long()
        elif drawn < WRITTEN_SHARE + DISTILLED_COPY_SHARE:
            inputs[row] = copy_window(ids, separators, WRITTEN_LENGTH, generator).long()
    return inputs


def read_written(teacher: Path, work: Path, threads: int) -> Tensor:
    """Return texts of a model's, [NUM_WRITTEN, WRITTEN_LENGTH], as it goes on with the books; written at the first call."""
    from quire.training.config import DraftTraining
    from quire.training.corpus import read_sequences

    options = DraftTraining(
        kind="eagle3",  # of no consequence: texts are the same for all kinds
        model=str(teacher.resolve()),
        text=work / "train.txt",
        out=work,
        sequence_tokens=WRITTEN_LENGTH,
        prompt_tokens=WRITTEN_PROMPT,
        num_sequences=NUM_WRITTEN,
        sampled_share=SAMPLED_SHARE,
        num_threads=threads,
    )
    return torch.from_numpy(read_sequences(options, work, show_progress=True).astype("int16"))


class Teacher:
    """A model whose probabilities another one shall learn."""

    def __init__(self, name: str, folder: Path) -> None:
        self._model = DemoModel(SHAPES[name])
        self._model.load_state_dict(read_exported(folder))

    def loss(self, model: DemoModel, inputs: Tensor) -> Tensor:
        """Return the mean cross-entropy of a model's probabilities behind `inputs` [B, T] to the teacher's, in nats."""
        with torch.no_grad():
            shares = self._model.logits(inputs).softmax(-1)
        return -(shares * model.logits(inputs).log_softmax(-1)).sum(-1).mean()


@torch.no_grad()
def held_out_loss(model: DemoModel, ids: Tensor, length: int, max_windows: int | None = None) -> float:
    """Return the mean loss in nats a token over consecutive windows of the held-out books."""
    model.eval()
    starts = list(range(0, len(ids) - length - 1, length))
    if max_windows is not None:
        starts = starts[:: max(1, len(starts) // max_windows)]
    total = 0.0
    for begin in range(0, len(starts), 8):
        window = torch.stack([ids[s : s + length + 1] for s in starts[begin : begin + 8]]).long()
        with autocast():
            total += float(model(window[:, :-1], window[:, 1:])) * len(window)
    model.train()
    return total / len(starts)


def state_file(work: Path, name: str, stage: str) -> Path:
    """Return where the state of a stage of the training is kept."""
    return work / (f"{name}.state.pt" if stage == "train" else f"{name}.{stage}.state.pt")


def train(args: argparse.Namespace) -> None:
    """Train, or go on with a trained model on copies or on what a teacher says, until the minutes are spent."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    work: Path = args.work
    ids, held_out = torch.load(work / "train.pt"), torch.load(work / "held_out.pt")
    model = DemoModel(SHAPES[args.name])
    optimizers = make_optimizers(model)
    state_path = state_file(work, args.name, args.command)
    separators = read_separators(work) if args.command != "train" else []
    teacher, written = None, torch.empty(0)
    if args.command == "distill":
        teacher, written = Teacher(args.teacher.name, args.teacher), read_written(args.teacher, work, args.threads)
    step, seconds, num_tokens, before = 0, 0.0, 0, ""
    if state_path.exists():
        state = torch.load(state_path)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, seconds, num_tokens, before = (state[key] for key in ("step", "seconds", "num_tokens", "before"))
        print(f"resumed at step {step}, {seconds / 60:.1f} minutes", flush=True)
    elif args.command != "train":
        model.load_state_dict(read_exported(args.source))
        before = trained_before(args.source)
    print(f"{args.name}: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    budget_s = args.minutes * 60
    smoothed = None

    def save() -> None:
        temporary = state_path.with_suffix(".tmp")
        torch.save(
            {
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
                "step": step,
                "seconds": seconds,
                "num_tokens": num_tokens,
                "threads": args.threads,
                "before": before,
                "precision": "bf16 autocast" if has_bf16() else "float32",
            },
            temporary,
        )
        temporary.replace(state_path)

    while seconds < budget_s:
        begin = time.monotonic()
        progress = seconds / budget_s
        length = 512 if progress < 0.8 else MAX_POSITIONS
        lr_share = 1 - progress
        is_drill = args.command != "train" and progress < DRILL_PROGRESS
        if is_drill:
            length, lr_share = DRILL_LENGTH, 1.0
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * lr_share * min(1.0, (step + 1) / 50)
        targets = torch.empty(0)  # where a teacher says what is right
        if teacher is not None and not is_drill:
            inputs = batch_to_distill(ids, separators, written, step, args.batch_tokens)
        elif args.command != "train":
            num_drawn = args.batch_tokens // 2 if is_drill else args.batch_tokens
            inputs, targets = batch_with_copies(ids, separators, step, num_drawn, length, is_drill=is_drill)
        else:
            inputs, targets = batch_at(ids, step, args.batch_tokens, length)
        with autocast():
            loss = model(inputs, targets) if teacher is None or is_drill else teacher.loss(model, inputs)
        (loss + 0.01 * model.balance_loss()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        num_tokens += inputs.numel()
        seconds += time.monotonic() - begin
        smoothed = float(loss.detach()) if smoothed is None else 0.95 * smoothed + 0.05 * float(loss.detach())
        if step % 20 == 0:
            print(f"step {step} {seconds / 60:.1f} min {num_tokens / seconds:,.0f} tokens/s loss {smoothed:.3f}", flush=True)
        if step % 100 == 0:
            report(model, held_out, separators)
            save()
    report(model, held_out, separators)
    save()


def read_exported(folder: Path) -> dict[str, Tensor]:
    """Return the parameters of an exported model, in float32, under the names that `DemoModel` has for them."""
    from safetensors.torch import load_file

    return {name.removeprefix("model."): tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def trained_before(folder: Path) -> str:
    """Return what the card of an exported model says of its training."""
    row = re.search(r"^\| training \| (.*) \|$", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    if row is None:
        raise SystemExit(f"{folder}/README.md: expected a row of the table that begins with '| training |'")
    return row[1]


def read_separators(work: Path) -> list[Tensor]:
    """Return the token ids of what stands between copies."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    return [torch.tensor(tokenizer.encode(text).ids, dtype=torch.int16) for text in SEPARATORS]


def report(model: DemoModel, held_out: Tensor, separators: list[Tensor]) -> None:
    """Print the loss on held-out prose, and on copies of it where copies are trained."""
    line = f"held-out loss {held_out_loss(model, held_out, 512, 32):.3f}"
    if separators:
        generator = torch.Generator().manual_seed(7)
        copied = torch.cat([copy_window(held_out, separators, 513, generator) for _ in range(24)])
        line += f", on copies {held_out_loss(model, copied, 512):.3f}"
    print(line, flush=True)


def export(args: argparse.Namespace) -> None:
    """Write the Hugging Face folder of a trained model: bf16 safetensors, configs, tokenizer and model card."""
    from safetensors.torch import save_file

    shape, work, out = SHAPES[args.name], args.work, args.out
    state = torch.load(state_file(work, args.name, args.stage))
    held_out = torch.load(work / "held_out.pt")
    model = DemoModel(shape)
    model.load_state_dict(state["model"])
    model.to(torch.bfloat16).float()  # the loss of the weights as shipped
    loss = held_out_loss(model, held_out, 512)
    out.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{n}": p.detach().to(torch.bfloat16).contiguous() for n, p in model.named_parameters()}
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    config = hf_config(shape)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    generation_config = {"eos_token_id": 0, "do_sample": True, "temperature": 0.8, "top_p": 0.95}
    for name, value in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation_config),
    ):
        (out / name).write_text(json.dumps(value, indent=2) + "\n")
    tokenizer_json = json.loads((work / "tokenizer.json").read_text(encoding="utf-8"))
    model_json = tokenizer_json["model"]  # Each merge as one string is 15 KB shorter than as a list of two.
    model_json["merges"] = [" ".join(pair) for pair in model_json["merges"]]
    (out / "tokenizer.json").write_text(
        json.dumps(tokenizer_json, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8"
    )
    num_parameters = sum(p.numel() for p in model.parameters())
    (out / "README.md").write_text(model_card(args.name, num_parameters, state, loss, args.stage))
    print(f"{out}: {num_parameters:,} parameters, held-out loss {loss:.4f} nats a token")


def hf_config(shape: Shape) -> dict[str, object]:
    """Return config.json."""
    is_moe = shape.num_experts > 0
    config: dict[str, object] = {
        "architectures": ["Qwen3MoeForCausalLM" if is_moe else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if is_moe else "qwen3",
        **{k: v for k, v in asdict(shape).items() if not k.startswith("num_experts")},
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }
    if is_moe:
        config |= {
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.num_experts_per_tok,
            "moe_intermediate_size": shape.intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


FURTHER = {
    "copies": "a share of the windows repeats, quotes, edits",
    "distill": "to say what `demo` says, on its own texts, prose and copies",
}


def model_card(name: str, num_parameters: int, state: dict, loss: float, stage: str) -> str:
    effort = f"{state['step']:,} steps, {state['num_tokens']:,} tokens, {state['seconds'] / 60:.0f} minutes on "
    effort += f"{state['threads']} CPU core(s), {state['precision']}"
    if state["before"]:
        effort = f"{state['before']} |\n| further training | {effort}; {FURTHER[stage]}"
    shape = SHAPES[name]
    is_moe = shape.num_experts > 0
    form = f"Qwen3-MoE ({shape.num_experts} experts, {shape.num_experts_per_tok} a token)" if is_moe else "Qwen3"
    return f"""---
license: apache-2.0
language: en
---
# {name}

A small language model in {form} form, trained from scratch by `tools/train_demo.py` so that quire can be tried and
tested without a download. It continues English prose in the manner of its books; it knows nothing and follows no
instructions. `chat_template` only joins the messages as paragraphs.

| | |
|---|---|
| parameters | {num_parameters:,} (bf16) |
| text | 57 public-domain books by Jane Austen, Arthur Conan Doyle and Mark Twain (12 MB) |
| tokenizer | byte-level BPE, {VOCAB_SIZE} entries, trained on the same books |
| training | {effort} |
| optimizer | Muon for hidden matrices, AdamW for embedding and norms, linear decay to zero |
| context | {MAX_POSITIONS} tokens (512 for the first four fifths of the training) |
| held-out loss | {loss:.3f} nats a token, windows of 512 tokens |

Held out, and never seen in training: {", ".join(HELD_OUT_BOOKS)}.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("tokenizer", "train", "copies", "distill", "export"):
        sub = commands.add_parser(command)
        sub.add_argument("--work", type=Path, required=True)
        if command != "tokenizer":
            sub.add_argument("name", choices=sorted(SHAPES))
        if command == "tokenizer":
            sub.add_argument("--text", type=Path, required=True)
        if command in ("train", "copies", "distill"):
            sub.add_argument("--minutes", type=float, required=True)
            sub.add_argument("--threads", type=int, default=1)
            sub.add_argument("--batch-tokens", type=int, default=4096)
        if command in ("copies", "distill"):
            sub.add_argument("--from", type=Path, required=True, dest="source", metavar="FOLDER", help="an exported model")
        if command == "distill":
            sub.add_argument("--teacher", type=Path, required=True, metavar="FOLDER", help="an exported model, to learn from")
        if command == "export":
            sub.add_argument("--out", type=Path, required=True)
            sub.add_argument("--stage", choices=("train", "copies", "distill"), default="train")
    args = parser.parse_args()
    if args.command == "tokenizer":
        train_tokenizer(args.text, args.work)
    elif args.command in ("train", "copies", "distill"):
        train(args)
    else:
        export(args)


if __name__ == "__main__":
    main()
