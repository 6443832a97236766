"""Upkeep of a tier: verify, repair, retire replaced segments, find orphans, export."""
