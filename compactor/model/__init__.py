"""Frozen values that travel one way: plan -> task -> receipt | failure -> replacement. No IO, no clock, no randomness."""
