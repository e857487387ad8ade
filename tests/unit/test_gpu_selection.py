from __future__ import annotations

import pytest

from initwarm.edges.gpus import arch_list, select_devices

UUIDS = ["GPU-aaaa0000", "GPU-aabb1111", "GPU-cccc2222"]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        pytest.param(None, (0, 1, 2), id="unset shows all"),
        pytest.param("", (), id="empty shows none"),
        pytest.param("-1", (), id="minus one shows none"),
        pytest.param("NoDevFiles", (), id="NoDevFiles shows none"),
        pytest.param("2,0", (2, 0), id="order is kept"),
        pytest.param(" 1 , 2", (1, 2), id="blanks are ignored"),
        pytest.param("0,7,1", (0,), id="ends at the first missing index"),
        pytest.param("0,-1,1", (0,), id="ends at a negative index"),
        pytest.param("0,,1", (0,), id="ends at an empty entry"),
        pytest.param("0,1,0", (), id="a repeated index hides all"),
        pytest.param("1gpu2,2ampere", (1, 2), id="read as strtoul does"),
        pytest.param("GPU-cccc2222,GPU-aaaa", (2, 0), id="start of a uuid is enough"),
        pytest.param("GPU-aa,GPU-cccc", (), id="an ambiguous start ends the list"),
        pytest.param("GPU-cccc,GPU-dddd,GPU-aaaa", (2,), id="ends at an unknown uuid"),
        pytest.param("GPU-cccc,1", (2,), id="an index after a uuid ends the list"),
        pytest.param("GPU-cccc,GPU-cccc2222", (), id="a repeated device hides all"),
        pytest.param("99999999999999999999", (), id="a huge index is no device"),
    ],
)
def test_cuda_visible_devices_selects_as_cuda_does(variable: str | None, expected: tuple[int, ...]) -> None:
    assert select_devices(variable, UUIDS) == expected


def test_arch_list_names_each_capability_once_and_in_order() -> None:
    assert arch_list([(10, 0), (9, 0), (9, 0), (8, 9)]) == "8.9 9.0 10.0"


def test_no_device_has_no_arch_list() -> None:
    assert arch_list([]) is None


@pytest.mark.parametrize("cuda_version", [None, (12, 8)], ids=str)
def test_family_12_has_no_arch_list_unless_the_toolkit_is_known_to_suffice(
    cuda_version: tuple[int, int] | None,
) -> None:
    assert arch_list([(9, 0), (12, 0)], cuda_version) is None


def test_family_12_has_an_arch_list_under_a_toolkit_that_suffices() -> None:
    assert arch_list([(9, 0), (12, 1)], (13, 0)) == "9.0 12.1"
