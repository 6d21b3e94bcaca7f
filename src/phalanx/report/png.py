"""Fields as pictures: colours for numbers, and PNG without a library."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
import numpy.typing as npt

from phalanx.report.run_log import FloatArray

Pixels = npt.NDArray[np.uint8]
Anchors = tuple[tuple[int, int, int], ...]

SEQUENTIAL: Anchors = ((27, 31, 76), (46, 89, 141), (62, 149, 160), (127, 194, 132), (230, 215, 105), (252, 243, 196))
"""Dark to bright, so that order shows without colour vision."""
DIVERGING: Anchors = (
    (20, 67, 122),
    (90, 153, 200),
    (201, 222, 236),
    (247, 246, 243),
    (245, 208, 180),
    (214, 116, 84),
    (130, 27, 40),
)
"""Blue below the middle, red above."""
_MISSING = (160, 160, 160)


def paint_values(values: FloatArray, low: float, high: float, anchors: Anchors) -> Pixels:
    """Return colours [H, W, 3] of values [H, W] from `low` to `high`, ends held; grey where a value is not finite."""
    share = np.clip((values - low) / ((high - low) or 1.0), 0.0, 1.0)
    known = np.isfinite(share)
    places = np.linspace(0.0, 1.0, len(anchors))
    table = np.array(anchors, dtype=np.float64)
    parts = [np.interp(np.where(known, share, 0.0), places, table[:, channel]) for channel in range(3)]
    pixels = np.stack(parts, axis=-1).round().astype(np.uint8)
    return np.where(known[..., None], pixels, np.array(_MISSING, dtype=np.uint8))


def encode_png(pixels: Pixels) -> bytes:
    """Return an RGB picture [H, W, 3] as a PNG file (ISO/IEC 15948), its first row on top."""
    height, width, _ = pixels.shape
    # each row begins with the number of its filter, 0 for none
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    for kind, body in ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b"")):
        content += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return content


def encode_address(pixels: Pixels) -> str:
    """Return the picture as the address of an image element."""
    return "data:image/png;base64," + base64.b64encode(encode_png(pixels)).decode()
