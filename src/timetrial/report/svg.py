"""A matplotlib drawing as inline SVG that takes its colours and its font from the page's style sheet.

matplotlib writes fixed colours. Drawings here use marker colours, one for each role (ink, grid, loss
...), which become `var(--ink)`, `var(--grid)` ... in the text of the SVG: one drawing serves light,
dark and print. Text stays text: it is selectable, scales with the page and needs no embedded font.
Coordinates are rounded to a hundredth of a pixel, which nobody can see.

Figure objects alone, no pyplot: nothing is left behind in the process. One unit of the drawing is
one CSS pixel where the drawing is shown at its own width.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import matplotlib
from matplotlib.figure import Figure

ROLES = (
    *("surface", "ink", "muted", "grid", "loss", "evaluation", "target", "bad"),
    *("data", "forward", "backward", "optimizer", "checkpoint", "other"),
)
COLOR = {role: f"#a1b2{index:02x}" for index, role in enumerate(ROLES)}
"""Role -> the colour to draw with; the style sheet has a variable of the role's name."""

POINTS_PER_INCH = 72  # of SVG

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",  # comes with matplotlib and is wide: what fits in it fits in the page's font
    "font.size": 12,
    "axes.edgecolor": COLOR["muted"],
    "axes.facecolor": "none",
    "axes.labelcolor": COLOR["muted"],
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": COLOR["grid"],
    "grid.linewidth": 1,
    "text.color": COLOR["ink"],
    "text.parse_math": False,
    "xtick.color": COLOR["muted"],
    "ytick.color": COLOR["muted"],
    "xtick.major.pad": 5,
    "ytick.major.pad": 8,  # clear of the first label below
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "lines.solid_capstyle": "round",
}


def draw(paint: Callable[[Figure], None], width: int, height: int, name: str, title: str) -> str:
    """What `paint` draws, as an <svg> element `width` x `height` pixels in proportion.

    `name` prefixes its ids, which must not occur twice in a page; `title` is its accessible name.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(width / POINTS_PER_INCH, height / POINTS_PER_INCH))
        paint(figure)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>|<!--.*?-->", "", body, count=0, flags=re.DOTALL)
    for role, marker in COLOR.items():
        body = body.replace(marker, f"var(--{role})")
    body = re.sub(r" font-family: [^;\"]*;?", "", body)
    body = re.sub(r" transform=\"rotate\(-?0 [^)]*\)\"", "", body)
    body = re.sub(r"-?\d+\.\d{3,}(?=[\s\"])", _two_decimals, body)
    body = re.sub(r"\s*\n\s*", "\n", _own_ids(body, name))
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label={quoteattr(title)}>'
        f"<title>{escape(title)}</title>{body}</svg>"
    )


def _two_decimals(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _own_ids(body: str, name: str) -> str:
    """Ids that something refers to, made unique in the page; the others dropped."""
    used = set(re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', body))
    body = re.sub(r' id="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", body)
    return body.replace('xlink:href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
