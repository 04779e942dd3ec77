"""What the plots have in common: colours, panels, legends, marks.

Colours are Okabe and Ito's, which people with any colour vision tell apart; lines also differ in
their markers, bars also in their hatches. The background is white and opaque, so that a plot looks
the same on every page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

BLACK, ORANGE, SKY, GREEN, BLUE, RED, PINK = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
WHITE_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85}
_GREY = "#8C8C8C"
STYLES = {
    "FasterTransformer": (_GREY, "X"),
    "Orca (Max)": (RED, "v"),
    "Orca (Pow2)": (ORANGE, "^"),
    "Orca (Oracle)": (PINK, "s"),
    "paged": (BLUE, "o"),
    "vAttention 64 KB": (SKY, "P"),
    "vAttention 128 KB": (GREEN, "D"),
    "vAttention 2 MB": (BLACK, "*"),
}


def panels(count: int, height: float = 4.2, width: float = 5.4) -> tuple[Figure, Sequence[Axes]]:
    """A row of axes; a Figure of its own, for pyplot would keep it in a global list."""
    figure = Figure(figsize=(max(width * count, 6.5), height), layout="constrained")
    figure.set_facecolor("white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, count, squeeze=False)[0]
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        panel.set_axisbelow(True)
    return figure, list(axes)


def mark_paper(panel: Axes, places: Sequence[float], values: Sequence[float | None]) -> None:
    """What the paper found, as marks at the right edges of bars; None: the paper does not say."""
    known = [
        (place, value) for place, value in zip(places, values, strict=True) if value is not None
    ]
    if known:
        panel.scatter(
            [place for place, _ in known],
            [value for _, value in known],
            marker="D",
            s=42,
            color="white",
            edgecolor="black",
            linewidth=1.4,
            zorder=5,
            label="the paper's measurement",
        )


def name_systems(panel: Axes, systems: Iterable[str]) -> None:
    """A tick for each system."""
    names = [_two_lines(name) for name in systems]
    panel.set_xticks(range(len(names)), names)
    panel.tick_params(axis="x", labelsize=8, length=0)


def _two_lines(name: str) -> str:
    return "Faster-\nTransformer" if name == "FasterTransformer" else name.replace(" ", "\n", 1)


def legend_below(figure: Figure, panel: Axes, columns: int) -> None:
    """One legend for all panels, with what is in this one."""
    handles, labels = panel.get_legend_handles_labels()
    entries = dict(zip(labels, handles, strict=True))
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False
    )


def log_block_sizes(panel: Axes, block_sizes: Sequence[int]) -> None:
    """Powers of two at equal distances."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(block_sizes)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.set_xlabel("block size, tokens")
