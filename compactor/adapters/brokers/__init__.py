"""Kafka clusters that tier by themselves."""
