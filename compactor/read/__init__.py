"""Records of the tier: ranges of offsets and last values of all keys."""
