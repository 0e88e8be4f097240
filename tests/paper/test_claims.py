"""The theory page: what holds, what does not, and that a violation would be seen."""

import numpy as np
import pytest

from dsi.paper import claims


@pytest.mark.slow
def test_claims_hold_but_for_theorem_2_with_the_targets_of_eq_1() -> None:
    found = claims.checks()
    assert len(found) == claims.CLAIMS
    broken = [check.claim for check in found if not check.holds]
    assert broken == ["Theorem 2 with only as many targets as Eq. (1) asks for"]


def test_claims_proposition_1_is_an_equality() -> None:
    check = claims.check("", claims.proposition_1())
    assert check.smallest == pytest.approx(1)
    assert check.largest == pytest.approx(1)


def test_check_reports_where_a_claim_is_violated() -> None:
    ratios = np.ones(len(claims.RATES))
    ratios[3] = 1.5
    check = claims.check("a claim", [("fine", ratios / 2), ("bad", ratios)])
    assert (check.holds, check.violations, check.largest, check.where) == (
        False,
        1,
        1.5,
        "bad, acceptance 0.15",
    )
    assert check.settings == 2 * len(claims.RATES)


def test_claims_examples_agree_with_the_text() -> None:
    ours = [example.ours for example in claims.examples()]
    assert ours[0] == "4.97x"
    assert ours[1:3] == ["4.1x", "32.4x"]
    assert ours[3].startswith("36%")
    assert ours[4].startswith("2400 ms")
    assert ours[5].startswith("1.25x")
    assert ours[6:] == ["1 + 4 = 5", "SP 3, lookahead 7"]
