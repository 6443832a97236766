"""Distributed cleaning round: pass 1 exchanges keys by hash range, pass 2 rewrites groups, and small partitions share Spark jobs."""
