"""What `initwarm plan` shows: the calls, how many units they make, their memory, and what a server will miss."""

from __future__ import annotations

from typing import Any

from initwarm.buckets import Gap, coverage, hybrid_bucket
from initwarm.jsontext import printable
from initwarm.plan import Call, Plan, Scalar, TensorSpec, Unit
from initwarm.signatures import ROW_MAJOR

_SHOWN_GAPS = 4
_SHOWN_BUCKETS = 32


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """The normalised plan, itself a valid plan document."""
    return plan.to_json()


def render_plan(plan: Plan) -> str:
    """The plan for a person."""
    units = sum(len(call.buckets) for call in plan.calls)
    lines = [f"plan {plan.digest}", f"device {plan.device}, {len(plan.calls)} calls, {units} units"]
    if plan.parallel is not None:
        sizes = plan.parallel
        lines.append(f"ranks {sizes.world_size}: tp {sizes.tp} x pp {sizes.pp} x dp {sizes.dp}, ep {sizes.ep}")
    lines += [_memory_line(plan)] if plan.calls else ["nothing to tune"]
    for index, call in enumerate(plan.calls):
        lines += _call_lines(index, call)
    return "\n".join(lines + [f"warning: {line}" for line in plan_warnings(plan)])


def _memory_line(plan: Plan) -> str:
    greatest = (Unit(index, call, call.buckets[-1]) for index, call in enumerate(plan.calls))
    largest = max(greatest, key=lambda unit: unit.num_bytes)
    return f"memory {_size(largest.num_bytes)} of inputs at most, in {largest.name}"


def _call_lines(index: int, call: Call) -> list[str]:
    where = "".join(
        f", only {name} {', '.join(map(str, chosen))}"
        for name, chosen in (("stages", call.stages), ("ranks", call.ranks))
        if chosen is not None
    )
    collectives = ", with collectives" if call.collectives else ""
    lines = [f"calls[{index}] {printable(call.call)}{where}{collectives}"]
    lines += [f"  {name}: {_tensor(tensor)}" for name, tensor in call.tensors.items()]
    lines += [f"  {name}: {_scalar(value)}" for name, value in call.scalars.items()]
    return [*lines, f"  buckets: {_buckets(call.buckets)}"]


def _tensor(tensor: TensorSpec) -> str:
    layout = "" if tensor.layout == ROW_MAJOR else f" {tensor.layout}"
    return f"{tensor.dtype} [{', '.join(map(str, tensor.shape))}]{layout}"


def _scalar(value: Scalar) -> str:
    return printable(value) if isinstance(value, str) else str(value)


def _buckets(buckets: tuple[int, ...]) -> str:
    if len(buckets) <= _SHOWN_BUCKETS:
        return ", ".join(map(str, buckets))
    return f"{', '.join(map(str, buckets[:_SHOWN_BUCKETS]))}, ... {buckets[-1]} ({len(buckets)} in all)"


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def plan_warnings(plan: Plan) -> list[str]:
    """What a server will miss, one line for all calls that have the same buckets."""
    calls: dict[tuple[int, ...], list[int]] = {}
    for index, call in enumerate(plan.calls):
        calls.setdefault(call.buckets, []).append(index)
    return [
        f"{_calls_text(indexes)}: {warning}"
        for buckets, indexes in calls.items()
        for warning in bucket_warnings(buckets)
    ]


def _calls_text(indexes: list[int]) -> str:
    return f"calls[{indexes[0]}]" + (f" and {len(indexes) - 1} more" if len(indexes) > 1 else "")


def bucket_warnings(buckets: tuple[int, ...]) -> tuple[str, ...]:
    """What a server with up to the greatest of these buckets will miss, what is tuned in vain, and the fixes.

    Args:
        buckets: of one call, ascending, in tokens.
    """
    greatest = buckets[-1]
    on_grid = [bucket for bucket in buckets if hybrid_bucket(bucket) == bucket]
    covered = on_grid[-1] if on_grid else 0
    unused = [bucket for bucket in buckets if bucket not in on_grid and bucket != greatest]
    warnings = []
    if holes := coverage(buckets, covered):
        warnings.append(
            f"a server will miss at {_ranges(holes)} tokens: FlashInfer rounds them up to buckets that are not in the "
            f"plan; use {{max: {covered}}}"
        )
    if covered < greatest:
        cap = f", or cap the server's max_num_batched_tokens at {covered}" if covered else ""
        warnings.append(
            f"a server will miss at {covered + 1}..{greatest} tokens: {greatest} is not on FlashInfer's grid, so it is "
            f"tuned and never found; use {{max: {hybrid_bucket(greatest)}}}{cap}"
        )
    if unused:
        warnings.append(f"not on FlashInfer's grid, so tuned and never found: {_buckets(tuple(unused))}; remove them")
    return tuple(warnings)


def _ranges(gaps: tuple[Gap, ...]) -> str:
    shown = ", ".join(f"{gap.first}..{gap.last}" for gap in gaps[:_SHOWN_GAPS])
    return shown + (", ..." if len(gaps) > _SHOWN_GAPS else "")
