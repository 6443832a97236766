"""Spark runtime: sessions, jobs, the environment of tasks, and version checks."""
