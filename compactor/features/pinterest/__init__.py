"""Buckets of Pinterest's tiered storage: read as a tier, and written as generations."""
