"""The control log: what happened to a partition, in order, and the fold that says what that comes to."""
