"""Spark as a machine: sessions, jobs, executors, versions."""
