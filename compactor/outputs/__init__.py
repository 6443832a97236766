"""Outputs: a partition's compacted view, written for readers that do not know the tier. There is one kind: generations in Pinterest's
layout.
"""
