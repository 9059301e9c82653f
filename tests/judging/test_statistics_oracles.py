"""The statistics against those of scipy and scikit-learn, on random tables."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn.metrics import cohen_kappa_score

from rlhf_tasks.judging import statistics

COUNTS = [(0, 1), (1, 1), (0, 40), (7, 19), (19, 19), (503, 1000), (980, 1000), (40_100, 80_000)]


@pytest.mark.parametrize(("successes", "count"), COUNTS)
def test_wilsons_interval_is_scipys(successes: int, count: int) -> None:
    found = statistics.wilson(successes, count)
    expected = binomtest(successes, count).proportion_ci(0.95, method="wilson")
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize(("wins", "count"), COUNTS)
def test_the_sign_test_is_scipys_exact_binomial_test(wins: int, count: int) -> None:
    assert statistics.sign_test(wins, count - wins) == pytest.approx(binomtest(wins, count).pvalue, rel=1e-8)


@pytest.mark.parametrize("seed", range(8))
def test_kappa_is_scikit_learns(seed: int) -> None:
    """Of judges that agree by chance, and more often than that; some comparisons failed."""
    random = np.random.default_rng(seed)
    a = random.choice([1.0, 0.5, 0.0], 200, p=random.dirichlet((1, 1, 1)))
    b = np.where(random.random(200) < seed / 8, a, random.choice([1.0, 0.5, 0.0], 200))
    expected = cohen_kappa_score((2 * a).astype(int), (2 * b).astype(int))
    assert statistics.kappa(a, b).value == pytest.approx(expected, abs=1e-12)
    failed = np.append(a, np.nan), np.append(b, 1.0)
    assert statistics.kappa(*failed).value == pytest.approx(expected, abs=1e-12)
