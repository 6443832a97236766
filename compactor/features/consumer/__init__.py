"""Tier and broker as one log, for applications."""
