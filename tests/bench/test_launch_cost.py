"""`bench.launch_cost`: every op of a layer once, over kernels that do nothing."""

from __future__ import annotations

import numpy as np
import pytest

from bench.launch_cost import main, measure
from tests.gpu.conftest import numba_cuda

__all__ = ["numba_cuda"]


@pytest.mark.gpusim
@pytest.mark.usefixtures("numba_cuda")
def test_the_ops_of_a_layer_and_their_launches() -> None:
    rows = {}
    for name, queries in (("decode", 1), ("prefill", 40)):
        *ops, layer = measure(name, queries, np.empty, repeat=1, number=1)
        assert {row[0] for row in (*ops, layer)} == {name}
        assert layer[1:3] == ("layer", sum(int(str(row[2])) for row in ops))
        assert all(float(str(row[3])) > 0 for row in ops)
        rows[name] = {str(row[1]): row[2] for row in ops}
    assert rows["decode"].keys() == rows["prefill"].keys() >= {"linear", "paged_attention"}
    # Contexts of 300 take two partitions, which are combined; prompts go to one kernel.
    assert (rows["decode"]["paged_attention"], rows["prefill"]["paged_attention"]) == (2, 1)


def test_no_repetitions_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--repeat", "0"])
    assert "--repeat 0 must be at least 1" in capsys.readouterr().err
