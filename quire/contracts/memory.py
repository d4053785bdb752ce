"""MemoryPlan and ModelReport: what a model needs, before anything is loaded."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from quire.base.errors import ConfigError
from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import DTYPE_BYTES, ModelSpec, MoeSpec
from quire.contracts.pooler_spec import PoolerSpec

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGTkmgt])(i?))?[Bb]?")


GATHERED_BYTES = 64 << 20
"""Of results of attention that GPU ranks, which share the tokens of sequences, gather at once, unless one run has more."""

GATHERED_TOKENS = 16384
"""Of sequences whose keys they gather at once, unless one sequence has more."""

CONTEXT_CHUNK_TOKENS = 256
"""Consecutive tokens of a sequence whose keys and values are on one rank: a block of attention's softmax, CONTEXT_CHUNK in
csrc/attention.h."""


@dataclass(frozen=True, slots=True)
class HostPart:
    """What the tensor-parallel ranks on this host hold of a model.

    num_ranks        ranks on this host, of num_all_ranks
    weight_bytes     of their weights together; what is replicated counts once for each rank
    bytes_per_block  of their KV caches together, for one block; key and value heads that several ranks hold count for each
    window_bytes_per_block  the same for a block of the window group, see KvSpec
    bytes_per_state  of the recurrent state of one sequence; 0: there is none
    """

    num_ranks: int
    num_all_ranks: int
    weight_bytes: int
    bytes_per_block: int
    window_bytes_per_block: int = 0
    bytes_per_state: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the memory of one worker is divided, in bytes.

    available_bytes   free memory when the plan was made
    weight_bytes      of all parameters, in the dtype they are run in
    activation_bytes  estimated peak of one full step, without weights and KV
    kv                shape of the cache; its pool has num_kv_blocks blocks
    num_window_blocks of the pool of its window group; 0: there is no such group
    num_states        recurrent states that are held next to it, num_state_checkpoints of them for prefixes; 0: there are none
    num_block_places  ranks that share the tokens of sequences, each with an equal part of the blocks
    num_homes         homes (ranks, or groups of them) that each attend to sequences of their own, with an equal part of the
                      blocks
    host              what the ranks on this host hold, where tensor-parallel ranks share the model; weight_bytes and kv are of
                      the whole model
    pinned_bytes      of the host tier of a GPU, which cannot be swapped out; activation_bytes has the buffers on the GPU that
                      its pages pass through
    page_shares       bytes that each rank has of a page of the host tier, where several GPUs share the model; empty elsewhere
    offloaded_bytes   of weights in host memory that a GPU copies before use, see EngineConfig.cpu_offload_gb; weight_bytes are
                      those on the GPU, with the staging buffers
    """

    available_bytes: int
    weight_bytes: int
    activation_bytes: int
    kv: KvSpec
    num_kv_blocks: int
    max_model_len: int
    num_states: int = 0
    num_state_checkpoints: int = 0
    num_window_blocks: int = 0
    host: HostPart | None = None
    offloaded_bytes: int = 0
    num_block_places: int = 1
    num_homes: int = 1
    pinned_bytes: int = 0
    page_shares: tuple[int, ...] = ()

    @property
    def num_local_blocks(self) -> int:
        """Blocks in the pool of each rank."""
        return self.num_kv_blocks // (self.num_block_places * self.num_homes)

    @property
    def block_chunk(self) -> int:
        """Consecutive blocks of a sequence that are on one rank, where ranks share its tokens."""
        return max(1, CONTEXT_CHUNK_TOKENS // self.kv.block_size)

    @property
    def host_weight_bytes(self) -> int:
        """Bytes of the weights on this host."""
        return self.weight_bytes if self.host is None else self.host.weight_bytes

    @property
    def host_bytes_per_block(self) -> int:
        """Bytes of a KV block on this host."""
        return self.kv.bytes_per_block if self.host is None else self.host.bytes_per_block

    @property
    def host_window_bytes_per_block(self) -> int:
        """Bytes of a KV block of the window group on this host."""
        return self.kv.window_bytes_per_block if self.host is None else self.host.window_bytes_per_block

    @property
    def state_bytes(self) -> int:
        """Bytes of all recurrent states."""
        return self.num_states * (self.kv if self.host is None else self.host).bytes_per_state

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pools of both groups on this host; of a GPU that is one of several, on this one."""
        full = (self.num_local_blocks if self.host is None else self.num_kv_blocks) * self.host_bytes_per_block
        return full + self.num_window_blocks * self.host_window_bytes_per_block

    @property
    def num_long_sequences(self) -> float:
        """How many sequences of max_model_len fit in the pools."""
        num_full = self.num_kv_tokens / self.max_model_len
        per_sequence = self.kv.window_blocks_per_sequence(self.max_model_len)
        return num_full if per_sequence == 0 else min(num_full, self.num_window_blocks / per_sequence)

    @property
    def num_unlimited_sequences(self) -> float:
        """How many would fit in the same memory if all layers kept all tokens."""
        bytes_per_block = max(1, self.host_bytes_per_block + self.host_window_bytes_per_block)
        return self.kv_bytes / bytes_per_block * self.kv.block_size / self.max_model_len

    @property
    def table_width(self) -> int:
        """Entries of a block table: one for each block of the longest sequence, and as many more for the window group.

        No sequence has more blocks than the pool, however long the model would let it become.
        """
        max_blocks = min(-(-self.max_model_len // self.kv.block_size), self.num_kv_blocks)
        return max_blocks if self.kv.window_tokens is None else 2 * max_blocks

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that fit in the pool."""
        return self.num_kv_blocks * self.kv.block_size

    @property
    def needed_bytes(self) -> int:
        """Bytes of weights, activations, KV pool and recurrent states together."""
        return self.host_weight_bytes + self.activation_bytes + self.kv_bytes + self.state_bytes

    @property
    def fits(self) -> bool:
        """Whether weights, activations, KV pool and recurrent states fit into the available memory together."""
        return self.needed_bytes <= self.available_bytes

    def describe(self) -> str:
        """Return the plan as a few lines for people."""
        return "\n".join(
            (
                f"memory      {format_bytes(self.available_bytes)} available"
                + ("" if self.fits else ": THE MODEL DOES NOT FIT"),
                f"weights     {format_bytes(self.host_weight_bytes)}{self._describe_ranks()}",
                *self._describe_offload(),
                *self._describe_pinned(),
                f"activations {format_bytes(self.activation_bytes)} at most in one step (estimate)",
                f"KV cache    {format_bytes(self.kv_bytes)}: {self.num_kv_blocks:,} blocks of {self.kv.block_size} "
                f"tokens, {self.num_kv_tokens:,} tokens, {self.num_long_sequences:.1f} sequences of "
                f"{self.max_model_len:,} ({format_bytes(self.kv.bytes_per_token)} a token, {self.kv.format_name})",
                *self._describe_places(),
                *self._describe_windows(),
                *self._describe_states(),
            )
        )

    def _describe_places(self) -> tuple[str, ...]:
        if self.num_homes > 1:
            return (
                f"homes       {self.num_homes} homes attend to sequences of their own: each holds {self.num_local_blocks:,} "
                f"blocks, {self.num_local_blocks * self.kv.block_size:,} tokens, the longest that a sequence can be",
            )
        if self.num_block_places == 1:
            return ()
        return (
            f"context     {self.num_block_places} ranks share the tokens of a sequence, {CONTEXT_CHUNK_TOKENS} in turn: each "
            f"holds {self.num_local_blocks:,} blocks, {self.num_local_blocks * self.kv.block_size:,} tokens",
        )

    def _describe_windows(self) -> tuple[str, ...]:
        if self.kv.window_tokens is None:
            return ()
        return (
            f"windows     {self.num_window_blocks:,} blocks for {sum(self.kv.is_windowed)} of {self.kv.num_layers} "
            f"layers, which keep the last {self.kv.window_tokens:,} tokens; with all tokens in all layers "
            f"{self.num_unlimited_sequences:.1f} sequences would fit",
        )

    def _describe_offload(self) -> tuple[str, ...]:
        if self.offloaded_bytes == 0:
            return ()
        return (f"offloaded   {format_bytes(self.offloaded_bytes)} of weights in host memory, copied before each use",)

    def _describe_pinned(self) -> tuple[str, ...]:
        return (f"host tier   {format_bytes(self.pinned_bytes)} of pinned host memory",) if self.pinned_bytes else ()

    def _describe_ranks(self) -> str:
        host = self.host
        if host is None:
            return ""
        where = "all on this host" if host.num_ranks == host.num_all_ranks else "on this host"
        return f" of {host.num_ranks} of {host.num_all_ranks} ranks, {where}; {format_bytes(self.weight_bytes)} in one process"

    def _describe_states(self) -> tuple[str, ...]:
        if self.num_states == 0:
            return ()
        bytes_per_state = (self.kv if self.host is None else self.host).bytes_per_state
        return (
            f"states      {format_bytes(self.state_bytes)}: {self.num_states:,} recurrent states of "
            f"{format_bytes(bytes_per_state)}, {self.num_state_checkpoints:,} of them checkpoints of prefixes",
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


def parse_bytes(text: str) -> int:
    """Return the bytes that a text like 512MiB, 1.5 GiB, 2GB or 1048576 stands for. Raises ConfigError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"must be a size like 4GiB, 512MiB or a number of bytes, got {text[:100]!r}")
    prefix, is_binary = (found[2] or " ").upper(), bool(found[3])
    return int(float(found[1]) * (1024 if is_binary else 1000) ** " KMGT".index(prefix))


def format_bytes(num_bytes: float) -> str:
    """Return a size for people: 512 B, 1.5 KiB, 23.4 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
