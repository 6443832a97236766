"""The records of the tier for applications: ranges of offsets, whole states, and the tier and then the broker as one log."""
