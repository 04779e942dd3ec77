"""Upper bounds on what a checkpoint may say about its model.

They lie far above any published model and keep a hostile file from making the reader loop over,
or allocate by, a number that it invented.
"""

from __future__ import annotations

MAX_VOCAB_SIZE = 1 << 24
MAX_HIDDEN_SIZE = 1 << 20
MAX_INTERMEDIATE_SIZE = 1 << 22
MAX_LAYERS = 4096
MAX_HEADS = 1 << 16
MAX_HEAD_DIM = 1 << 14
MAX_POSITIONS = (1 << 31) - 1  # positions are int32 in a batch
MAX_ROPE_THETA = 1e15
MAX_ROPE_FACTOR = 1e6
