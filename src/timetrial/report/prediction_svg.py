"""A small pen for inline SVG: rectangles, lines and text in the colours of the page's style sheet.

One unit is one CSS pixel at the drawing's own width. Many rectangles of one colour are one path.
"""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr


class Drawing:
    """One chart, painted in the order of the calls."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.body: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, color: str, words: str = "", round: int = 0
    ) -> None:
        """A rectangle in `color` (a variable of the style sheet); `words` are shown where the pointer rests."""
        corners = f' rx="{round}"' if round else ""
        inside = f"><title>{escape(words)}</title></rect>" if words else "/>"
        self.body.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"{corners} fill="var(--{color})"'
            f"{inside}"
        )

    def rects(self, boxes: list[tuple[float, float, float, float]], color: str) -> None:
        """Many (x, y, width, height) as one path."""
        if boxes:
            path = "".join(f"M{_n(x)} {_n(y)}h{_n(w)}v{_n(h)}h{_n(-w)}z" for x, y, w, h in boxes)
            self.body.append(f'<path d="{path}" fill="var(--{color})"/>')

    def stairs(self, x: float, step: float, base: float, heights: list[float], color: str) -> None:
        """Columns side by side, `step` wide each, from `base` up."""
        path = "".join(f"V{_n(base - h)}h{_n(step)}" for h in heights)
        self.body.append(f'<path d="M{_n(x)} {_n(base)}{path}V{_n(base)}z" fill="var(--{color})"/>')

    def line(self, points: list[tuple[float, float]], color: str, width: float = 1, dashed: bool = False) -> None:
        """A line through points."""
        path = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        dash = ' stroke-dasharray="5 3"' if dashed else ""
        self.body.append(f'<path d="{path}" fill="none" stroke="var(--{color})" stroke-width="{width:g}"{dash}/>')

    def dot(
        self, x: float, y: float, radius: float, color: str, words: str = "", hollow: bool = False, faint: bool = False
    ) -> None:
        """A disk or ring; `faint`: of what is no part of the comparison."""
        fill, edge = ("surface", color) if hollow else (color, "surface")
        inside = f"><title>{escape(words)}</title></circle>" if words else "/>"
        weak = ' opacity="0.35"' if faint else ""
        self.body.append(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{radius:g}" fill="var(--{fill})" stroke="var(--{edge})"'
            f' stroke-width="{2 if hollow else 1.2}"{weak}{inside}'
        )

    def text(self, x: float, y: float, words: str, anchor: str = "start", color: str = "muted", size: int = 12) -> None:
        """Text with its base line at `y`; `anchor`: start, middle or end."""
        at = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.body.append(
            f'<text x="{_n(x)}" y="{_n(y)}"{at} font-size="{size}" fill="var(--{color})">{escape(words)}</text>'
        )

    def svg(self) -> str:
        """The element."""
        return (
            f'<svg class="chart" viewBox="0 0 {self.width} {self.height}" role="img"'
            f" aria-label={quoteattr(self.title)}><title>{escape(self.title)}</title>{''.join(self.body)}</svg>"
        )


def _n(x: float) -> str:
    """A coordinate, to a hundredth of a pixel."""
    return f"{x:.2f}".rstrip("0").rstrip(".") if x else "0"


def ticks(most: float, about: int) -> list[float]:
    """Round numbers from 0 to at most `most`, about as many as asked for."""
    if most <= 0:
        return [0.0]
    raw = most / about
    power = 10.0 ** _floor_log10(raw)
    step = next(power * f for f in (1, 2, 2.5, 5, 10) if power * f >= raw * 0.999)
    return [i * step for i in range(int(most / step * 1.0001) + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two numbers above 0, for a logarithmic axis: the finest set of no more than `most`."""
    powers = range(_floor_log10(low), _floor_log10(high) + 1)
    found: list[float] = []
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), tuple(d / 10 for d in range(10, 100, 5))):
        now = [d * 10.0**p for p in powers for d in digits if low <= d * 10.0**p <= high]
        if len(now) > most:
            break
        found = now
    return found


def _floor_log10(x: float) -> int:
    return int(f"{x:e}".partition("e")[2])
