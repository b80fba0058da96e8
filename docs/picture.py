"""Draw a run while its Redis lives: `python docs/picture.py runs/RUN/admin.join > docs/island-dies.svg`."""

from __future__ import annotations

import math
import sys
from itertools import pairwise

from archipelago.broker.process import connect_to

WIDTH, CURVE, LANE, LEFT, ROUNDS = 860, 200, 26, 90, 100_000
STYLE = """
text { font: 13px sans-serif; fill: #7a8288 } .curve { fill: none; stroke: #009485; stroke-width: 2.5 }
.sent { stroke: #009485; stroke-width: 2 } .axis { stroke: #7a828855 }
.dead { fill: #d9534f33 } .killed { fill: #d9534f }
.seen { animation: draw 9s linear infinite }
@keyframes draw { from, 8% { width: 100% } 8.1% { width: 0 } 90%, to { width: 100% } }
@media (prefers-reduced-motion: reduce) { .seen { animation: none } }
"""


def drawing(url: str) -> str:
    """Return the SVG of a run: its training loss by time, and below it each island's contributions."""
    tape = [entry for entry in connect_to(url, None).reader.tape(ROUNDS) if math.isfinite(entry.loss)]
    begin, end = tape[0].unix_seconds, tape[-1].unix_seconds
    losses = [entry.loss / math.log(2) for entry in tape]

    def x(unix_seconds: float) -> float:
        return round(LEFT + (WIDTH - LEFT - 12) * (unix_seconds - begin) / (end - begin), 1)

    def y(loss: float) -> float:
        return round(20 + (CURVE - 30) * (max(losses) - loss) / (max(losses) - min(losses)), 1)

    points = " ".join(f"{x(entry.unix_seconds)},{y(loss)}" for entry, loss in zip(tape, losses, strict=True))
    parts = [f'<polyline class="curve" points="{points}"/>']
    labels = [f'<text x="4" y="{y(loss) + 4}">{loss:.1f} bits</text>' for loss in (max(losses), min(losses))]
    for lane, island in enumerate(sorted({member.island for entry in tape for member in entry.members})):
        top = CURVE + lane * LANE
        sent = [(entry.unix_seconds, each) for entry in tape for each in entry.members if each.island == island]
        parts += [f'<path class="sent" d="M{x(at)},{top + 6}v12"/>' for at, _ in sent]
        labels.append(f'<text x="4" y="{top + 17}">{island}</text>')
        for (before, last), (after, first) in pairwise(sent):
            if last.incarnation != first.incarnation:
                width = round(x(after) - x(before), 1)
                parts.append(f'<rect class="dead" x="{x(before)}" y="{top}" width="{width}" height="{LANE - 2}"/>')
                parts.append(f'<text class="killed" x="{x(before) + 6}" y="{top + 16}">killed</text>')
    height = CURVE + LANE * (len(labels) - 2) + 24
    labels.append(f'<text x="{LEFT}" y="{height - 6}">{end - begin:.0f} seconds, {len(tape)} rounds</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {height}"><style>{STYLE}</style>'
    seen = f'<clipPath id="seen"><rect class="seen" x="0" y="0" width="100%" height="{height}"/></clipPath>'
    axis = f'<path class="axis" d="M{LEFT},{CURVE - 6}H{WIDTH - 12}"/>'
    return "\n".join([head, seen, axis, *labels, '<g clip-path="url(#seen)">', *parts, "</g>", "</svg>", ""])


if __name__ == "__main__":
    sys.stdout.write(drawing(sys.argv[1]))
