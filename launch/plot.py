"""Line plots as SVG text: what a README shows needs no plotting library."""

import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 320, 64, 16, 36, 44
COLOURS = ("#1b6ca8", "#c8553d", "#4c956c", "#7d5ba6")


def line_plot(title: str, x_label: str, y_label: str, lines: Mapping[str, Sequence[float]]) -> str:
    """Values by step 1, 2 ... on a logarithmic scale; those that are not positive are left out.

    Raises:
        ValueError: nothing is positive.
    """
    positive = [y for ys in lines.values() for y in ys if y > 0]
    if not positive:
        raise ValueError("plot: no value is positive, so there is nothing to show on a logarithmic scale")
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    high, steps = max(high, low + 1), max(len(ys) for ys in lines.values())

    def at(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (step - 1) / max(1, steps - 1)
        return x, TOP + (HEIGHT - TOP - BOTTOM) * (high - math.log10(value)) / (high - low)

    bottom = HEIGHT - BOTTOM
    parts = [_text(LEFT, 20, title, "start", 14)]
    for power in range(low, high + 1):
        _, y = at(1, 10.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"1e{power}", "end"))
    for step in sorted({1, *range(max(1, steps // 5), steps + 1, max(1, steps // 5))}):
        parts.append(_text(at(step, 10.0**low)[0], bottom + 16, str(step), "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label, "middle"))
    parts.append(_text(14, (TOP + bottom) / 2, y_label, "middle", turn=True))
    for number, (name, ys) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join("{:.1f},{:.1f}".format(*at(step, y)) for step, y in enumerate(ys, 1) if y > 0)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts.append(_text(WIDTH - RIGHT, TOP - 8 + 16 * number, name, "end", colour=colour))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str, anchor: str, size: int = 12, turn: bool = False, colour: str = "#333") -> str:
    rotation = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{rotation}>{escaped}</text>'
