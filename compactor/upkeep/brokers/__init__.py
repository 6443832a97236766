"""Checks and verification of broker-managed tiers."""
