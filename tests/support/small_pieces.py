"""Segments read in pieces of a few hundred bytes."""

from __future__ import annotations

import pytest

from compactor.read import pieces, reading


def cut_into_pieces(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    """Replace the sizes of all pieces."""
    for method in (pieces.SegmentReader.read_piece, pieces.SegmentReader.find_piece_end, pieces.SegmentReader.piece_spans_backwards):
        monkeypatch.setattr(method, "__defaults__", (piece_bytes,))
    monkeypatch.setattr(pieces.PiecePrefetcher._fetch_piece, "__defaults__", (piece_bytes,))
    monkeypatch.setattr(reading, "FIRST_PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(pieces, "FETCH_BYTES", piece_bytes)
