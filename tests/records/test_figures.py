"""What the figures draw."""

import numpy as np
import pytest
from test_docs import logged

from records import figures


def test_every_key_that_is_drawn_is_one_of_the_glossary():
    drawn = {key for keys in figures.PANELS.values() for key in keys.split()}
    assert drawn <= set(logged("grpo_hier log"))


@pytest.mark.parametrize("n, window", [(1, 9), (5, 9), (30, 9), (30, 4), (7, 1)])
def test_moving_average_by_loops(n, window):
    y = np.random.default_rng(n).random(n)
    half = window // 2
    expected = [np.mean([y[j] for j in range(n) if abs(i - j) <= half]) for i in range(n)]
    assert figures.moving_average(y, window) == pytest.approx(expected)
