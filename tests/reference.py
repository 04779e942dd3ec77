"""Every op written the obvious way in float64 NumPy, over dense arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[Any]


def rms_norm(x: Float, weight: Float, eps: float) -> Float:
    x = x.astype(np.float64)
    out: Float = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return out


def linear(x: Float, weight: Float, bias: Float | None) -> Float:
    out = x.astype(np.float64) @ weight.astype(np.float64).T
    return out if bias is None else out + bias


def rope(x: Float, positions: Float, frequencies: Float) -> Float:
    """x [n, heads, head_dim], rotated in the half-split order."""
    angles = positions.astype(np.float64)[:, None, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = np.split(x.astype(np.float64), 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(
    q: Float,
    keys: Float,
    values: Float,
    start: int,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    sinks: Float | None = None,
) -> Float:
    """Queries [n, heads, d] at positions start... over keys and values [start + n, kv_heads, d].

    A soft cap is cap * tanh(score / cap); sinks [heads] are logits without a value.
    """
    n, num_heads, _ = q.shape
    group = num_heads // keys.shape[1]
    keys = np.repeat(keys.astype(np.float64), group, axis=1)
    values = np.repeat(values.astype(np.float64), group, axis=1)
    scores = np.einsum("nhd,mhd->hnm", q.astype(np.float64), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    query_positions = start + np.arange(n)[:, None]
    key_positions = np.arange(len(keys))[None, :]
    visible = key_positions <= query_positions
    if window is not None:
        visible &= key_positions > query_positions - window
    scores = np.where(visible, scores, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(sinks.astype(np.float64)[:, None, None], (num_heads, n, 1))
        scores = np.concatenate([scores, column], axis=-1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out: Float = np.einsum("hnm,mhd->nhd", weights[..., : len(keys)], values)
    return out


def silu_and_mul(gate_up: Float) -> Float:
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    out: Float = gate / (1 + np.exp(-gate)) * up
    return out


def log_softmax(logits: Float) -> Float:
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    out: Float = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return out


def kept_tokens(
    logits: Float, temperature: float, top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.bool_]:
    """Which tokens of one row may be drawn: min-p, then top-k, then top-p, by sorting."""
    probabilities = np.exp(log_softmax(logits / temperature))
    kept: npt.NDArray[np.bool_] = probabilities >= min_p * probabilities.max()
    if top_k > 0:
        kth = np.sort(np.where(kept, probabilities, -1))[::-1][min(top_k, len(logits)) - 1]
        kept &= probabilities >= kth
    if top_p < 1:
        left = np.where(kept, probabilities, 0)
        left /= left.sum()
        ordered = np.sort(left)[::-1]
        last = ordered[np.searchsorted(np.cumsum(ordered), top_p)]
        kept &= left >= last
    return kept


def edit_logit(
    logit: float,
    *,
    bias: float,
    seen: bool,
    count: int,
    repetition: float,
    frequency: float,
    presence: float,
) -> float:
    logit += bias
    if seen:
        logit = logit / repetition if logit > 0 else logit * repetition
    return logit - frequency * count - presence * (count > 0)
