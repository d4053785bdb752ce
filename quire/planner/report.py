"""The plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from quire.contracts.memory import format_bytes
from quire.planner.apart import ApartPlan
from quire.planner.capacity import Cost
from quire.planner.model_shape import ModelShape
from quire.planner.plan import LayoutPlan, Plan


def describe_plan(plan: Plan) -> str:
    """Return the plan for people."""
    question = plan.question
    lengths = (question.lengths.p50, question.lengths.p95)
    in_use = [format_bytes(question.shape.kv_bytes_of(length, question.kv_format)) for length in lengths]
    lines = [
        f"{question.shape.name} on {question.num_devices} x {question.hardware.label}",
        *describe_model(question.shape, question.precision, question.kv_format, plan.kv_formats),
        f"lengths     prompt {question.lengths.mean_input:,.0f}, output {question.lengths.mean_output:,.0f} tokens (mean); "
        f"both together {question.lengths.p50:,} (p50), {question.lengths.p95:,} (p95)",
        f"            of such sequences {' and '.join(in_use)} of KV are in use, windows counted",
        "",
        *_layout_table(plan),
        "",
        f"best        {plan.reason}",
    ]
    if plan.best is not None:
        lines += _best_lines(plan, plan.best)
        lines += ["", "what would change the capacity most:"]
        lines += [f"  {change.name}: {change.ratio:.2f} x ({change.requests_per_s:.2f}/s)" for change in plan.changes]
    return "\n".join(lines)


def describe_model(shape: ModelShape, precision: str, kv_format: str, kv_formats: Sequence[str]) -> list[str]:
    """Return the weights by precision and the KV of a token by format; what is planned with has a star."""
    weights = ", ".join(
        f"{name}{'*' if name == precision else ''} {format_bytes(size)}" for name, size in shape.weight_bytes.items()
    )
    cache = ", ".join(
        f"{name}{'*' if name == kv_format else ''} {format_bytes(shape.kv_bytes_per_token(name))}" for name in kv_formats
    )
    return [f"weights     {weights}", f"KV a token  {cache}"]


def _layout_table(plan: Plan) -> list[str]:
    head = ("layout", "users p50", "users p95", "batch mem", "batch SLO", "TPOT ms", "TTFT ms", "req/s", "out tok/s", "needed")
    rows = [_layout_row(one) for one in plan.layouts]
    table = [head, *rows]
    widths = [max(len(row[place]) for row in table) for place in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return lines + [f"  {one.layout.name}: {one.problem}" for one in plan.layouts if one.problem]


def _layout_row(one: LayoutPlan) -> tuple[str, ...]:
    operation = one.operation
    users = (one.layout.name, str(one.users_p50), str(one.users_p95), str(one.batch_by_memory), str(one.batch_by_objective))
    if operation is None:
        return (*users, "-", "-", "-", "-", "-")
    return (
        *users,
        f"{operation.step_s * 1e3:.1f}",
        f"{operation.ttft_s * 1e3:.0f}",
        f"{one.requests_per_s:.2f}",
        f"{operation.output_tokens_per_s * one.layout.num_replicas:,.0f}",
        "-" if one.replicas_needed is None else str(one.replicas_needed),
    )


def _best_lines(plan: Plan, best: LayoutPlan) -> list[str]:
    question = plan.question
    lines = [f"memory      {best.memory.describe()}"]
    if best.replicas_needed is not None and question.rate is not None:
        devices = best.replicas_needed * best.layout.num_devices
        verdict = "enough" if devices <= question.num_devices else f"{devices - question.num_devices} more than there are"
        lines.append(
            f"needed      {_count(best.replicas_needed, 'replica')} ({_count(devices, 'device')}, {verdict}) for "
            f"{question.rate:.3g} requests/s at 80% of their capacity"
        )
        if question.price is not None:
            per_request = devices * question.price / 3600.0 / question.rate
            lines.append(f"            at that rate {per_request:.6f} per request, {devices * question.price:.2f} per hour")
    if plan.apart is not None:
        lines += _apart_lines(plan.apart, best)
    if best.cost is not None:
        lines += _cost_lines(best.cost)
    return lines


def _apart_lines(apart: ApartPlan, best: LayoutPlan) -> list[str]:
    roles = f"{_count(apart.num_prefill, 'replica')} for prefill and {apart.num_decode} for decode (batch {apart.batch})"
    ratio = apart.requests_per_s / best.requests_per_s
    return [
        f"apart       {roles} would serve {apart.requests_per_s:.2f}/s, {ratio:.2f} x of together, limited by {apart.limit}:",
        f"            TTFT {apart.ttft_s * 1e3:.0f} ms, TPOT {apart.tpot_s * 1e3:.1f} ms without prompts of others",
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _cost_lines(cost: Cost) -> list[str]:
    lines = [
        f"cost        {cost.per_million_input:.4f} per million tokens in, {cost.per_million_output:.4f} out "
        f"({cost.per_million_total:.4f} of both together), {cost.per_request:.6f} per request, at full use of a replica",
        f"            {cost.per_user_hour:.6f} per user (of those that run at the same time) and hour",
    ]
    if cost.kwh_per_million_output is not None:
        lines.append(
            f"energy      {cost.joules_per_output_token:.3g} J per output token, "
            f"{cost.kwh_per_million_output:.3g} kWh per million, at the devices' full power"
        )
    return lines
