"""Frozen values. No IO, no clock, no randomness."""
