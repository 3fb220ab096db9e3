"""Temperature, top-k and top-p against plain sorting."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from visgen.config import UserError
from visgen.decode.warp import Warp


def _probs(warp: Warp, logits: list[float]) -> list[float]:
    return warp(torch.tensor(logits)).double().softmax(-1).tolist()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=9),  # few values: many ties
    temperature=st.sampled_from([0.0, 0.5, 1.0, 4.0]),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.05, 0.3, 0.62, 0.9, 0.999, 1.0]),
)
def test_equals_plain_sorting(logits: list[float], temperature: float, top_k: int, top_p: float) -> None:
    found = _probs(Warp(temperature, top_k, top_p), logits)
    expected = reference.warped(logits, temperature, top_k, top_p)
    assert all(math.isclose(a, b, abs_tol=1e-5) for a, b in zip(found, expected, strict=True)), (found, expected)


def test_ties_with_the_kth_are_kept() -> None:
    assert [p > 0 for p in _probs(Warp(top_k=2), [1.0, 3.0, 1.0, 2.0, 2.0])] == [False, True, False, True, True]
    assert _probs(Warp(top_k=1), [5.0, 5.0]) == [0.5, 0.5]


def test_top_p_keeps_the_token_that_reaches_p_and_no_more() -> None:
    logits = [math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]
    kept = {
        p: sum(x > 0 for x in _probs(Warp(top_p=p), logits)) for p in (0.01, 0.499, 0.501, 0.749, 0.751, 0.876, 0.999)
    }
    assert kept == {0.01: 1, 0.499: 1, 0.501: 2, 0.749: 2, 0.751: 3, 0.876: 4, 0.999: 4}


def test_top_p_breaks_ties_by_order() -> None:
    assert _probs(Warp(top_p=0.5), [0.0, 0.0, 0.0, 0.0]) == [0.5, 0.5, 0, 0]


def test_top_p_acts_on_what_top_k_left() -> None:
    """0.4 / (0.4 + 0.3) reaches 0.55, although 0.4 alone does not."""
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert _probs(Warp(top_k=2, top_p=0.55), logits) == [1, 0, 0, 0]
    assert sum(p > 0 for p in _probs(Warp(top_p=0.55), logits)) == 2


def test_temperature_acts_before_top_p() -> None:
    logits = [math.log(p) for p in (0.6, 0.3, 0.1)]
    assert sum(p > 0 for p in _probs(Warp(temperature=1.0, top_p=0.55), logits)) == 1
    assert sum(p > 0 for p in _probs(Warp(temperature=10.0, top_p=0.55), logits)) == 2


def test_temperature_zero_keeps_the_first_of_the_best() -> None:
    assert _probs(Warp(0.0), [1.0, 7.0, 7.0]) == [0, 1, 0]
    assert _probs(Warp(0.0, top_k=2, top_p=0.1), [1.0, 7.0, 6.0]) == [0, 1, 0]


@pytest.mark.parametrize("warp", [Warp(1e-40), Warp(1e-9, top_p=0.9), Warp(0.5, 2, 0.5), Warp(1.0, 3, 0.999)])
@pytest.mark.parametrize("size", [1e4, 1e30])
def test_extreme_logits_stay_a_law(warp: Warp, size: float) -> None:
    probs = _probs(warp, [-size, 0.0, size, -math.inf])
    assert probs == [0, 0, 1, 0]


@pytest.mark.parametrize("warp", [Warp(), Warp(0.0), Warp(0.3, 1, 0.1), Warp(top_k=5), Warp(top_p=0.01)])
def test_a_vocabulary_of_one(warp: Warp) -> None:
    assert _probs(warp, [-3.0]) == [1]


def test_no_filter_changes_nothing_and_every_row_is_filtered_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 7)
    assert torch.equal(Warp()(logits), logits)
    assert torch.equal(Warp(top_k=9)(logits), logits), "k above the vocabulary"
    warp = Warp(0.7, 4, 0.8)
    assert torch.equal(warp(logits)[1, 2], warp(logits[1, 2]))


def test_the_given_logits_are_left_alone() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0])
    for warp in (Warp(0.0), Warp(0.5, 1, 0.5)):
        warp(logits)
        assert logits.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
    ],
)
def test_impossible_values_are_refused(field: str, value: float) -> None:
    with pytest.raises(UserError, match=f"^{field} {value} must be"):
        Warp(**{field: value})
