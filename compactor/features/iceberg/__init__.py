"""Compacted topics as Iceberg tables."""
