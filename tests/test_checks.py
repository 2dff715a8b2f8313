"""Checks of single values."""

from types import SimpleNamespace

import pytest

from fedapa_mpi.checks import within


@pytest.mark.parametrize(
    ("interval", "good", "bad"),
    [
        ("[0, 1]", (0, 0.5, 1), (-1e-9, 1.5)),
        ("(0, 1)", (1e-9, 0.5), (0, 1)),
        ("[0, inf)", (0, 1e300), (-1, float("inf"))),
        ("(0, inf]", (1, float("inf")), (0, float("-inf"))),
        ("[-2, 3.5)", (-2, 3.4), (3.5, -2.1)),
    ],
)
def test_intervals(interval, good, bad):
    for value in (*good, None):
        within(SimpleNamespace(eta=value), eta=interval)
    for value in (*bad, float("nan")):
        with pytest.raises(ValueError) as caught:
            within(SimpleNamespace(eta=value), eta=interval)
        assert str(caught.value) == f"eta is {value}, expected a number in {interval}"


def test_every_field_is_looked_at():
    config = SimpleNamespace(eta=1.0, mu=2.0)
    within(config, eta="[0, 1]", mu="[0, 2]")
    with pytest.raises(ValueError, match=r"mu is 2.0, expected a number in \[0, 2\)"):
        within(config, eta="[0, 1]", mu="[0, 2)")
