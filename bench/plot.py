"""Line charts as SVG, written by hand: no plotting library is needed to see a result."""

from __future__ import annotations

import math
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 300, 70, 170, 36, 46
COLOURS = ("#0b62a8", "#d1495b", "#2f9e44", "#e08e0b", "#7048a8", "#555555")

Lines = dict[str, list[tuple[float, float]]]


def write_charts(path: Path, charts: list[tuple[str, str, str, Lines]]) -> None:
    """charts: (title, name of x, name of y, {line: [(x, y), …]}), one below the other."""
    parts = [_chart(index * HEIGHT, *chart) for index, chart in enumerate(charts)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT * len(charts)}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    )
    path.write_text(head + "".join(parts) + "</svg>\n")


def _chart(top: int, title: str, x_name: str, y_name: str, lines: Lines) -> str:
    points = [point for line in lines.values() for point in line]
    x_max = max((x for x, _ in points), default=1.0) or 1.0
    y_max = _ceiling(max((y for _, y in points), default=1.0) or 1.0)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def place(x: float, y: float) -> str:
        return f"{LEFT + x / x_max * (right - LEFT):.1f},{bottom - y / y_max * (bottom - TOP):.1f}"

    parts = [f'<g transform="translate(0,{top})"><text x="{LEFT}" y="20" font-weight="bold">{escape(title)}</text>']
    for step in range(5):
        y, x = y_max * step / 4, x_max * step / 4
        y_at, x_at = bottom - (bottom - TOP) * step / 4, LEFT + (right - LEFT) * step / 4
        parts.append(f'<path d="M{LEFT} {y_at}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y_at + 4}" text-anchor="end">{y:.4g}</text>')
        parts.append(f'<text x="{x_at}" y="{bottom + 16}" text-anchor="middle">{x:.4g}</text>')
    for index, (name, line) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="'
            + " ".join(place(x, y) for x, y in line)
            + '"/>'
        )
        parts.append(f'<text x="{right + 10}" y="{TOP + 14 + 18 * index}" fill="{colour}">{escape(name)}</text>')
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{bottom + 34}" text-anchor="middle">{escape(x_name)}</text>')
    parts.append(f'<text x="{LEFT - 50}" y="{TOP - 6}">{escape(y_name)}</text></g>')
    return "".join(parts)


def _ceiling(value: float) -> float:
    """The next round number."""
    unit = 10.0 ** math.floor(math.log10(value))
    return next(step * unit for step in (1, 2, 2.5, 5, 10) if step * unit >= value)
