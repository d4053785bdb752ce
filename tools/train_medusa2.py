"""Train the last layer of the demo model together with Medusa heads, resumably, on a CPU (Medusa-2, arXiv 2401.10774, 2.2).

    python tools/train_medusa2.py --model quire/demo_models/demo --heads quire/demo_models/demo-medusa \\
        --minutes 25 --threads 2 --work build/train --out build/medusa2

Heads that read the last hidden state find there only what the model had to say of the next token. Here the last layer learns to
leave what they need, and still to say what it said before: its probabilities are held to those of the model as it was. The
layers below stay as they are, and with them what EAGLE-3 heads read. In `--rounded-share` of the steps all weights are those of
`--quantization int4`, which would else cost more than before. `--work` is that of `train_demo.py distill`, which wrote
the model's own texts there. Writes `demo` and `demo-medusa` under `--out`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_model import SHAPES, DemoModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from train_demo import WRITTEN_LENGTH, batch_to_distill, held_out_loss, read_exported, read_separators, read_written

from quire.quant.policy import POLICIES
from quire.quant.quantize import quantize_weight

SAID_WEIGHT, HEADS_WEIGHT, HEAD_DECAY = 8.0, 2.0, 0.8
"""Of what the model itself says, beside the heads together, and of each head beside the one before."""


class Heads(nn.Module):
    """Medusa heads as they are stored: a residual block each, and an output head for some of the tokens."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.token_map = tensors.pop("token_map").long()
        count = int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_heads"])
        self.blocks = nn.ModuleList(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(256, 256)])}) for _ in range(count))
        self.lm_heads = nn.ModuleList(nn.Linear(256, len(self.token_map), bias=False) for _ in range(count))
        self.load_state_dict(tensors)

    def losses(self, hidden: Tensor, logits: Tensor) -> tuple[Tensor, list[float]]:
        """Return the loss of what the heads say of hidden [B, L, H], and the share of places where each is right.

        logits  [B, L, V] of the model: head i is to say at a place what it says 1 + i places later
        """
        best, shares = logits.argmax(-1), logits[..., self.token_map].softmax(-1)
        is_known = torch.isin(best, self.token_map)
        total, right = torch.zeros(()), []
        for index, (block, head) in enumerate(zip(self.blocks, self.lm_heads, strict=True)):
            ahead = 1 + index
            said = head(hidden + F.silu(block["layers"][0](hidden)))[:, :-ahead].float()
            counted = is_known[:, ahead:]
            losses = -(shares[:, ahead:] * said.log_softmax(-1)).sum(-1)
            total = total + HEAD_DECAY**index * (losses * counted).sum() / counted.sum()
            right.append(float((self.token_map[said.detach().argmax(-1)] == best[:, ahead:]).float().mean()))
        return total, right


def _rounded(name: str, weight: Tensor) -> Tensor:
    """Return a parameter of the demo model as `--quantization int4` has it."""
    module = name.removesuffix(".weight").replace("embed_tokens", "embed")
    module = module.replace("self_attn.", "").replace("mlp.", "").removesuffix("_proj")
    scheme = POLICIES["int4"].scheme_of(f"{module}.weight", weight.shape[-1], SHAPES["demo"].num_hidden_layers)
    if weight.dim() != 2 or scheme is None:
        return weight
    return quantize_weight(weight, scheme, rounded_to=torch.bfloat16).dequantize(torch.float32)


class Parts:
    """The model in two: layers that stay as they are, and the last one with the norm, as it was and as it becomes."""

    def __init__(self, folder: Path) -> None:
        self.was, self.model = DemoModel(SHAPES["demo"]), DemoModel(SHAPES["demo"])
        for one in (self.was, self.model):
            one.load_state_dict(read_exported(folder))
            one.requires_grad_(False)
        self.rounded = DemoModel(SHAPES["demo"])
        self.rounded.load_state_dict({name: _rounded(name, weight) for name, weight in self.was.state_dict().items()})
        self.rounded.requires_grad_(False)
        self.trained = nn.ModuleList([self.model.layers[-1], self.model.norm])
        self.trained.requires_grad_(True)

    def run(self, ids: Tensor, is_rounded: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits as they were, the hidden states [B, L, H] as they are, and their logits [B, L, V] f32.

        is_rounded  whether as they are with rounded weights
        """
        length = ids.shape[1]
        cos, sin = self.model.cos[:length], self.model.sin[:length]
        with torch.no_grad():
            x = below = self._run_below(self.was, ids)
            before = F.linear(self.was.norm(self.was.layers[-1](below, cos, sin)), self.was.embed_tokens.weight).float()
            if is_rounded:
                x = self._run_below(self.rounded, ids)
        last, output = self.model.layers[-1], (self.rounded if is_rounded else self.was).embed_tokens.weight
        weights = dict(last.named_parameters())
        if is_rounded:
            # Gradients pass as if nothing had been rounded (arXiv 1308.3432).
            prefix = f"layers.{len(self.model.layers) - 1}."
            weights = {name: w + (_rounded(prefix + name, w.detach()) - w.detach()) for name, w in weights.items()}
        hidden = self.model.norm(torch.func.functional_call(last, weights, (x, cos, sin)))
        return before, hidden, F.linear(hidden, output).float()

    @staticmethod
    def _run_below(model: DemoModel, ids: Tensor) -> Tensor:
        cos, sin = model.cos[: ids.shape[1]], model.sin[: ids.shape[1]]
        x = model.embed_tokens(ids)
        for layer in model.layers[:-1]:
            x = layer(x, cos, sin)
        return x


def train(args: argparse.Namespace) -> None:
    """Train until the minutes are spent, and write both folders."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    work: Path = args.work
    ids, held_out, separators = torch.load(work / "train.pt"), torch.load(work / "held_out.pt"), read_separators(work)
    written = read_written(args.model, work, args.threads)
    parts, heads = Parts(args.model), Heads(args.heads)
    print(f"held-out loss {held_out_loss(parts.model, held_out, 512, 32):.4f}", flush=True)
    vectors = [p for p in (*heads.parameters(), *parts.trained.parameters()) if p.dim() == 1]
    optimizers = [
        torch.optim.Muon([p for p in parts.trained.parameters() if p.dim() == 2], lr=args.learning_rate, weight_decay=0.0,
                         momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.Muon([p for p in heads.blocks.parameters() if p.dim() == 2], lr=2e-3, weight_decay=0.01, momentum=0.95,
                         adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([*heads.lm_heads.parameters(), *vectors], lr=5e-4, betas=(0.9, 0.95), weight_decay=0.0),
    ]  # fmt: skip
    state_path = work / "medusa2.state.pt"
    step, seconds = 0, 0.0
    if state_path.exists():
        state = torch.load(state_path)
        parts.trained.load_state_dict(state["trained"])
        heads.load_state_dict(state["heads"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, seconds = state["step"], state["seconds"]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group.get("base_lr", group["lr"])
    smoothed: list[float] = []
    while seconds < args.minutes * 60:
        begin = time.monotonic()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * (1 - seconds / (args.minutes * 60)) * min(1.0, (step + 1) / 50)
        inputs = batch_to_distill(ids, separators, written, step, args.batch_tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            is_rounded = int((step + 1) * args.rounded_share) > int(step * args.rounded_share)
            before, hidden, now = parts.run(inputs, is_rounded)
            said = F.kl_div(now.log_softmax(-1), before.log_softmax(-1), reduction="none", log_target=True).sum(-1).mean()
            ahead, right = heads.losses(hidden.float(), before)
        (SAID_WEIGHT * said + HEADS_WEIGHT * ahead).backward()
        nn.utils.clip_grad_norm_([*parts.trained.parameters(), *heads.parameters()], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        seconds += time.monotonic() - begin
        values = [float(said.detach()), *right]
        smoothed = [0.97 * a + 0.03 * b for a, b in zip(smoothed, values, strict=True)] if smoothed else values
        if step % 50 == 0:
            shares = " ".join(f"{share:.3f}" for share in smoothed[1:])
            print(f"step {step} {seconds / 60:.1f} min divergence {smoothed[0]:.4f} agree {shares}", flush=True)
        if step % 400 == 0:
            states = [optimizer.state_dict() for optimizer in optimizers]
            torch.save({"trained": parts.trained.state_dict(), "heads": heads.state_dict(), "optimizers": states,
                        "step": step, "seconds": seconds}, state_path)  # fmt: skip
    print(f"held-out loss {held_out_loss(parts.model, held_out, 512, 32):.4f} after {step} steps", flush=True)
    export(args, parts, heads)


def export(args: argparse.Namespace, parts: Parts, heads: Heads) -> None:
    """Write the model and the heads, in bfloat16, beside copies of their other files."""
    tensors = {f"model.{n}": p.detach().to(torch.bfloat16).contiguous() for n, p in parts.model.named_parameters()}
    stored = {n: p.detach().to(torch.bfloat16).contiguous() for n, p in heads.named_parameters()}
    stored["token_map"] = load_file(args.heads / "model.safetensors")["token_map"]
    for source, found in ((args.model, tensors), (args.heads, stored)):
        folder = args.out / source.name
        shutil.copytree(source, folder, dirs_exist_ok=True)
        save_file(found, str(folder / "model.safetensors"), metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model, which is not changed")
    parser.add_argument("--heads", type=Path, required=True, help="folder of its Medusa heads, to start from")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-tokens", type=int, default=5 * WRITTEN_LENGTH)
    parser.add_argument("--rounded-share", type=float, default=0.0, help="of the steps that are taken with rounded weights")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of the last layer's matrices")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
