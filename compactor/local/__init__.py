"""Local state that may be lost."""
