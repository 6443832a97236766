"""The daemon: schedules rounds, retirement and outputs for all partitions of a tier, with a few threads under common budgets."""
