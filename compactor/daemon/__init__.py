"""The daemon: schedules rounds, retirement and outputs for all partitions of a tier."""
