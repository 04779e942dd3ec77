"""Tables of where a profile's time went: phases, ops, shapes, layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from rawpaged.engine.profiling import Profile
from rawpaged.tracing import Range, RangeKind

_MAX_SHAPES = 12
_TIME_HEADER = ("calls", "total ms", "share", "mean us")
_LAYER_HEADER = ("calls", "min us", "median us", "max us")

_Row = tuple[str, ...]


def describe_profile(profile: Profile) -> str:
    """The tables as text; shares are of the time that the steps took together.

    Phases and ops each add up to that time, with a row for what is in none of them.
    """
    by_kind: dict[RangeKind, list[Range]] = defaultdict(list)
    for each in profile.ranges:
        by_kind[each.kind].append(each)
    total_ns = sum(step.duration_ns for step in by_kind["step"])
    shapes = _durations((op.name, op) for op in by_kind["op"])
    costliest = dict(sorted(shapes.items(), key=lambda item: -sum(item[1]))[:_MAX_SHAPES])
    phases = _durations((phase.name, phase) for phase in by_kind["phase"])
    ops = _durations((op.name.partition(" ")[0], op) for op in by_kind["op"])
    tables = [
        _table("phase", _TIME_HEADER, _time_rows(phases, total_ns, rest="(between phases)")),
        _table("op", _TIME_HEADER, _time_rows(ops, total_ns, rest="(outside of ops)")),
        _table(
            f"op and shape: {len(costliest)} costliest of {len(shapes)}",
            _TIME_HEADER,
            _time_rows(costliest, total_ns),
        ),
        _table("layer", _LAYER_HEADER, _layer_rows(by_kind["layer"])),
    ]
    return "\n\n".join([_summary(profile, by_kind["step"], total_ns), *tables])


def _summary(profile: Profile, steps: Sequence[Range], total_ns: int) -> str:
    tokens = {
        kind: sum(value for step in steps if isinstance(value := step.args.get(name), int))
        for kind, name in (("prefill", "num_prefill_tokens"), ("decode", "num_decode_tokens"))
    }
    last = profile.first_step + profile.num_steps - 1
    lines = [
        f"steps {profile.first_step}-{last}: {profile.num_steps} in {total_ns / 1e6:.1f} ms, "
        f"{total_ns / 1e6 / profile.num_steps:.2f} ms a step, "
        f"{tokens['prefill']} prefill and {tokens['decode']} decode tokens"
    ]
    if profile.is_truncated:
        lines.append(f"ended early: {len(profile.ranges)} ranges are what a profile holds")
    return "\n".join(lines)


def _durations(named: Iterable[tuple[str, Range]]) -> dict[str, list[int]]:
    durations: dict[str, list[int]] = defaultdict(list)
    for name, each in named:
        durations[name].append(each.duration_ns)
    return durations


def _time_rows(
    durations: Mapping[str, Sequence[int]], total_ns: int, *, rest: str | None = None
) -> list[_Row]:
    """Rows by falling total; `rest` names what is left of `total_ns`."""
    totals = sorted(((sum(each), name) for name, each in durations.items()), reverse=True)
    rows: list[_Row] = [
        (
            name,
            str(len(durations[name])),
            f"{spent / 1e6:.2f}",
            f"{100 * spent / total_ns:.1f} %",
            f"{spent / 1e3 / len(durations[name]):.1f}",
        )
        for spent, name in totals
    ]
    if rest is not None:
        left = total_ns - sum(spent for spent, _ in totals)
        rows.append((rest, "", f"{left / 1e6:.2f}", f"{100 * left / total_ns:.1f} %", ""))
    return rows


def _layer_rows(layers: Iterable[Range]) -> list[_Row]:
    return [
        (
            name.removeprefix("layer "),
            str(len(each)),
            *(f"{value / 1e3:.1f}" for value in (min(each), median(each), max(each))),
        )
        for name, each in _durations((layer.name, layer) for layer in layers).items()
    ]


def _table(title: str, header: Sequence[str], rows: Sequence[_Row]) -> str:
    """Columns of even width, the first to the left, numbers to the right."""
    lines = [(title, *header), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header) + 1)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        ).rstrip()
        for line in lines
    )
