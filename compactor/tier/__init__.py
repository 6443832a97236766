"""Tiers: everything that depends on kind and layout, behind two ports."""
