"""The two passes over segments: reading sources in chunks, transaction verdicts, retention rules, and writing new segments."""
