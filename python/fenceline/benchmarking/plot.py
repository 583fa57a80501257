"""--plot FILE: the run as a page of HTML with drawings in it, which loads nothing, or as a PNG drawn by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fenceline.benchmarking.goodput import Trial
from fenceline.benchmarking.load import LoadResult
from fenceline.benchmarking.metrics import token_times
from fenceline.config import user_path

_COLORS = ("#3b6fd4", "#d4763b", "#2f9e6e", "#a14bb5")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 520, 250, 62, 40, 14, 14
_NUM_BINS = 100


@dataclass(frozen=True, slots=True)
class Series:
    """The points of a line; ``x`` and ``y`` are as long as each other."""

    name: str
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray


@dataclass(frozen=True, slots=True)
class Chart:
    """One drawing, whose axes begin at 0."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    style: Literal["line", "dots"] = "line"


def charts(load: LoadResult, trials: Sequence[Trial] = ()) -> list[Chart]:
    """What happened in the run over time, the distributions of latencies, and the runs of a search for a rate."""
    good = [output.reply for output in load.outputs if output.reply.success]
    times = token_times([output for output in load.outputs if output.reply.success]) - load.start_time
    edges = np.linspace(0.0, load.duration, _NUM_BINS + 1)
    tokens = np.histogram(times, edges)[0] / (edges[1] or 1.0)
    starts = np.sort([reply.start_time - load.start_time for reply in good])
    ends = np.sort([reply.start_time + reply.latency - load.start_time for reply in good])
    in_flight = np.searchsorted(starts, edges, "right") - np.searchsorted(ends, edges, "right")
    has_tokens = any(reply.output_len for reply in good)
    name = "Time to first token" if has_tokens else "Latency"
    first = [reply.ttft if has_tokens else reply.latency for reply in good]
    found = [
        Chart("Requests in flight", "s", "requests", (Series("", edges, in_flight),)),
        Chart(f"{name} by share of requests", "%", "ms", (_shares("", first),)),
        Chart(
            f"{name} by time of sending",
            *("s", "ms"),
            (Series("", [r.start_time - load.start_time for r in good], [1000 * time for time in first]),),
            "dots",
        ),
    ]
    if has_tokens:
        found.insert(0, Chart("Output tokens a second", "s", "tokens/s", (Series("", edges[:-1], tokens),)))
        found.append(
            Chart(
                "Times between tokens by share",
                *("%", "ms"),
                (
                    _shares("TPOT of requests", [r.tpot for r in good if r.output_len > 1]),
                    _shares("ITL of tokens", [gap for r in good for gap in r.itl]),
                    _shares("longest gap of requests", [r.longest_gap for r in good if r.itl]),
                ),
            )
        )
    rated = sorted((t for t in trials if t.request_rate < math.inf), key=lambda t: t.request_rate)
    if rated:
        rates = [t.request_rate for t in rated]
        shares = Series("", rates, [100 * t.good_request_fraction for t in rated])
        found.append(Chart("Requests within the limits", "requests/s sent", "%", (shares,)))
    return found


def _shares(name: str, seconds: Sequence[float]) -> Series:
    """The percentiles 0 to 100 of values in seconds, as milliseconds."""
    percents = np.linspace(0.0, 100.0, 101) if len(seconds) else np.zeros(0)
    return Series(name, percents, np.percentile(np.asarray(seconds) * 1000.0, percents) if len(seconds) else percents)


def write_plot(path: str, title: str, report: str, drawings: Sequence[Chart]) -> None:
    """Write ``drawings`` to ``path``, into HTML below ``report``, the text for the terminal. Raises ValueError if the
    file cannot be written."""
    try:
        if Path(path).suffix.lower() == ".png":
            _write_png(path, title, drawings)
        else:
            user_path(path).write_text(html_page(title, report, drawings), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--plot {path}: {error}; pass a path that can be written") from error


_PAGE = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1120px; padding: 0 1em; }}
figure {{ display: inline-block; margin: 0 1em 1.5em 0; }}
figcaption {{ font-weight: 600; }}
svg text {{ font-size: 11px; fill: currentColor; }}
svg .axis {{ stroke: currentColor; stroke-opacity: 0.25; }}
</style></head><body>
<h1>{title}</h1>
{figures}
<pre>{report}</pre>
</body></html>
"""


def html_page(title: str, report: str, drawings: Sequence[Chart]) -> str:
    """The whole page."""
    figures = "\n".join(
        f"<figure><figcaption>{escape(chart.title)}</figcaption>{_svg(chart)}</figure>" for chart in drawings
    )
    return _PAGE.format(title=escape(title), report=escape(report), figures=figures)


def _svg(chart: Chart) -> str:
    x_step, x_end = _scale(max((float(x) for s in chart.series for x in s.x), default=0.0))
    y_step, y_end = _scale(max((float(y) for s in chart.series for y in s.y), default=0.0))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (_WIDTH - _LEFT - _RIGHT) * x / x_end
        return round(_LEFT + across, 1), round(_HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * y / y_end, 1)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img">']
    for i in range(round(y_end / y_step) + 1):
        x, y = place(0.0, i * y_step)
        parts.append(f'<line class="axis" x1="{x}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4}" text-anchor="end">{i * y_step:,.12g}</text>')
    for i in range(round(x_end / x_step) + 1):
        x, y = place(i * x_step, 0.0)
        parts.append(f'<text x="{x}" y="{y + 15}" text-anchor="middle">{i * x_step:,.12g}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 8}" text-anchor="end">{escape(chart.x_label)}</text>')
    parts.append(f'<text x="4" y="{_HEIGHT - 8}">{escape(chart.y_label)}</text>')
    for number, (series, color) in enumerate(zip(chart.series, _COLORS, strict=False)):
        points = [place(float(x), float(y)) for x, y in zip(series.x, series.y, strict=True)]
        if chart.style == "dots":
            parts += [f'<circle cx="{x}" cy="{y}" r="2" fill="{color}" fill-opacity="0.6"/>' for x, y in points]
        else:
            line = " ".join(f"{x},{y}" for x, y in points)
            parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.6" points="{line}"/>')
        if series.name:
            y = _TOP + 12 + 15 * number
            parts.append(f'<rect x="{_LEFT + 10}" y="{y - 9}" width="10" height="10" fill="{color}"/>')
            parts.append(f'<text x="{_LEFT + 26}" y="{y}">{escape(series.name)}</text>')
    return "".join(parts) + "</svg>"


def _scale(largest: float) -> tuple[float, float]:
    """(step, end) of an axis from 0 that reaches ``largest`` with 3 to 6 steps of 1, 2 or 5 times a power of 10."""
    if not largest > 0:
        return 1.0, 1.0
    power = 10.0 ** math.floor(math.log10(largest / 3))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if largest / step <= 6)
    return step, step * math.ceil(largest / step)


def _write_png(path: str, title: str, drawings: Sequence[Chart]) -> None:
    from matplotlib.figure import Figure

    rows = -(-len(drawings) // 2)
    figure = Figure(figsize=(12, 4 * rows), layout="constrained")
    figure.suptitle(title)
    for number, chart in enumerate(drawings):
        axes: Any = figure.add_subplot(rows, 2, number + 1)
        for series, color in zip(chart.series, _COLORS, strict=False):
            marks = {"linestyle": "", "marker": "."} if chart.style == "dots" else {}
            axes.plot(series.x, series.y, color=color, label=series.name, **marks)
        axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
        axes.set_ylim(bottom=0)
        if any(series.name for series in chart.series):
            axes.legend()
    figure.savefig(str(user_path(path)), dpi=120)
