"""The two passes over segments: sources in chunks, verdicts of transactions, what stays and what goes, new segments."""
