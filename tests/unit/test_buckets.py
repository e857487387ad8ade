from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from initwarm.buckets import Gap, coverage, hybrid_bucket, hybrid_buckets, replay_points

POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
UP_TO_2048 = (*POWERS, 512, 768, 1024, 1280, 1536, 1792, 2048)
UP_TO_8192 = (*UP_TO_2048, 2560, 3072, 3584, 4096, 8192)

tokens = st.integers(1, 1 << 24)
on_grid = tokens.map(hybrid_bucket)
bucket_lists = st.sets(
    st.integers(1, 600) | on_grid.filter(lambda bucket: bucket <= 5000), min_size=1, max_size=12
).map(lambda chosen: tuple(sorted(chosen)))


@pytest.mark.parametrize(
    ("max_num_tokens", "buckets"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (16, (1, 2, 4, 8, 16)),
        (100, (1, 2, 4, 8, 16, 32, 64, 100)),
        (256, POWERS),
        (300, (*POWERS, 300)),
        (2048, UP_TO_2048),
        (2049, (*UP_TO_2048, 2049)),
        (4096, (*UP_TO_2048, 2560, 3072, 3584, 4096)),
        (8192, UP_TO_8192),
        (10000, (*UP_TO_8192, 10000)),
        (16384, (*UP_TO_8192, 16384)),
    ],
)
def test_grid_up_to_a_maximum(max_num_tokens: int, buckets: tuple[int, ...]) -> None:
    assert hybrid_buckets(max_num_tokens) == buckets


@pytest.mark.parametrize(
    ("num_tokens", "bucket"),
    [
        (0, 1),
        (1, 1),
        (3, 4),
        (129, 256),
        (256, 256),
        (257, 512),
        (513, 768),
        (2001, 2048),
        (2048, 2048),
        (2049, 2560),
        (4000, 4096),
        (4097, 8192),
        (8193, 16384),
        (10000, 16384),
    ],
)
def test_a_look_up_rounds_up_to_the_grid(num_tokens: int, bucket: int) -> None:
    assert hybrid_bucket(num_tokens) == bucket


@given(tokens, tokens)
def test_rounding_up_is_idempotent_monotone_and_never_down(one: int, other: int) -> None:
    bucket = hybrid_bucket(one)

    assert bucket >= one
    assert hybrid_bucket(bucket) == bucket
    assert hybrid_bucket(min(one, other)) <= hybrid_bucket(max(one, other))


@given(tokens)
def test_buckets_are_ascending_on_the_grid_and_end_with_the_maximum(max_num_tokens: int) -> None:
    *lower, last = hybrid_buckets(max_num_tokens)

    assert last == max_num_tokens
    assert lower == sorted({bucket for bucket in lower if bucket < last})
    assert all(hybrid_bucket(bucket) == bucket for bucket in lower)


def test_every_token_count_up_to_a_maximum_on_the_grid_hits() -> None:
    buckets = set(hybrid_buckets(16384))

    assert {hybrid_bucket(num_tokens) for num_tokens in range(1, 16385)} == buckets


@given(on_grid)
def test_a_complete_grid_has_no_gap(max_num_tokens: int) -> None:
    assert coverage(hybrid_buckets(max_num_tokens), max_num_tokens) == ()


def test_r21_a_maximum_off_the_grid_is_a_gap_from_the_last_bucket_on_the_grid() -> None:
    assert coverage(hybrid_buckets(10000), 10000) == (Gap(8193, 10000),)


def test_gaps_that_touch_are_one() -> None:
    assert coverage((1, 2, 16), 32) == (Gap(3, 8), Gap(17, 32))


@given(bucket_lists, st.integers(1, 6000))
def test_gaps_are_exactly_the_token_counts_that_miss(buckets: tuple[int, ...], max_num_tokens: int) -> None:
    gaps = coverage(buckets, max_num_tokens)

    missed = [number for number in range(1, max_num_tokens + 1) if hybrid_bucket(number) not in buckets]
    assert [number for gap in gaps for number in range(gap.first, gap.last + 1)] == missed
    assert all(upper.first > lower.last + 1 for lower, upper in itertools.pairwise(gaps))


def test_replay_points_are_the_buckets_and_points_between_neighbours() -> None:
    assert replay_points((1, 2, 4, 8, 16)) == (1, 2, 3, 4, 6, 8, 12, 16)
    assert replay_points((256, 512, 768)) == (256, 384, 512, 640, 768)


def test_no_replay_point_lies_where_a_bucket_between_is_missing() -> None:
    assert replay_points((1, 8)) == (1, 8)


def test_a_bucket_that_no_look_up_can_find_is_no_replay_point() -> None:
    assert replay_points(hybrid_buckets(300)) == replay_points(POWERS)


@given(bucket_lists)
def test_every_replay_point_is_rounded_to_a_bucket_of_the_plan(buckets: tuple[int, ...]) -> None:
    points = replay_points(buckets)

    assert points == tuple(sorted(set(points)))
    assert {hybrid_bucket(point) for point in points} == {
        bucket for bucket in buckets if hybrid_bucket(bucket) == bucket
    }
    assert set(points) >= {bucket for bucket in buckets if hybrid_bucket(bucket) == bucket}


@given(on_grid)
def test_a_complete_grid_is_replayed_between_all_of_its_buckets(max_num_tokens: int) -> None:
    buckets = hybrid_buckets(max_num_tokens)
    points = replay_points(buckets)

    for lower, upper in itertools.pairwise(buckets):
        assert upper - lower == 1 or any(lower < point < upper for point in points)
