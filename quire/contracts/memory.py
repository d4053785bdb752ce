"""MemoryPlan and ModelReport: what a model needs, before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import DTYPE_BYTES, ModelSpec, MoeSpec
from quire.contracts.pooler_spec import PoolerSpec


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the memory of one worker is divided, in bytes.

    available_bytes   free memory when the plan was made
    weight_bytes      of all parameters, in the dtype they are run in
    activation_bytes  estimated peak of one full step, beside weights and KV
    kv                shape of the cache; its pool has num_kv_blocks blocks
    num_states        recurrent states that are held next to it, num_state_checkpoints of them for prefixes; 0: there are none
    """

    available_bytes: int
    weight_bytes: int
    activation_bytes: int
    kv: KvSpec
    num_kv_blocks: int
    max_model_len: int
    num_states: int = 0
    num_state_checkpoints: int = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of all recurrent states."""
        return self.num_states * self.kv.bytes_per_state

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole KV pool."""
        return self.num_kv_blocks * self.kv.bytes_per_block

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that fit in the pool."""
        return self.num_kv_blocks * self.kv.block_size

    @property
    def fits(self) -> bool:
        """Whether weights, activations, KV pool and recurrent states fit into the available memory together."""
        return self.weight_bytes + self.activation_bytes + self.kv_bytes + self.state_bytes <= self.available_bytes

    def describe(self) -> str:
        """Return the plan as a few lines for people."""
        return "\n".join(
            (
                f"memory      {format_bytes(self.available_bytes)} available"
                + ("" if self.fits else ": THE MODEL DOES NOT FIT"),
                f"weights     {format_bytes(self.weight_bytes)}",
                f"activations {format_bytes(self.activation_bytes)} at most in one step (estimate)",
                f"KV cache    {format_bytes(self.kv_bytes)}: {self.num_kv_blocks:,} blocks of {self.kv.block_size} "
                f"tokens, {self.num_kv_tokens:,} tokens, {self.num_kv_tokens / self.max_model_len:.1f} sequences of "
                f"{self.max_model_len:,} ({format_bytes(self.kv.bytes_per_token)} a token, {self.kv.dtype})",
                *self._describe_states(),
            )
        )

    def _describe_states(self) -> tuple[str, ...]:
        if self.num_states == 0:
            return ()
        return (
            f"states      {format_bytes(self.state_bytes)}: {self.num_states:,} recurrent states of "
            f"{format_bytes(self.kv.bytes_per_state)}, {self.num_state_checkpoints:,} of them checkpoints of prefixes",
        )


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A model as `quire inspect` shows it.

    folder, tokenizer_folder  where its files and its tokenizer are
    parameters                canonical name -> shape
    generation_defaults       sampling fields of generation_config.json, by the names of SamplingParams
    packed_weight_bytes       of all weights as the kernels keep them, once they are loaded
    spared_weight_bytes       of these, what a step of greedy sequences does not read: it reads a smaller copy of the head
    device                    what runs it: "cpu", "cuda:N", or "interpreter"
    pooler                    what it makes of its hidden states, and what it is for
    """

    folder: Path
    tokenizer_folder: Path
    spec: ModelSpec
    parameters: dict[str, tuple[int, ...]]
    memory: MemoryPlan
    generation_defaults: dict[str, float]
    packed_weight_bytes: int | None = None
    spared_weight_bytes: int = 0
    device: str = "cpu"
    pooler: PoolerSpec = field(default_factory=PoolerSpec)

    @property
    def num_parameters(self) -> int:
        """All weights."""
        return sum(math.prod(shape) for shape in self.parameters.values())

    @property
    def num_active_parameters(self) -> int:
        """Weights that one token is multiplied with: of a mixture only the experts of the token, and no embedding rows."""
        total = 0
        for name, shape in self.parameters.items():
            size = math.prod(shape)
            if name == "pos.weight" or (name == "embed.weight" and not self.spec.is_tied):
                size = 0
            layer = next((int(part) for part in name.split(".") if part.isdigit()), None) if ".experts." in name else None
            mlp = None if layer is None else self.spec.layers[layer].mlp
            if isinstance(mlp, MoeSpec):
                size = size * mlp.top_k // mlp.num_experts
            total += size
        return total

    @property
    def active_weight_bytes(self) -> int:
        """Bytes of weights, as they are run, that a step with one token of a greedy sequence reads."""
        num_bytes = self.packed_weight_bytes or self.memory.weight_bytes
        return round(self.num_active_parameters * num_bytes / self.num_parameters) - self.spared_weight_bytes

    @property
    def is_quantized(self) -> bool:
        """Whether most of the weights are run as integers."""
        return self.memory.weight_bytes < 0.75 * self.num_parameters * DTYPE_BYTES[self.spec.dtype]


def format_bytes(num_bytes: float) -> str:
    """Return a size for people: 512 B, 1.5 KiB, 23.4 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
