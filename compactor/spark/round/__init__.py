"""A round spread over executors: pass 1 exchanged by hash ranges, pass 2 by groups, many small partitions in one job."""
