"""The plan: layouts of a model on devices, the best of them and why, its cost, and what would change it most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from quire.base.errors import ConfigError
from quire.planner.apart import ApartPlan, plan_apart
from quire.planner.capacity import Cost, Objectives, Operation, Replica, cost_of, replicas_needed
from quire.planner.hardware import Hardware
from quire.planner.memory import DeviceMemory, Lengths, Limits, divide_memory, usable_kv_formats
from quire.planner.model_shape import ModelShape
from quire.planner.step_time import RooflineTime, StepTime


@dataclass(frozen=True, slots=True)
class Question:
    """What to plan for. Raises ConfigError.

    rate       requests per second; None: unknown, so that no number of replicas is derived
    price      per device and hour, in any currency; None: no costs
    hit_share  of prompt tokens that the prefix cache is expected to have
    measured   times of this machine, for one device; None: the hardware's table
    """

    shape: ModelShape
    hardware: Hardware
    num_devices: int
    lengths: Lengths
    limits: Limits
    precision: str
    kv_format: str
    objectives: Objectives
    rate: float | None = None
    price: float | None = None
    hit_share: float = 0.0
    measured: StepTime | None = None

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise ConfigError(f"--num must be an integer >= 1, got {self.num_devices}")
        for option, value in (("--rate", self.rate), ("--price", self.price)):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{option} must be a number above 0, got {value}")
        if not 0 <= self.hit_share < 1:
            raise ConfigError(f"--prefix-hit-share must be at least 0 and below 1, got {self.hit_share}")
        longest = self.lengths.p95
        if longest > self.limits.max_model_len:
            raise ConfigError(
                f"the 95th percentile of the workload's lengths (prompt and output) is {longest} tokens, but the context "
                f"(--max-model-len) has {self.limits.max_model_len}: shorten the workload (--input-len and --output-len; "
                "--max-input-len and --max-output-len for a trace), or raise --max-model-len where the model takes more"
            )


@dataclass(frozen=True, slots=True)
class Layout:
    """num_tensor_parallel x num_pipeline_stages devices a replica, and num_replicas of these."""

    num_tensor_parallel: int
    num_pipeline_stages: int
    num_replicas: int

    @property
    def num_devices(self) -> int:
        """Devices of one replica."""
        return self.num_tensor_parallel * self.num_pipeline_stages

    @property
    def name(self) -> str:
        """The layout in a few words."""
        parts = [f"{self.num_replicas} x"] if self.num_replicas > 1 else []
        if self.num_tensor_parallel > 1:
            parts.append(f"TP {self.num_tensor_parallel}")
        if self.num_pipeline_stages > 1:
            parts.append(f"PP {self.num_pipeline_stages}")
        return " ".join(parts) + (" 1 device" if self.num_devices == 1 else "")


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """One layout with its figures; operation: at the largest batch within the objectives, None where there is none.

    problem  why it cannot be used, or ""
    """

    layout: Layout
    memory: DeviceMemory
    users_p50: int
    users_p95: int
    batch_by_memory: int
    batch_by_objective: int
    operation: Operation | None
    cost: Cost | None
    replicas_needed: int | None
    problem: str

    @property
    def requests_per_s(self) -> float:
        """Of all of its replicas together, at full use."""
        return 0.0 if self.operation is None else self.operation.requests_per_s * self.layout.num_replicas


@dataclass(frozen=True, slots=True)
class Change:
    """What the best layout's capacity would be with one thing changed: ratio to the plan's."""

    name: str
    requests_per_s: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer. best: None where no layout can be used; apart: its replicas divided into prefill and decode, if possible."""

    question: Question
    layouts: tuple[LayoutPlan, ...]
    best: LayoutPlan | None
    reason: str
    changes: tuple[Change, ...]
    apart: ApartPlan | None = None

    @property
    def kv_formats(self) -> list[str]:
        """The KV formats that the model may have on this hardware."""
        hardware = self.question.hardware
        quantised = usable_kv_formats(self.question.shape, hardware.kind == "gpu", hardware.has_float8)
        return list(dict.fromkeys((self.question.shape.dtype, self.question.kv_format, *quantised)))

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, as JSON has them."""
        question = self.question
        shape = question.shape
        return {
            "model": shape.name,
            "num_parameters": shape.num_parameters,
            "hardware": asdict(question.hardware),
            "is_measured": question.measured is not None,
            "num_devices": question.num_devices,
            "precision": question.precision,
            "kv_cache_dtype": question.kv_format,
            "weight_bytes": shape.weight_bytes,
            "kv_bytes_per_token": {name: shape.kv_bytes_per_token(name) for name in self.kv_formats},
            "kv_bytes_of_sequence": {
                "p50": shape.kv_bytes_of(question.lengths.p50, question.kv_format),
                "p95": shape.kv_bytes_of(question.lengths.p95, question.kv_format),
            },
            "lengths": asdict(question.lengths),
            "limits": asdict(question.limits),
            "objectives": asdict(question.objectives),
            "rate": question.rate,
            "price": question.price,
            "layouts": [_layout_dict(one) for one in self.layouts],
            "best": None if self.best is None else _layout_dict(self.best),
            "reason": self.reason,
            "changes": [asdict(one) for one in self.changes],
            "apart": None if self.apart is None else asdict(self.apart),
        }


def _layout_dict(plan: LayoutPlan) -> dict[str, Any]:
    return {"name": plan.layout.name, "requests_per_s": plan.requests_per_s, **asdict(plan)}


def make_plan(question: Question) -> Plan:
    """Return the plan for a question. Raises ConfigError."""
    layouts = tuple(_plan_layout(question, layout) for layout in find_layouts(question))
    best, reason = _choose(question, layouts)
    if best is None:
        return Plan(question, layouts, None, reason, ())
    return Plan(question, layouts, best, reason, _find_changes(question, best), _plan_apart(question, best))


def _plan_apart(question: Question, best: LayoutPlan) -> ApartPlan | None:
    replica, _ = replica_of(question, best.layout)
    return plan_apart(
        replica,
        best.layout.num_replicas,
        question.lengths,
        question.objectives,
        question.shape.kv_bytes_per_token(question.kv_format),
        question.hardware.link_bytes_per_s,
        question.hit_share,
    )


def find_layouts(question: Question) -> list[Layout]:
    """Return the layouts that use all devices: tensor parallelism divides the KV heads, stages have a layer at least.

    A measurement is of one device, so that it answers for replicas only; so do layers that keep the model's KV format on CPUs.
    """
    num, shape = question.num_devices, question.shape
    is_whole = question.measured is not None or (shape.has_kept_layers and question.hardware.kind != "gpu")
    found = []
    for tensor in range(1, num + 1):
        for stages in range(1, num // tensor + 1):
            is_divided = num % (tensor * stages) == 0
            if not is_divided or shape.num_kv_heads % tensor or stages > shape.num_layers:
                continue
            if tensor * stages > 1 and is_whole:
                continue
            found.append(Layout(tensor, stages, num // (tensor * stages)))
    return found


def replica_of(question: Question, layout: Layout) -> tuple[Replica, DeviceMemory]:
    """Return one replica of a layout, and the memory of each of its devices."""
    memory = divide_memory(
        question.shape, question.hardware, question.limits, question.precision, question.kv_format, layout.num_devices
    )
    times = question.measured or RooflineTime(
        question.shape,
        question.hardware,
        question.precision,
        question.kv_format,
        layout.num_tensor_parallel,
        layout.num_pipeline_stages,
    )
    stages = layout.num_pipeline_stages
    return Replica(question.shape, times, question.limits, memory.num_kv_blocks, stages, memory.window), memory


def _plan_layout(question: Question, layout: Layout) -> LayoutPlan:
    lengths = question.lengths
    replica, memory = replica_of(question, layout)
    by_memory, by_objective = replica.largest_batch(lengths, question.objectives, question.hit_share)
    problem = ""
    if not memory.fits:
        problem = f"the model does not fit: {memory.missing_bytes / 1e9:.1f} GB a device are missing"
    elif by_memory == 0:
        problem = "no sequence of the mean length fits in the KV pool"
    elif by_objective == 0:
        one = replica.operate(1, lengths, question.hit_share)
        problem = (
            f"one request alone has TTFT {one.ttft_s * 1e3:.0f} ms and TPOT {one.step_s * 1e3:.1f} ms: over the objectives"
        )
    operation = None if problem else replica.operate(by_objective, lengths, question.hit_share)
    cost = needed = None
    if operation is not None:
        watts = None if question.hardware.watts is None else question.hardware.watts * layout.num_devices
        if question.price is not None:
            cost = cost_of(operation, question.price * layout.num_devices, watts)
        if question.rate is not None:
            needed = replicas_needed(question.rate, operation.requests_per_s)
    users = (replica.users(lengths.p50, lengths.num_shared), replica.users(lengths.p95, lengths.num_shared))
    return LayoutPlan(layout, memory, *users, by_memory, by_objective, operation, cost, needed, problem)


def _choose(question: Question, layouts: tuple[LayoutPlan, ...]) -> tuple[LayoutPlan | None, str]:
    """Return the layout that serves the most requests within the objectives, and why it is that one."""
    usable = [one for one in layouts if not one.problem]
    if not usable:
        problems = "; ".join(f"{one.layout.name}: {one.problem}" for one in layouts)
        return None, f"no layout can be used. {problems}"
    # Equal capacities (within a per cent) go to the layout with fewer devices a replica: it is simpler, and fails in part.
    most = max(one.requests_per_s for one in usable)
    best = min((one for one in usable if one.requests_per_s >= 0.99 * most), key=lambda one: one.layout.num_devices)
    limit = "memory" if best.batch_by_memory == best.batch_by_objective else "the objectives"
    if best.batch_by_objective >= question.limits.max_num_seqs:
        limit = "max_num_seqs"
    reason = (
        f"{best.layout.name} serves the most requests within the objectives ({best.requests_per_s:.2f}/s of "
        f"{question.num_devices} devices); its batch of {best.batch_by_objective} is limited by {limit}"
    )
    others = sorted((one for one in usable if one is not best), key=lambda one: -one.requests_per_s)
    if others:
        reason += f". Next: {others[0].layout.name} with {others[0].requests_per_s:.2f}/s"
    unusable = [one for one in layouts if one.problem]
    if unusable:
        reason += f". {unusable[0].layout.name} cannot be used: {unusable[0].problem}"
    return best, reason


def _find_changes(question: Question, best: LayoutPlan) -> tuple[Change, ...]:
    """Return what single changes do to the capacity of the best layout, the largest first."""
    variants: list[tuple[str, Callable[[], Question]]] = []
    if question.measured is None:
        variants += [
            (f"weights in {name}", lambda name=name: replace(question, precision=name))
            for name in question.shape.weight_bytes
            if name != question.precision
        ]
        variants += [
            (f"KV cache in {name}", lambda name=name: replace(question, kv_format=name))
            for name in usable_kv_formats(question.shape, question.hardware.kind == "gpu", question.hardware.has_float8)
            if name != question.kv_format
        ]
    variants.append((
        "half of the prompt tokens in the prefix cache",
        lambda: replace(question, hit_share=question.hit_share + (1 - question.hit_share) / 2),
    ))  # fmt: skip
    limits = question.limits
    doubled = replace(
        limits,
        max_num_seqs=2 * limits.max_num_seqs,
        max_num_batched_tokens=max(limits.max_num_batched_tokens, 2 * limits.max_num_seqs),
    )
    variants.append((f"max_num_seqs {doubled.max_num_seqs}", lambda: replace(question, limits=doubled)))
    objectives = question.objectives
    if objectives.ttft_s is not None or objectives.tpot_s is not None:
        loose = Objectives(*(None if limit is None else 2 * limit for limit in (objectives.ttft_s, objectives.tpot_s)))
        variants.append(("objectives twice as long", lambda: replace(question, objectives=loose)))
    found = []
    for name, make in variants:
        capacity = _plan_layout(make(), best.layout).requests_per_s
        found.append(Change(name, capacity, capacity / best.requests_per_s))
    return tuple(sorted(found, key=lambda change: -abs(change.ratio - 1.0)))
