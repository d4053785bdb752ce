"""Step times of a model on several devices, from counted bytes, operations and collectives; one figure for each layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from quire.base.errors import ConfigError
from quire.contracts.expert_options import is_float8_step
from quire.contracts.model_spec import LayerSpec, ModelSpec, MoeSpec
from quire.planner.expert_exchange import (
    EXCHANGED_BYTES,
    HALVES_ROWS,
    ExpertLinks,
    Traffic,
    dispatch_and_combine,
    seconds_in_halves,
)
from quire.planner.hardware import HARDWARE, Hardware, find_hardware
from quire.planner.model_shape import ModelShape
from quire.planner.step_time import StepWork, step_bytes, step_flops

_PART = re.compile(r"(tp|ep|pp|dp)([1-9][0-9]{0,4})")
_CLUSTER = re.compile(r"(.+?)x([1-9][0-9]{0,4})")


@dataclass(frozen=True, slots=True)
class Layout:
    """How devices share a model.

    num_tensor    ranks that share every layer; has_whole_experts: each of them holds experts whole, the rest is sharded
    num_stages    pipeline stages
    num_replicas  that divide the sequences
    """

    num_tensor: int = 1
    has_whole_experts: bool = False
    num_stages: int = 1
    num_replicas: int = 1

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Return the layout of "tp4", "ep8", "pp2", "dp2" or several of them ("tp4xdp2"). Raises ConfigError."""
        found: dict[str, int] = {}
        for part in text.split("x"):
            match = _PART.fullmatch(part)
            if match is None or match[1] in found:
                raise ConfigError(
                    f"--layout must be tpN, epN (tensor-parallel ranks with whole experts), ppN, dpN, each once, or several "
                    f"with x between (tp4xdp2), got {text!r}"
                )
            found[match[1]] = int(match[2])
        if {"tp", "ep"} <= found.keys():
            raise ConfigError(f"--layout must have tp or ep: epN are N tensor-parallel ranks with whole experts; got {text!r}")
        return cls(found.get("tp", found.get("ep", 1)), "ep" in found, found.get("pp", 1), found.get("dp", 1))

    @property
    def num_devices(self) -> int:
        """Devices of all replicas."""
        return self.num_tensor * self.num_stages * self.num_replicas

    @property
    def name(self) -> str:
        """As `parse` takes it."""
        kind = "ep" if self.has_whole_experts else "tp"
        parts = ((kind, self.num_tensor), ("pp", self.num_stages), ("dp", self.num_replicas))
        return "x".join(f"{name}{count}" for name, count in parts if count > 1) or "tp1"


def parse_cluster(text: str) -> tuple[Hardware, int]:
    """Return the device and the number of them of "H100x8"; one, if no number is given. Raises ConfigError."""
    match = None if text.lower() in HARDWARE else _CLUSTER.fullmatch(text)
    return (find_hardware(text), 1) if match is None else (find_hardware(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the ranks of a tensor-parallel group exchange in a layer, or in a step: collectives, and bytes that each rank
    receives for a token."""

    num_calls: int
    num_bytes: float

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.num_calls + other.num_calls, self.num_bytes + other.num_bytes)


def gathered_widths(layer: LayerSpec, hidden_size: int, has_whole_experts: bool) -> list[int]:
    """Return the values of a token that each collective of a layer gathers, where every weight is sharded by its outputs."""
    attention, mlp = layer.attention, layer.mlp
    head = attention.head_dim if attention.latent is None else attention.latent.value_dim
    widths = [attention.num_heads * head, hidden_size]
    if not isinstance(mlp, MoeSpec):
        return [*widths, mlp.intermediate_size, hidden_size]
    if mlp.shared is not None:
        widths += [mlp.shared.intermediate_size, hidden_size]
    inner = [] if has_whole_experts else [mlp.top_k * mlp.expert.intermediate_size]
    return [*widths, *inner, mlp.top_k * hidden_size]


def layer_exchange(layer: LayerSpec, hidden_size: int, layout: Layout, is_gathered: bool, value_bytes: int) -> Exchange:
    """Return what a layer exchanges.

    is_gathered  weights are sharded by their outputs and results are gathered, as on CPUs and with deterministic; otherwise
                 two all-reduces in a ring
    """
    size = layout.num_tensor
    if size == 1:
        return Exchange(0, 0.0)
    others = (size - 1) / size * value_bytes
    if is_gathered:
        widths = gathered_widths(layer, hidden_size, layout.has_whole_experts)
        return Exchange(len(widths), sum(widths) * others)
    return Exchange(2, 2 * 2 * hidden_size * others)


def around_experts(layer: LayerSpec, hidden_size: int, layout: Layout, is_gathered: bool, value_bytes: int) -> Exchange:
    """Return what a layer exchanges in addition to the rows of its experts.

    Its ranks add up attention for their rows (reduce-scatter), gather the routes, and gather the rows of the next layer. With
    is_gathered all have all rows: attention and its output are gathered, and the results of the experts.
    """
    assert isinstance(layer.mlp, MoeSpec)
    others = (layout.num_tensor - 1) / layout.num_tensor
    shared = layer.mlp.shared
    if is_gathered:
        widths = [*gathered_widths(layer, hidden_size, True)[:-1], hidden_size]
        return Exchange(len(widths), sum(widths) * others * value_bytes)
    routes = Exchange(1, 8 * layer.mlp.top_k * others)
    num_rows = 2 if shared is None else 4  # a shared expert reads all rows, and its output is added up
    return routes + Exchange(num_rows, num_rows * hidden_size * others * value_bytes)


def step_exchange(spec: ModelSpec, layout: Layout, is_gathered: bool, value_bytes: int) -> Exchange:
    """Return what all layers of a step exchange, with the rows of the embedding and the logits of every token."""
    total = Exchange(0, 0.0)
    for layer in spec.layers:
        total += layer_exchange(layer, spec.hidden_size, layout, is_gathered, value_bytes)
    if layout.num_tensor > 1:
        others = (layout.num_tensor - 1) / layout.num_tensor * value_bytes
        total += Exchange(2, (spec.hidden_size + spec.vocab_size) * others)
    return total


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences that decode at the same time on all devices together; imbalance: max/mean of the ranks' experts."""

    num_sequences: int
    context_len: int
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        for name in ("num_sequences", "context_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be an integer >= 1, got {getattr(self, name)}")
        if not self.imbalance >= 1:
            raise ConfigError(f"imbalance must be a number >= 1, got {self.imbalance}")


@dataclass(frozen=True, slots=True)
class LayoutTime:
    """A decode step of one layout.

    step_s            from a token to the next one of the same sequence: with stages, through all of them
    read_bytes        of weights, by the device that reads the most, in a step
    exchange_bytes    that a rank receives for a token in a step; num_collectives: of a step
    compute_s, exchange_s, fixed_s   the parts of step_s; exchange_s: what computing does not hide
    held_bytes        of weights on a device; fits: they and the cache of its sequences are within its memory
    network_bytes     of exchange_bytes, those from other hosts
    hidden_s          of exchanges while the experts compute
    """

    layout: Layout
    step_s: float
    tokens_per_s: float
    read_bytes: float
    exchange_bytes: float
    num_collectives: int
    compute_s: float
    exchange_s: float
    fixed_s: float
    held_bytes: float
    fits: bool
    network_bytes: float = 0.0
    hidden_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Exchanged:
    """What a step exchanges: seconds that computing does not hide, and does; and seconds that experts compute in addition, as
    each half reads their weights."""

    traffic: Traffic
    exposed_s: float
    hidden_s: float = 0.0
    added_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ParallelSimulation:
    """Predicts decode steps of a model on devices of one kind.

    value_bytes      of what ranks exchange, 2 on GPUs, 4 on CPUs
    product_bytes_per_s  bytes of weights per second that a device's products reach at the rows of the step, where that was
                     measured; None: the larger of the times for the bytes and for the operations, at the device's rates
    attention_s      of all layers of a step, where that was measured; None: from bytes and operations, too
    links            how ranks on GPUs with whole experts exchange rows
    """

    spec: ModelSpec
    shape: ModelShape
    hardware: Hardware
    precision: str
    kv_format: str
    is_gathered: bool
    value_bytes: int = 2
    product_bytes_per_s: float | None = None
    attention_s: float | None = None
    links: ExpertLinks = field(default_factory=ExpertLinks)

    def step(self, layout: Layout, load: Load) -> LayoutTime:
        """Return the time of a layout. Raises ConfigError for one that has more ranks or stages than there is to divide."""
        self._check(layout, load)
        group = -(-load.num_sequences // layout.num_replicas)  # of a replica
        batch = -(-group // layout.num_stages)  # of a step: each stage has one in flight
        work = StepWork.of_spans([(load.context_len - 1, 1)] * batch, self.shape.windows, batch)
        share = 1 / layout.num_tensor
        dense, experts = self._weights_read(batch)
        busiest = share * (load.imbalance if layout.has_whole_experts else 1.0)
        read = dense * share + experts * busiest
        linear_flops, attention_flops = step_flops(self.shape, work)
        active_experts = self._expert_flops(batch)
        flops = (linear_flops - active_experts) * share + active_experts * busiest
        cached = step_bytes(self.shape, work, self.precision, self.kv_format)[1] * share
        device, reached = self.hardware, self.hardware.efficiency
        bandwidth, peak = device.bytes_per_s * reached.bandwidth, reached.compute
        linear_s = max(read / bandwidth, flops / (device.flops_of(self.precision) * peak))
        if self.product_bytes_per_s is not None:
            linear_s = read / self.product_bytes_per_s
        attention_s = self.attention_s
        if attention_s is None:
            attention_s = max(cached / bandwidth, attention_flops * share / (device.flops_per_s * peak))
        exchange = self._exchange(layout, batch, busiest)
        rows = Traffic(1, self.shape.hidden_size * self.value_bytes)
        exchange_s = exchange.exposed_s + (layout.num_stages - 1) * self._seconds(rows, batch)
        layer_s = reached.fused_layer_s if batch <= reached.few_tokens else reached.layer_s
        fixed_s = reached.step_s + layer_s * self.shape.num_layers + reached.sequence_s * batch
        compute_s = linear_s + attention_s + exchange.added_s
        step_s = compute_s + exchange_s + fixed_s
        held = self.shape.weight_bytes[self.precision] / (layout.num_tensor * layout.num_stages)
        kv = group * self.shape.kv_bytes_of(load.context_len, self.kv_format) / (layout.num_tensor * layout.num_stages)
        return LayoutTime(
            layout,
            step_s,
            load.num_sequences / step_s,
            read / layout.num_stages,
            exchange.traffic.local_bytes + exchange.traffic.network_bytes,
            exchange.traffic.num_calls,
            compute_s,
            exchange_s,
            fixed_s,
            held,
            held + kv <= device.memory_bytes,
            exchange.traffic.network_bytes,
            exchange.hidden_s,
        )

    def _seconds(self, traffic: Traffic, num_tokens: int) -> float:
        """Return how long an exchange of so many tokens takes; what comes from other hosts arrives next to the rest."""
        rate = self.hardware.link_bytes_per_s or self.hardware.bytes_per_s / 2
        network_s = traffic.network_bytes / self.links.network_bytes_per_s
        received_s = num_tokens * max(traffic.local_bytes / rate, network_s)
        return traffic.num_calls * self.hardware.efficiency.collective_s + received_s

    def exchanges_rows(self, layout: Layout, batch: int) -> bool:
        """Return whether ranks with whole experts exchange rows in steps of so many tokens, as GPUs do in large ones."""
        is_large = batch * self.spec.hidden_size * self.value_bytes > EXCHANGED_BYTES
        return layout.has_whole_experts and layout.num_tensor > 1 and self.hardware.kind == "gpu" and is_large

    def _exchange(self, layout: Layout, batch: int, busiest: float) -> _Exchanged:
        """Return what a step of so many tokens exchanges; busiest: the part of the experts' work that the busiest rank has."""
        if not self.exchanges_rows(layout, batch):
            exchange = step_exchange(self.spec, layout, self.is_gathered, self.value_bytes)
            traffic = self._placed(exchange)
            return _Exchanged(traffic, self._seconds(traffic, batch))
        ends = self._placed(step_exchange(replace(self.spec, layers=()), layout, self.is_gathered, self.value_bytes))
        total = _Exchanged(ends, self._seconds(ends, batch))
        mixtures = [layer for layer in self.spec.layers if isinstance(layer.mlp, MoeSpec)]
        for layer in self.spec.layers:
            total = _joined(total, self._layer_exchange(layer, layout, batch, busiest, len(mixtures)))
        return total

    def _layer_exchange(self, layer: LayerSpec, layout: Layout, batch: int, busiest: float, num_mixtures: int) -> _Exchanged:
        if not isinstance(layer.mlp, MoeSpec):
            traffic = self._placed(layer_exchange(layer, self.spec.hidden_size, layout, self.is_gathered, self.value_bytes))
            return _Exchanged(traffic, self._seconds(traffic, batch))
        around = self._placed(around_experts(layer, self.spec.hidden_size, layout, self.is_gathered, self.value_bytes))
        sizes = self.spec.hidden_size, layout.num_tensor, self.links, self.value_bytes, self.is_gathered
        is_float8 = self.precision == "fp8" and self.hardware.has_float8 and is_float8_step(layer.mlp, batch)
        dispatch, combine = dispatch_and_combine(layer.mlp, *sizes, is_float8)
        around_s, whole_s = self._seconds(around, batch), self._seconds(dispatch, batch) + self._seconds(combine, batch)
        halves = self.links.halves
        if not (batch // layout.num_tensor >= HALVES_ROWS if halves is None else halves):
            return _Exchanged(around + dispatch + combine, around_s + whole_s)
        half = -(-batch // 2)
        experts_s, half_s = (self._experts_s(count, busiest) / num_mixtures for count in (batch, half))
        there_s, back_s = self._seconds(dispatch, half), self._seconds(combine, half)
        exposed_s = seconds_in_halves(there_s, half_s, back_s) - 2 * half_s
        traffic = around + dispatch + combine + Traffic(dispatch.num_calls + combine.num_calls)
        hidden_s = 2 * (there_s + back_s) - exposed_s
        return _Exchanged(traffic, around_s + exposed_s, hidden_s, 2 * half_s - experts_s)

    def _placed(self, exchange: Exchange) -> Traffic:
        """Return the traffic of collectives of all ranks: with several hosts the network bounds them."""
        is_far = self.links.num_hosts > 1
        local, far = (0.0, exchange.num_bytes) if is_far else (exchange.num_bytes, 0.0)
        return Traffic(exchange.num_calls, local, far)

    def _experts_s(self, num_tokens: int, busiest: float) -> float:
        """Return the seconds in which the experts of all layers compute a step."""
        read, flops = self._weights_read(num_tokens)[1] * busiest, self._expert_flops(num_tokens) * busiest
        device, reached = self.hardware, self.hardware.efficiency
        return max(read / (device.bytes_per_s * reached.bandwidth), flops / (device.flops_of(self.precision) * reached.compute))

    def _check(self, layout: Layout, load: Load) -> None:
        for name, count, most, what in (
            ("stages", layout.num_stages, self.shape.num_layers, "layers"),
            ("ranks", layout.num_tensor, max(layer.attention.num_heads for layer in self.spec.layers), "attention heads"),
            ("replicas", layout.num_replicas, load.num_sequences, "sequences"),
        ):
            if count > most:
                raise ConfigError(f"layout {layout.name} has {count} {name}, but there are {most} {what}")
        if layout.num_tensor % self.links.num_hosts:
            raise ConfigError(
                f"layout {layout.name} has {layout.num_tensor} ranks in a group, which cannot be divided among "
                f"{self.links.num_hosts} hosts"
            )
        if layout.has_whole_experts:
            counts = [layer.mlp.num_experts for layer in self.spec.layers if isinstance(layer.mlp, MoeSpec)]
            if not counts:
                raise ConfigError(f"layout {layout.name} places experts, but {self.shape.name} has none: use tp")
            if layout.num_tensor > min(counts):
                raise ConfigError(f"layout {layout.name} has {layout.num_tensor} ranks, but a layer has {min(counts)} experts")

    def _weights_read(self, num_tokens: int) -> tuple[float, float]:
        """Return the bytes of weights that a step reads: of experts, and of all else first."""
        per_weight = self.shape.weight_bytes[self.precision] / self.shape.num_parameters
        experts = per_weight * sum(group.num_parameters * group.share_read(num_tokens) for group in self.shape.experts)
        return self.shape.read_bytes(self.precision, num_tokens) - experts, experts

    def _expert_flops(self, num_tokens: int) -> float:
        return 2.0 * num_tokens * sum(group.num_parameters * group.top_k / group.num_experts for group in self.shape.experts)


def _joined(one: _Exchanged, other: _Exchanged) -> _Exchanged:
    return _Exchanged(
        one.traffic + other.traffic,
        one.exposed_s + other.exposed_s,
        one.hidden_s + other.hidden_s,
        one.added_s + other.added_s,
    )


def usual_layouts(num_devices: int, is_mixture: bool) -> list[Layout]:
    """Return the layouts of all devices that use them in one way, or tensor ranks in replicas."""
    found = [Layout(num_tensor=num_devices)]
    if is_mixture:
        found.append(Layout(num_tensor=num_devices, has_whole_experts=True))
    if num_devices > 1:
        found += [Layout(num_stages=num_devices), Layout(num_replicas=num_devices)]
    half = num_devices // 2
    if num_devices >= 4 and num_devices % 2 == 0:
        found += [Layout(num_tensor=half, num_replicas=2), Layout(num_tensor=half, num_stages=2)]
    return found


def describe_times(times: Sequence[LayoutTime], title: str) -> str:
    """Return a table."""
    lines = [
        title,
        f"{'layout':<12}{'step ms':>9}{'tokens/s':>10}{'compute':>9}{'exchange':>9}{'hidden':>8}{'fixed':>8}{'read MB':>10}"
        f"{'KB/token':>10}{'network':>9}{'collectives':>12}{'held GB':>9}",
    ]
    for one in times:
        seconds = ((one.compute_s, 9), (one.exchange_s, 9), (one.hidden_s, 8), (one.fixed_s, 8))
        parts = "".join(f"{value * 1e3:{width}.3f}" for value, width in seconds)
        received = f"{one.exchange_bytes / 1e3:10.1f}{one.network_bytes / 1e3:9.1f}"
        note = "" if one.fits else "  DOES NOT FIT"
        lines.append(
            f"{one.layout.name:<12}{one.step_s * 1e3:9.3f}{one.tokens_per_s:10.0f}{parts}{one.read_bytes / 1e6:10.1f}{received}"
            f"{one.num_collectives:12d}{one.held_bytes / 1e9:9.2f}{note}"
        )
    return "\n".join(lines)
