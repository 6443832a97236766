"""Kafka clusters that tier by themselves: their metadata topic, their admin requests, the layouts of their remote storage managers."""
