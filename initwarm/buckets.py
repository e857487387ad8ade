"""The token counts that FlashInfer tunes, and what a server asks for between them.

A server's look-up rounds its number of tokens up to the hybrid grid: powers of two up to 256, then steps of 256 up to
2048, of 512 up to 4096, then powers of two again. What was tuned at another number is never found.

Source:
    FlashInfer 0.6.10 to 0.7.4, fused_moe/utils.py: get_hybrid_num_tokens_buckets, map_to_hybrid_bucket_uncapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_POWERS_END = 256
_STEPS = ((2048, 256), (4096, 512))


def hybrid_bucket(num_tokens: int) -> int:
    """The bucket that a look-up with this many tokens asks for."""
    if num_tokens <= 1:
        return 1
    if num_tokens > _POWERS_END:
        for end, step in _STEPS:
            if num_tokens <= end:
                return -(-num_tokens // step) * step
    return 1 << (num_tokens - 1).bit_length()


def hybrid_buckets(max_num_tokens: int) -> tuple[int, ...]:
    """The buckets up to a maximum of at least one token, which is always the last one, on the grid or not."""
    buckets = []
    bucket = 1
    while bucket < max_num_tokens:
        buckets.append(bucket)
        bucket = hybrid_bucket(bucket + 1)
    return (*buckets, max_num_tokens)


def replay_points(buckets: Sequence[int]) -> tuple[int, ...]:
    """Token counts that prove a plan: each bucket, and one point below each bucket whose neighbour is in the plan too.

    A point between two neighbours of the grid is rounded up to the greater one, so it must hit if both were tuned. A
    bucket off the grid is left out: no look-up is ever rounded to it, so that nothing could prove it (see `coverage`).

    Args:
        buckets: ascending, in tokens.
    """
    on_grid = [bucket for bucket in buckets if hybrid_bucket(bucket) == bucket]
    between = [
        (lower + upper + 1) // 2
        for lower, upper in pairwise(on_grid)
        if hybrid_bucket(lower + 1) == upper and upper - lower > 1
    ]
    return tuple(sorted(on_grid + between))


@dataclass(frozen=True)
class Gap:
    """Token counts, both inclusive, whose look-ups miss."""

    first: int
    last: int


def coverage(buckets: Sequence[int], max_num_tokens: int) -> tuple[Gap, ...]:
    """The token counts from 1 to a maximum that a server will ask for and not find.

    Args:
        buckets: that were tuned, in tokens.
        max_num_tokens: the most tokens that a server has in one step, such as its `max_num_batched_tokens`.
    """
    tuned = set(buckets)
    gaps: list[Gap] = []
    first = 1
    while first <= max_num_tokens:
        bucket = hybrid_bucket(first)
        last = min(bucket, max_num_tokens)
        if bucket not in tuned:
            if gaps and gaps[-1].last == first - 1:
                gaps[-1] = Gap(gaps[-1].first, last)
            else:
                gaps.append(Gap(first, last))
        first = bucket + 1
    return tuple(gaps)
