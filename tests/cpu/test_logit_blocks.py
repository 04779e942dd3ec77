"""Parts of sampling over blocks of logits, against NumPy."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rawpaged.cpu.logit_blocks import kth_largest

values = st.floats(width=32, allow_nan=False)
lists = st.lists(values, min_size=1, max_size=40) | st.lists(
    st.sampled_from([-np.inf, -1.0, 0.0, 2.5, np.inf]), min_size=1, max_size=40
)


@settings(deadline=None, max_examples=200)
@given(lists, st.integers(1, 41))
def test_kth_largest(numbers: list[float], k: int) -> None:
    maxima = np.array(numbers, np.float32)
    before = maxima.copy()
    expected = np.sort(maxima)[::-1][k - 1] if k <= len(maxima) else -np.inf
    assert kth_largest(maxima, k) == expected
    np.testing.assert_array_equal(maxima, before)
