"""Pictures: PNG as the standard has it, and colours of values."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from phalanx.families.weather.evaluation.forecast_page import DIVERGING, SEQUENTIAL, encode_png, paint_values


def decoded(content: bytes) -> np.ndarray:
    """The pixels of an unfiltered RGB picture, every checksum compared."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    place, chunks = 8, {}
    while place < len(content):
        (length,) = struct.unpack_from(">I", content, place)
        kind, body = content[place + 4 : place + 8], content[place + 8 : place + 8 + length]
        assert struct.unpack_from(">I", content, place + 8 + length)[0] == zlib.crc32(kind + body)
        chunks[kind] = body
        place += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 2, 0, 0, 0]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def test_a_picture_comes_back() -> None:
    pixels = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    np.testing.assert_array_equal(decoded(encode_png(pixels)), pixels)


def test_values_have_the_colours_of_their_places() -> None:
    values = np.array([[0.0, 10.0, 5.0], [-99.0, 99.0, np.nan]])
    found = paint_values(values, 0.0, 10.0, DIVERGING)
    assert found[0].tolist() == [list(DIVERGING[0]), list(DIVERGING[-1]), list(DIVERGING[3])]
    assert found[1].tolist() == [list(DIVERGING[0]), list(DIVERGING[-1]), [160, 160, 160]]
    # A field that is the same everywhere divides by nothing.
    assert paint_values(np.ones((1, 1)), 1.0, 1.0, SEQUENTIAL)[0, 0].tolist() == list(SEQUENTIAL[0])


def test_brightness_follows_the_value() -> None:
    found = paint_values(np.linspace(0, 1, 50)[None], 0.0, 1.0, SEQUENTIAL)[0] @ np.array([0.2126, 0.7152, 0.0722])
    assert (np.diff(found) > 0).all()
