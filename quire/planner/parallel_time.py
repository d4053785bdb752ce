"""Step times of a model on several devices, from counted bytes, operations and collectives; one figure for each layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from quire.base.errors import ConfigError
from quire.contracts.expert_options import is_float8_step
from quire.contracts.model_spec import LayerSpec, ModelSpec, MoeSpec
from quire.contracts.parallel import LEAST_DIVIDED_TOKENS
from quire.planner.expert_exchange import (
    EXCHANGED_BYTES,
    HALVES_ROWS,
    ExpertLinks,
    Traffic,
    dispatch_and_combine,
    seconds_in_halves,
)
from quire.planner.hardware import Hardware
from quire.planner.layout import Layout
from quire.planner.model_shape import KV_FORMATS, ModelShape
from quire.planner.rank_exchange import (
    Exchange,
    StepTokens,
    around_experts,
    context_exchange,
    layer_exchange,
    step_exchange,
)
from quire.planner.step_time import StepWork, step_bytes, step_flops

USED_MEMORY = 0.9
"""Of a device: the default of gpu_memory_utilization."""


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences of a step on all devices together, and the tokens of each; imbalance: max/mean of the ranks' experts.

    num_new  tokens of each sequence that the step computes, its last ones: 1 where it decodes, more of prompts
    """

    num_sequences: int
    context_len: int
    imbalance: float = 1.0
    num_new: int = 1

    def __post_init__(self) -> None:
        for name in ("num_sequences", "context_len", "num_new"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be an integer >= 1, got {getattr(self, name)}")
        if self.num_new > self.context_len:
            raise ConfigError(f"num_new must be at most context_len ({self.context_len}), got {self.num_new}")
        if not self.imbalance >= 1:
            raise ConfigError(f"imbalance must be a number >= 1, got {self.imbalance}")


@dataclass(frozen=True, slots=True)
class LayoutTime:
    """A step of one layout.

    step_s            from a token to the next one of the same sequence: with stages, through all of them
    read_bytes        of weights, by the device that reads the most, in a step
    exchange_bytes    that a rank receives for a token in a step; num_collectives: of a step
    compute_s, exchange_s, fixed_s   the parts of step_s; exchange_s: what computing does not hide
    held_bytes        of weights on a device; fits: they and the cache of its sequences are within its memory
    capacity_tokens   of all sequences, for which the rest of USED_MEMORY has keys and values, without what a step takes
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
    capacity_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ProductRates:
    """Bytes of weights per second that a device's products reach, measured: at the rows of the step; of attention, at the rows
    of a home; and of the output head, which one of the groups that divide prompts computes for all. None: as the first."""

    bytes_per_s: float
    attention: float | None = None
    head: float | None = None

    def seconds(self, read: float, attention: float, head: float) -> float:
        """Return the time of products that read so many bytes, of which so many are weights of attention and of the head."""
        apart_s = attention / (self.attention or self.bytes_per_s) + head / (self.head or self.bytes_per_s)
        return (read - attention - head) / self.bytes_per_s + apart_s


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
    """Predicts steps of a model on devices of one kind.

    value_bytes      of what ranks exchange, 2 on GPUs, 4 on CPUs
    rates            None: the larger of the times for the bytes and for the operations, at the device's rates
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
    rates: ProductRates | None = None
    attention_s: float | None = None
    links: ExpertLinks = field(default_factory=ExpertLinks)

    def step(self, layout: Layout, load: Load) -> LayoutTime:
        """Return the time of a layout. Raises ConfigError for one that has more ranks or stages than there is to divide."""
        self._check(layout, load)
        group = -(-load.num_sequences // layout.num_replicas)  # of a replica
        batch = -(-group // layout.num_stages)  # of a step: each stage has one in flight
        sizes = load.num_new, load.context_len, KV_FORMATS[self.kv_format][0], self.hardware.kind == "gpu"
        tokens = StepTokens(batch, *sizes)
        num_tokens, parts = batch * load.num_new, tokens.parts(layout)
        exchange = self._exchange(layout, tokens, self._busiest(layout, load))
        rows = Traffic(1, self.shape.hidden_size * self.value_bytes)
        exchange_s = exchange.exposed_s + (layout.num_stages - 1) * self._seconds(rows, num_tokens)
        device, reached = self.hardware, self.hardware.efficiency
        layer_s = reached.fused_layer_s if -(-num_tokens // parts) <= reached.few_tokens else reached.layer_s
        fixed_s = reached.step_s + layer_s * self.shape.num_layers + reached.sequence_s * batch
        read, computed_s = self._compute(layout, load, tokens)
        compute_s = computed_s + exchange.added_s
        step_s = compute_s + exchange_s + fixed_s
        attention = self._attention_bytes
        held = (self.shape.weight_bytes[self.precision] - attention) / layout.num_tensor + attention / layout.head_ranks
        held /= layout.num_stages
        kv_share = layout.kv_share(self.shape.num_kv_heads) / layout.num_stages
        kv = group * self.shape.kv_bytes_of(load.context_len, self.kv_format) * kv_share
        room = max(0.0, USED_MEMORY * device.memory_bytes - held)
        token_bytes = self.shape.kv_bytes_per_token(self.kv_format) * kv_share
        return LayoutTime(
            layout,
            step_s,
            load.num_sequences * load.num_new / step_s,
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
            int(layout.num_replicas * room / token_bytes) if token_bytes else 0,
        )

    @staticmethod
    def _busiest(layout: Layout, load: Load) -> float:
        """Return the part of the experts' work that the busiest rank has."""
        return (load.imbalance if layout.has_whole_experts else 1.0) / layout.num_tensor

    @property
    def _attention_bytes(self) -> float:
        """Weights of attention, which homes hold whole."""
        return self.shape.num_attention * self.shape.weight_bytes[self.precision] / self.shape.num_parameters

    def _compute(self, layout: Layout, load: Load, tokens: StepTokens) -> tuple[float, float]:
        """Return the bytes of weights that the busiest rank reads in a step, and how long it computes."""
        span, batch, parts = (load.context_len - load.num_new, load.num_new), tokens.num_sequences, tokens.parts(layout)
        num_tokens, share, busiest = batch * load.num_new, 1 / layout.num_tensor, self._busiest(layout, load)
        work = StepWork.of_spans([span] * batch, self.shape.windows, batch)
        dense, experts = self._weights_read(-(-num_tokens // parts))
        attention = self._attention_bytes
        read = (dense - attention) * share + attention / layout.head_ranks + experts * busiest
        linear_flops, attention_flops = step_flops(self.shape, work)
        active_experts, head_flops = self._expert_flops(num_tokens), 2.0 * self.shape.num_head * batch
        flops = (linear_flops - active_experts - head_flops) * share + active_experts * busiest
        flops = flops / parts + head_flops * share  # one of the groups that divide prompts has all logits
        cached = step_bytes(self.shape, work, self.precision, self.kv_format)[1] * layout.kv_share(self.shape.num_kv_heads)
        if load.num_new < LEAST_DIVIDED_TOKENS:
            cached /= parts  # a divided prompt is read by all
        device, reached = self.hardware, self.hardware.efficiency
        bandwidth, peak = device.bytes_per_s * reached.bandwidth, reached.compute
        if self.rates is None:
            linear_s = max(read / bandwidth, flops / (device.flops_of(self.precision) * peak))
        else:
            head = self.shape.num_head * self.shape.weight_bytes[self.precision] / self.shape.num_parameters * share
            linear_s = self.rates.seconds(read, attention / layout.head_ranks, head)
        attention_s = self.attention_s
        if attention_s is None:
            attention_s = max(cached / bandwidth, attention_flops * share / parts / (device.flops_per_s * peak))
        return read, linear_s + attention_s

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

    def _exchange(self, layout: Layout, tokens: StepTokens, busiest: float) -> _Exchanged:
        """Return what a step exchanges; busiest: the part of the experts' work that the busiest rank has."""
        batch, kinds = tokens.num_sequences * tokens.num_new, (self.is_gathered, self.value_bytes)
        if not self.exchanges_rows(layout, batch):
            traffic = self._placed(step_exchange(self.spec, layout, *kinds, tokens))
            return _Exchanged(traffic, self._seconds(traffic, batch))
        ends = self._placed(step_exchange(replace(self.spec, layers=()), layout, *kinds, tokens))
        total = _Exchanged(ends, self._seconds(ends, batch))
        mixtures = [layer for layer in self.spec.layers if isinstance(layer.mlp, MoeSpec)]
        for layer in self.spec.layers:
            context = self._placed(context_exchange(layer, layout, tokens, *kinds))
            total = _joined(total, _Exchanged(context, self._seconds(context, batch)))
            total = _joined(total, self._layer_exchange(layer, layout, batch, busiest, len(mixtures)))
        return total

    def _layer_exchange(self, layer: LayerSpec, layout: Layout, batch: int, busiest: float, num_mixtures: int) -> _Exchanged:
        if not isinstance(layer.mlp, MoeSpec):
            traffic = self._placed(layer_exchange(layer, self.spec.hidden_size, layout, self.is_gathered, self.value_bytes))
            return _Exchanged(traffic, self._seconds(traffic, batch))
        around = self._placed(around_experts(layer, self.spec.hidden_size, layout, self.is_gathered, self.value_bytes))
        sizes = layer.mlp, self.spec.hidden_size, layout.num_tensor, self.links, self.value_bytes
        is_float8 = self.precision == "fp8" and self.hardware.has_float8 and not self.is_gathered
        is_float8 = is_float8 and is_float8_step(layer.mlp, batch)
        dispatch, combine = dispatch_and_combine(*sizes, self.is_gathered, is_float8)
        if layout.num_homes > 1:  # a home sends its rows, with deterministic too
            dispatch = dispatch_and_combine(*sizes, False, is_float8)[0]
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
            ("ranks", layout.head_ranks, max(layer.attention.num_heads for layer in self.spec.layers), "attention heads"),
            ("replicas", layout.num_replicas, load.num_sequences, "sequences"),
            ("homes", layout.num_homes, load.num_sequences, "sequences"),
        ):
            if count > most:
                raise ConfigError(f"layout {layout.name} has {count} {name}, but there are {most} {what}")
        if self.hardware.kind == "gpu" and 1 < layout.num_homes < layout.num_tensor:
            raise ConfigError(f"layout {layout.name} has homes of {layout.head_ranks} ranks, but on GPUs each rank is a home")
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


def describe_times(times: Sequence[LayoutTime], title: str) -> str:
    """Return a table."""
    lines = [
        title,
        f"{'layout':<12}{'step ms':>9}{'tokens/s':>10}{'compute':>9}{'exchange':>9}{'hidden':>8}{'fixed':>8}{'read MB':>10}"
        f"{'KB/token':>10}{'network':>9}{'collectives':>12}{'held GB':>9}{'KV tokens':>12}",
    ]
    for one in times:
        seconds = ((one.compute_s, 9), (one.exchange_s, 9), (one.hidden_s, 8), (one.fixed_s, 8))
        parts = "".join(f"{value * 1e3:{width}.3f}" for value, width in seconds)
        received = f"{one.exchange_bytes / 1e3:10.1f}{one.network_bytes / 1e3:9.1f}"
        note = "" if one.fits else "  DOES NOT FIT"
        lines.append(
            f"{one.layout.name:<12}{one.step_s * 1e3:9.3f}{one.tokens_per_s:10.0f}{parts}{one.read_bytes / 1e6:10.1f}{received}"
            f"{one.num_collectives:12d}{one.held_bytes / 1e9:9.2f}{one.capacity_tokens:12,d}{note}"
        )
    return "\n".join(lines)
