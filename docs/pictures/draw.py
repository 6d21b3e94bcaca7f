"""Draw the diagrams of the documentation as SVG: `python docs/pictures/draw.py` writes them beside itself."""

from __future__ import annotations

from pathlib import Path

CELL, GAP = 74, 8
COLOURS = ("#c5cae9", "#b2dfdb", "#ffe0b2", "#f8bbd0")
FLOW = ("run file", "config", "layout.spec", "layout.apply", "data", "training", "report")
GIVES = ("YAML", "Run", "ResolvedLayout", "model on this rank", "samples of step k", "checkpoints, metrics", "one page")


def draw_layout(pp: int = 2, dp_shard: int = 4, tp: int = 2) -> str:
    """Return a grid of all ranks: a row for each stage, shards side by side, tensor-parallel parts as neighbours."""
    width = dp_shard * tp * CELL + (dp_shard + 1) * GAP + 120
    body = []
    for stage in range(pp):
        top = 40 + stage * (CELL + 30)
        body.append(_text(10, top + CELL / 2 + 5, f"pp {stage}", anchor="start"))
        for shard in range(dp_shard):
            for part in range(tp):
                rank = (stage * dp_shard + shard) * tp + part
                left = 70 + shard * (tp * CELL + GAP) + part * CELL
                body.append(_box(left, top, CELL - 2, CELL, COLOURS[shard % len(COLOURS)]))
                body.append(_text(left + CELL / 2 - 1, top + 32, f"rank {rank}"))
                body.append(_text(left + CELL / 2 - 1, top + 54, f"tp {part}", size=12))
    for shard in range(dp_shard):
        body.append(_text(70 + shard * (tp * CELL + GAP) + tp * CELL / 2, 26, f"dp_shard {shard}"))
    return _picture(width, 40 + pp * (CELL + 30), body)


def draw_architecture() -> str:
    """Return the rooms that a run passes through, in order, and what each hands to the next."""
    body = []
    for i, (room, gives) in enumerate(zip(FLOW, GIVES, strict=True)):
        top = 10 + i * 62
        body += [_box(10, top, 190, 40, COLOURS[i % len(COLOURS)]), _text(105, top + 25, room)]
        body.append(_text(220, top + 25, gives, size=13, anchor="start"))
        if i + 1 < len(FLOW):
            body.append(
                f'<path d="M105 {top + 40} v18 m-5 -6 l5 6 l5 -6" fill="none" stroke="#5c6bc0" stroke-width="2"/>'
            )
    return _picture(400, 10 + len(FLOW) * 62, body)


def _picture(width: float, height: float, body: list[str]) -> str:
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}">'
    white = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([start, white, *body, "</svg>", ""])


def _box(left: float, top: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="6" fill="{colour}"/>'


def _text(left: float, top: float, words: str, size: int = 14, anchor: str = "middle") -> str:
    font = f'font-family="sans-serif" font-size="{size}" fill="#222"'
    return f'<text x="{left:g}" y="{top:g}" text-anchor="{anchor}" {font}>{words}</text>'


def write_pictures(folder: Path) -> None:
    """Write both pictures into `folder`."""
    (folder / "layout.svg").write_text(draw_layout(), "utf-8")
    (folder / "architecture.svg").write_text(draw_architecture(), "utf-8")


if __name__ == "__main__":
    write_pictures(Path(__file__).parent)
