"""Read-only answers to people's questions about a tier. Nothing in this folder writes."""
