"""Results as PNG plots; the only module that needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.capacity import paper
from bench.capacity.experiments import WIDTHS, Workload
from bench.capacity.plot_style import (
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    RED,
    SKY,
    STYLES,
    WHITE_BOX,
    legend_below,
    log_block_sizes,
    mark_paper,
    name_systems,
    panels,
)
from bench.capacity.sharing import Sharing
from bench.capacity.tables import Results

_DPI = 150


def write_plots(folder: Path, results: Results) -> list[Path]:
    """Every plot as capacity-NAME.png; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "memory": _memory(results),
        "batched": _batched(results),
        "latency": _latency(results),
        "sharing": _sharing(results),
        "block-size": _block_size(results),
        "preemption": _preemption(results),
    }
    paths = []
    for name, figure in figures.items():
        path = folder / f"capacity-{name}.png"
        # Without the version of matplotlib in it, equal plots are equal files.
        figure.savefig(path, dpi=_DPI, metadata={"Software": None})
        paths.append(path)
    return paths


def _memory(results: Results) -> Figure:
    """Figure 2 of the paper: stacked shares, with the paper's share of token states."""
    workloads = results.settings.workloads
    figure, axes = panels(len(workloads), height=4.8, width=6.2)
    parts = (
        ("token states", "token_states", BLUE, ""),
        ("reservation", "reservation", SKY, "//"),
        ("internal fragmentation", "internal", ORANGE, "\\\\"),
        ("external: rounded up", "rounding", PINK, ".."),
        ("external: free, too small", "unusable", "#D0D0D0", "xx"),
    )
    for panel, workload in zip(axes, workloads, strict=True):
        systems = results.systems[workload.name]
        places = list(range(len(systems)))
        bottoms = [0.0] * len(systems)
        for label, field, colour, hatch in parts:
            heights = [100 * getattr(r.full.shares, field) for r in systems.values()]
            panel.bar(
                places,
                heights,
                bottom=bottoms,
                label=label,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                linewidth=0.5,
            )
            bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
        for place, result in zip(places, systems.values(), strict=True):
            share = 100 * result.full.shares.token_states
            inside = share > 12
            panel.text(
                place,
                share - 3.5 if inside else share + 1,
                f"{share:.1f}",
                ha="center",
                va="top" if inside else "bottom",
                color="white" if inside else "black",
                fontweight="bold",
                bbox=None if inside else WHITE_BOX,
            )
        if workload.name == "ShareGPT":
            shares = map(paper.TOKEN_STATES.get, systems)
            marks = [share if share is None else 100 * share for share in shares]
            mark_paper(panel, [place + 0.4 for place in places], marks)
        panel.set_title(workload.name)
        panel.set_ylim(0, 100)
        name_systems(panel, systems)
    axes[0].set_ylabel("share of KV memory, %")
    legend_below(figure, axes[0], columns=6)
    return figure


def _batched(results: Results) -> Figure:
    """Figure 13 of the paper."""
    workloads = results.settings.workloads
    figure, axes = panels(len(workloads), width=6.2)
    for panel, workload in zip(axes, workloads, strict=True):
        systems = results.systems[workload.name]
        outcomes = [r.offered or r.full for r in systems.values()]
        heights = [outcome.mean_batch for outcome in outcomes]
        bars = panel.bar(range(len(systems)), heights, color=[STYLES[n][0] for n in systems])
        panel.bar_label(bars, fmt="%.1f", padding=3, fontsize=9)
        known = paper.BATCHED.get(workload.name, {})
        edges = [place + 0.4 for place in range(len(systems))]
        mark_paper(panel, edges, [known.get(name) for name in systems])
        rate = workload.offered_rate
        when = f"at {rate:g} requests a second" if rate else "with memory always full"
        panel.set_title(f"{workload.name}, {when}")
        panel.margins(y=0.12)
        name_systems(panel, systems)
    axes[0].set_ylabel("requests batched on average")
    if len(workloads) > 1:
        legend_below(figure, axes[0], columns=2)
    return figure


def _latency(results: Results) -> Figure:
    """Figure 12 of the paper."""
    workloads = results.settings.workloads
    figure, axes = panels(len(workloads), width=5.8)
    bound = results.settings.latency_bound
    for panel, workload in zip(axes, workloads, strict=True):
        for name, result in results.systems[workload.name].items():
            colour, marker = STYLES[name]
            rates, latencies = zip(*result.curve, strict=True)
            dashes = "--" if name.startswith("vAttention") else "-"
            panel.plot(rates, latencies, dashes, color=colour, marker=marker, ms=5, label=name)
        panel.axhline(bound, color="black", linewidth=1.2, linestyle=":", label="latency bound")
        panel.set_title(workload.name)
        panel.set_ylim(0, 2.5 * bound)
        panel.set_xlim(left=0)
        panel.set_xlabel("requests a second")
    axes[0].set_ylabel("normalised latency, s a token")
    legend_below(figure, axes[0], columns=5)
    return figure


def _sharing(results: Results) -> Figure:
    """Figure 15 of the paper: savings by number of sequences, beside the paper's."""
    workloads = results.settings.workloads
    figure, axes = panels(2)
    kinds = (
        ("parallel sampling", results.samples, paper.SAMPLING_SAVINGS),
        ("beam search", results.beams, paper.BEAM_SAVINGS),
    )
    for panel, (title, found, published) in zip(axes, kinds, strict=True):
        for index, workload in enumerate(workloads):
            _saving_bars(panel, results, workload, index, found[workload.name], published)
        panel.set_title(title)
        panel.set_xticks(range(len(WIDTHS)), map(str, WIDTHS))
        panel.set_xlabel("sequences of a request")
        panel.set_ylim(0, 100 if found is results.beams else 50)
    axes[0].set_ylabel("KV blocks saved by sharing, %")
    legend_below(figure, axes[0], columns=3)
    return figure


def _saving_bars(
    panel: Axes,
    results: Results,
    workload: Workload,
    index: int,
    found: Mapping[tuple[int, int], Sharing],
    published: Mapping[str, Mapping[int, float]],
) -> None:
    width = 0.8 / len(results.settings.workloads)
    middle = (len(results.settings.workloads) - 1) / 2
    places = [place + (index - middle) * width for place in range(len(WIDTHS))]
    savings = [100 * found[count, 0].saving(results.num_blocks) for count in WIDTHS]
    colour, hatch = ((BLUE, ""), (ORANGE, "//"))[index % 2]
    bars = panel.bar(
        places,
        savings,
        0.94 * width,
        label=workload.name,
        color=colour,
        hatch=hatch,
        edgecolor="white",
    )
    panel.bar_label(bars, fmt="%.1f", padding=3, fontsize=9)
    known = published.get(workload.name, {})
    mark_paper(
        panel,
        [place + 0.47 * width for place in places],
        [100 * known[count] if count in known else None for count in WIDTHS],
    )


def _block_size(results: Results) -> Figure:
    """Share of token states and of requests a second, by block size."""
    workloads = results.settings.workloads
    figure, axes = panels(2)
    styles = ((BLUE, "o", "-"), (ORANGE, "s", "--"))
    for index, workload in enumerate(workloads):
        outcomes = results.block_sizes[workload.name]
        colour, marker, dashes = styles[index % 2]
        best = max(outcome.requests_per_s for outcome in outcomes.values())
        shares = [100 * outcome.shares.token_states for outcome in outcomes.values()]
        rates = [100 * outcome.requests_per_s / best for outcome in outcomes.values()]
        for panel, values in zip(axes, (shares, rates), strict=True):
            panel.plot(
                list(outcomes), values, dashes, color=colour, marker=marker, label=workload.name
            )
    axes[0].set_ylabel("token states in KV memory, %")
    axes[1].set_ylabel("requests a second, % of the best")
    for panel in axes:
        panel.set_ylim(0, 105)
        log_block_sizes(panel, list(outcomes))
    legend_below(figure, axes[0], columns=2)
    return figure


def _preemption(results: Results) -> Figure:
    """Figure 19 of the paper: what giving way costs, and what becomes of the rate."""
    figure, axes = panels(2)
    costs = results.costs
    swaps = [cost.swap_out + cost.swap_in for cost in costs.values()]
    batched = [cost.batched_swap for cost in costs.values()]
    alone = [cost.recompute_alone for cost in costs.values()]
    beside = [cost.recompute_beside for cost in costs.values()]
    for label, seconds, colour, marker, dashes in (
        ("swap out and in, copy by copy", swaps, RED, "v", "-"),
        ("swap out and in, one batched copy", batched, ORANGE, "^", "-"),
        ("recompute, alone", alone, BLUE, "o", "--"),
        ("recompute, beside 31 others", beside, GREEN, "s", "--"),
    ):
        values = [1e3 * value for value in seconds]
        axes[0].plot(list(costs), values, dashes, color=colour, marker=marker, label=label)
    axes[0].set_ylabel("ms for a request of 512 tokens")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(frameon=False)
    workload = results.settings.workloads[0]
    for label, outcomes, colour, marker, dashes in (
        ("swap", results.swapped[workload.name], RED, "v", "-"),
        ("recompute", results.block_sizes[workload.name], BLUE, "o", "--"),
    ):
        rates = [outcome.requests_per_s for outcome in outcomes.values()]
        axes[1].plot(list(outcomes), rates, dashes, color=colour, marker=marker, label=label)
    axes[1].set_ylabel("requests a second, memory full")
    axes[1].set_title(workload.name)
    axes[1].set_ylim(0, 1.08 * max(rates))
    axes[1].legend(frameon=False, loc="lower center")
    for panel in axes:
        log_block_sizes(panel, list(costs))
    return figure
