"""The CPU backend's sampling ops: the suite that all share, edits of logits, Philox."""

from __future__ import annotations

import numpy as np
import pytest

from rawpaged.backend import Backend
from rawpaged.cpu.philox import philox4x32
from tests.ops.row_cases import edit_case
from tests.ops.sampling_suite import SamplingSuite


@pytest.fixture
def dtype() -> str:
    """Logits are float32 whatever the weights are."""
    return "float32"


class TestSampling(SamplingSuite):
    @pytest.fixture
    def ops(self, backend: Backend) -> Backend:
        return backend


def test_edits_follow_the_definitions(backend: Backend) -> None:
    case = edit_case()
    logits = case.logits.copy()
    backend.edit_logits(logits, case.edits)
    np.testing.assert_allclose(logits, case.expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (2**64 - 1, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    key: int, counter: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """The vectors that come with Random123."""
    words = philox4x32(np.uint64(key), *(np.uint64(word) for word in counter))
    assert tuple(int(word) for word in words) == expected
