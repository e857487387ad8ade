"""Every tactic of every host runner computes what torch computes: a wrong one would be measured, and might win."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest

with warnings.catch_warnings():
    # FlashInfer uses what its own dependencies have deprecated.
    warnings.simplefilter("ignore")
    import torch
    from flashinfer.autotuner import AutoTuner

    from initwarm.edges import hostops
    from initwarm.edges.hostops import HostBlockedMatmulRunner, HostMatmulRunner, HostSoftmaxRunner

DTYPES = (torch.float32, torch.bfloat16)
TOKENS = (1, 7, 8, 65)
#: One that blocks divide, one that they do not, and one that is smaller than any block.
MATRICES = ((256, 512), (300, 130), (20, 30))
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True)
def _no_tuner_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoTuner, "_instance", None)


def random_tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_computes(actual: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """Relative to the greatest value: a sum of many products has no better bound of its own."""
    assert actual.shape == exact.shape
    assert actual.dtype == dtype
    assert (actual.double() - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("matrix", MATRICES, ids=str)
@pytest.mark.parametrize("runner", [HostMatmulRunner(), HostBlockedMatmulRunner()], ids=lambda one: type(one).__name__)
def test_every_matmul_tactic_computes_the_product(
    runner: Any, matrix: tuple[int, int], num_tokens: int, dtype: torch.dtype
) -> None:
    depth, width = matrix
    inputs = [random_tensor(num_tokens, depth, dtype=dtype), random_tensor(depth, width, dtype=dtype)]
    exact = inputs[0].double() @ inputs[1].double()

    for tactic in (-1, *runner.get_valid_tactics(inputs, None)):
        assert_computes(runner(inputs, tactic=tactic), exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("width", [1, 2048])
def test_every_softmax_tactic_computes_softmax(width: int, num_tokens: int, dtype: torch.dtype) -> None:
    runner = HostSoftmaxRunner()
    # Exponentials of these overflow unless the greatest is subtracted first.
    inputs = [random_tensor(num_tokens, width, dtype=dtype) * 100]
    exact = torch.softmax(inputs[0].double(), dim=-1)

    for tactic in (-1, *runner.get_valid_tactics(inputs, None)):
        assert_computes(runner(inputs, tactic=tactic), exact, dtype)


def test_there_is_something_to_choose() -> None:
    inputs = [random_tensor(4, 256, dtype=torch.float32), random_tensor(256, 256, dtype=torch.float32)]

    assert len(HostMatmulRunner().get_valid_tactics(inputs, None)) == 3
    assert len(HostBlockedMatmulRunner().get_valid_tactics(inputs, None)) == 4
    assert len(HostSoftmaxRunner().get_valid_tactics(inputs[:1], None)) == 4


@pytest.mark.parametrize("runner", [HostMatmulRunner(), HostSoftmaxRunner()], ids=lambda one: type(one).__name__)
def test_r11_a_tactic_that_does_not_exist_is_refused(runner: Any) -> None:
    inputs = [random_tensor(4, 4, dtype=torch.float32)] * (2 if isinstance(runner, HostMatmulRunner) else 1)

    with pytest.raises((ValueError, TypeError)):
        runner(inputs, tactic=77)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_of_different_element_types_differ(dtype: torch.dtype) -> None:
    (extra,) = HostMatmulRunner().get_cache_key_extras([random_tensor(1, 1, dtype=dtype)])

    assert extra == dtype


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(
    ("op", "shapes", "exact"),
    [
        (hostops.host_matmul, ((0, 256), (256, 30)), lambda a, b: a @ b),
        (hostops.host_softmax, ((0, 256),), lambda x: torch.softmax(x, dim=-1)),
    ],
    ids=["host_matmul", "host_softmax"],
)
def test_an_op_without_a_tuned_winner_computes_by_its_default(
    op: Callable[..., torch.Tensor],
    shapes: tuple[tuple[int, int], ...],
    exact: Callable[..., torch.Tensor],
    num_tokens: int,
) -> None:
    inputs = [random_tensor(rows or num_tokens, columns, dtype=torch.float32) for rows, columns in shapes]

    assert_computes(op(*inputs), exact(*(one.double() for one in inputs)), torch.float32)
