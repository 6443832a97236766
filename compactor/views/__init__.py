"""Read-only answers to questions about a tier."""
