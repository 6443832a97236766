"""Implementations of SegmentLayout, one per value of ``tier.layout``. They do not depend on each other."""
