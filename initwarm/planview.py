"""What `initwarm plan` shows: the calls, how many units they make, their memory, and what a server will miss."""

from __future__ import annotations

from typing import Any

from initwarm.buckets import coverage, hybrid_bucket
from initwarm.plan import Call, Plan, TensorSpec, Unit


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """The normalised plan, itself a valid plan document."""
    return plan.to_json()


def render_plan(plan: Plan) -> str:
    """The plan for a person."""
    units = [Unit(index, call, bucket) for index, call in enumerate(plan.calls) for bucket in call.buckets]
    lines = [f"plan {plan.digest}", f"device {plan.device}, {len(plan.calls)} calls, {len(units)} units"]
    if plan.parallel is not None:
        sizes = plan.parallel
        lines.append(
            f"parallel tp {sizes.tp} x pp {sizes.pp} x dp {sizes.dp} = {sizes.world_size} ranks, ep {sizes.ep}"
        )
    if not units:
        lines.append("nothing to tune")
    else:
        largest = max(units, key=lambda unit: unit.num_bytes)
        lines.append(f"largest unit: {largest.name}, {largest.num_bytes / 2**20:.1f} MiB of inputs")
    for index, call in enumerate(plan.calls):
        lines += _call_lines(index, call)
    return "\n".join(lines)


def warnings_of(call: Call) -> tuple[str, ...]:
    """Token counts below the greatest bucket for which a server will look and find nothing."""
    greatest = call.buckets[-1]
    gaps = coverage(call.buckets, greatest)
    if not gaps:
        return ()
    ranges = ", ".join(f"{gap.first}..{gap.last}" for gap in gaps[:4]) + (", ..." if len(gaps) > 4 else "")
    fix = f"add the missing buckets, or use {{max: {hybrid_bucket(greatest)}}}"
    if gaps[-1].last == greatest and hybrid_bucket(greatest) != greatest:
        below = max((bucket for bucket in call.buckets if hybrid_bucket(bucket) == bucket), default=1)
        fix = f"use max {hybrid_bucket(greatest)}, or cap the server's max_num_batched_tokens at {below}"
    return (f"a server will miss at {ranges} tokens: {fix}",)


def _call_lines(index: int, call: Call) -> list[str]:
    where = "".join(
        f", {name} {list(chosen)}" for name, chosen in (("stages", call.stages), ("ranks", call.ranks)) if chosen
    )
    count = len(call.buckets)
    lines = [f"calls[{index}] {call.call}: {count} buckets {call.buckets[0]}..{call.buckets[-1]}{where}"]
    lines += [f"  {name}: {_tensor(tensor)}" for name, tensor in call.tensors.items()]
    lines += [f"  {name}: {value}" for name, value in call.scalars.items()]
    return lines + [f"  warning: {warning}" for warning in warnings_of(call)]


def _tensor(tensor: TensorSpec) -> str:
    layout = "" if tensor.layout == "row_major" else " column_major"
    return f"{tensor.dtype} [{', '.join(map(str, tensor.shape))}]{layout}"
