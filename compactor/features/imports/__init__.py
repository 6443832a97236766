"""Imports of log directories and of other tiers."""
