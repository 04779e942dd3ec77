"""Names for block contents: equal hashes mean equal tokens from the sequence's first one on."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from rawpaged.request import Request

DIGEST_SIZE = 32
NO_PARENT = bytes(DIGEST_SIZE)
"""Stands for the parent of a sequence's first block."""


def hash_block(parent: bytes, token_ids: Sequence[int], extra_keys: Sequence[str] = ()) -> bytes:
    """Digest of a full block; `parent` is that of the block before it, or NO_PARENT.

    `extra_keys` is what else the block's KV depends on or is kept apart by. The digest is
    cryptographic because a collision would show one user another's text.
    """
    # Fixed-size parent, counted tokens, counted keys: no two inputs are the same bytes.
    digest = hashlib.blake2b(parent, digest_size=DIGEST_SIZE)
    digest.update(array("q", (len(token_ids), *token_ids)).tobytes())
    for key in extra_keys:
        # A key comes out of JSON, where lone surrogates are legal.
        encoded = key.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def extend_block_hashes(request: Request, block_size: int) -> None:
    """Appends to `request.block_hashes` until it covers every full block of `token_ids`."""
    hashes = request.block_hashes
    for index in range(len(hashes), len(request.token_ids) // block_size):
        token_ids = request.token_ids[index * block_size : (index + 1) * block_size]
        parent = hashes[-1] if hashes else NO_PARENT
        hashes.append(hash_block(parent, token_ids, request.cache_keys))
