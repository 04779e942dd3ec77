"""What a checkpoint file offers to the loader, whatever its format: tensors under HF names."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class TensorSource(Protocol):
    """Tensors by Hugging Face name. Looking up a name not in `names` raises KeyError."""

    @property
    def names(self) -> Collection[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str:
        """The stored type in the words of its format, such as "BF16" or "Q4_1"."""
        ...

    def nbytes(self, name: str) -> int:
        """Bytes in the file."""
        ...

    def file_of(self, name: str) -> Path: ...
    def stored_name(self, name: str) -> str:
        """The name under which the file has, or would have, the tensor."""
        ...

    def read(self, name: str) -> npt.NDArray[Any]:
        """float32, float16 or bfloat16 array of `shape(name)`; may be a read-only view of the file.

        Raises CheckpointError for a stored type that is not supported.
        """
        ...

    def read_blocks(self, name: str) -> npt.NDArray[np.uint8]:
        """u8[out_features, row_bytes]: a matrix of quantised blocks as it is stored, its rows in
        the order of `read`; may be a read-only view of the file.
        """
        ...

    def is_supported(self, name: str) -> bool:
        """Whether `read` can decode the stored type."""
        ...
