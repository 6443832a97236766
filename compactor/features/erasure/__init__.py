"""Erasure of keys from everything that the tier keeps."""
