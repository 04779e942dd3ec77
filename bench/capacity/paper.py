"""What the papers report, to stand beside what the simulation finds.

arXiv 2309.06180 (Kwon et al., SOSP 2023), by figure; OPT-13B on one A100 with 40 GB.
"""

from __future__ import annotations

TOKEN_STATES = {"Orca (Max)": 0.204, "Orca (Pow2)": 0.268, "Orca (Oracle)": 0.382, "paged": 0.963}
"""Figure 2: share of KV memory that holds token states, ShareGPT."""

RESERVATION = {"Orca (Max)": 0.133, "Orca (Pow2)": 0.179, "Orca (Oracle)": 0.252}
INTERNAL = {"Orca (Max)": 0.573, "Orca (Pow2)": 0.136, "Orca (Oracle)": 0.0}
EXTERNAL = {"Orca (Max)": 0.089, "Orca (Pow2)": 0.416, "Orca (Oracle)": 0.366}
"""Figure 2: "external fragmentation and others"."""

BATCHED = {
    "ShareGPT": {
        "Orca (Max)": 7.00,
        "Orca (Pow2)": 9.81,
        "Orca (Oracle)": 13.62,
        "paged": 30.42,
    },
    "Alpaca": {
        "Orca (Max)": 7.00,
        "Orca (Pow2)": 43.24,
        "Orca (Oracle)": 72.75,
        "paged": 132.44,
    },
}
"""Figure 13: requests batched on average, at RATES."""

RATES = {"ShareGPT": 2.0, "Alpaca": 30.0}
"""Requests a second."""

RATE_RATIOS = {
    "FasterTransformer": "up to 22",
    "Orca (Max)": "2.7 to 8",
    "Orca (Oracle)": "1.7 to 2.7",
}
"""Section 6.2: how many times the request rate the paged system sustains on ShareGPT."""

SAMPLING_SAVINGS = {
    "ShareGPT": {2: 0.162, 6: 0.305},
    "Alpaca": {2: 0.0609, 4: 0.0853, 6: 0.0979},
}
BEAM_SAVINGS = {
    "ShareGPT": {2: 0.443, 6: 0.663},
    "Alpaca": {2: 0.3756, 4: 0.5313, 6: 0.5516},
}
"""Figure 15, and the ranges of section 6.3 for ShareGPT."""
