from initwarm.plan import Unit
from initwarm.schedule import by_cost, by_gain, estimated_cost, seconds_left
from tests.support.plans import HOST_MATMUL, document, parse

LARGE = {
    **HOST_MATMUL,
    "args": {"a": {"dtype": "float32", "shape": ["M", 512]}, "b": {"dtype": "float32", "shape": [512, 256]}},
    "buckets": [1, 4096],
}


def units() -> tuple[Unit, ...]:
    return parse(document(HOST_MATMUL, LARGE)).units_of(0)


def test_the_dearest_unit_is_measured_first_and_each_once() -> None:
    order = by_cost(units())

    assert sorted(order) == list(range(len(units())))
    assert units()[order[0]].name == "calls[1] initwarm.host_matmul M=4096"
    costs = [estimated_cost(units()[index]) for index in order]
    assert costs == sorted(costs, reverse=True)


def test_under_a_budget_small_numbers_of_tokens_come_first_and_of_one_number_the_largest_weights() -> None:
    names = [units()[index].name for index in by_gain(units())]

    assert names == [
        "calls[1] initwarm.host_matmul M=1",
        "calls[0] initwarm.host_matmul M=1",
        "calls[0] initwarm.host_matmul M=2",
        "calls[1] initwarm.host_matmul M=4096",
    ]


def test_r20_the_time_left_follows_the_cost_and_is_unknown_before_the_first_unit() -> None:
    two_equal = (units()[0], units()[0])

    assert seconds_left(two_equal, [], 10) is None
    assert seconds_left(two_equal, [0], 10) == 10
    assert seconds_left(two_equal, [0, 1], 20) == 0
