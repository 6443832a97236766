"""Offset maps: for each key its last record, in memory or on local disk."""
