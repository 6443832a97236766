"""Sidecars of segments: key hashes, Bloom filters and their sizing, producer runs, and their serialized form."""
