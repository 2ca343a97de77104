"""Heat maps of a layer-by-stream table as small images, drawn fast enough to be made while training waits.

    pixels_hwc = heat_map("read factors", ["001.self_attn", ...], values_rk)       # uint8 [height, width, 3]

tools/plot_streams.py draws the larger ones, with axes and a colour bar, from a checkpoint.

What always holds: pixels are bytes; the range of the colours stands in the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_CELL_HEIGHT, _CELL_WIDTH, _LINE, _CHARACTER = 14, 44, 14, 6


# Dark to light through blue and green, as matplotlib's viridis, whose import would cost a second of training.
_ANCHORS = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)])
_COLOURS = np.stack(
    [np.interp(np.linspace(0, len(_ANCHORS) - 1, 256), range(len(_ANCHORS)), channel) for channel in _ANCHORS.T], axis=1
).astype(np.uint8)


def heat_map(title: str, rows: Sequence[str], values_rk: Sequence[Sequence[float]]) -> Any:
    """Return an image with a line per row and a cell per stream: uint8 [height, width, 3]."""
    values = np.asarray(values_rk, dtype=np.float64)
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    scaled = np.nan_to_num((values - low) / (high - low if high > low else 1.0))
    cells = _COLOURS[(scaled * 255).astype(np.uint8)]
    cells = cells.repeat(_CELL_HEIGHT, axis=0).repeat(_CELL_WIDTH, axis=1)
    heading = f"{title}  {low:.4g} to {high:.4g}"
    left = _CHARACTER * (max(map(len, rows)) + 1)
    width = max(left + cells.shape[1], _CHARACTER * (len(heading) + 1))
    image = Image.new("RGB", (width, 2 * _LINE + cells.shape[0]), "white")
    image.paste(Image.fromarray(cells), (left, 2 * _LINE))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=10)
    draw.text((2, 0), heading, fill="black", font=font)
    for stream in range(values.shape[1]):
        draw.text((left + stream * _CELL_WIDTH + _CELL_WIDTH // 2, _LINE), str(stream), fill="black", font=font)
    for number, row in enumerate(rows):
        draw.text((2, 2 * _LINE + number * _CELL_HEIGHT), row, fill="black", font=font)
    return np.asarray(image)
