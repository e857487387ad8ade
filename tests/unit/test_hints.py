import pytest

from initwarm import hints


@pytest.mark.parametrize("text", [hints.why_no_leader(True), hints.why_no_leader(False), hints.why_nobody_came(3)])
def test_r72_r78_r88_the_known_deadlocks_are_named_with_the_field_to_change(text: str) -> None:
    for field in (
        "podManagementPolicy: Parallel",
        "OrderedReady",
        "startupPolicy: LeaderCreated",
        "LeaderReady",
        "publishNotReadyAddresses: true",
        "NetworkPolicy",
        'sidecar.istio.io/inject: "false"',
    ):
        assert field in text


def test_r72_an_unknown_name_puts_publication_first() -> None:
    assert hints.why_no_leader(True).index("publishNotReadyAddresses") < hints.why_no_leader(True).index("OrderedReady")
    assert "topology --explain" in hints.why_nobody_came(1)


def test_the_causes_are_listed_once_and_then_a_short_line_comes_every_minute() -> None:
    reminder = hints.Reminder()
    said = [second for second in range(300) if reminder.is_due(second)]

    assert said == [60, 120, 180, 240]
    assert [hints.Reminder.is_first(second) for second in said] == [True, False, False, False]
