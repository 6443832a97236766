"""In and out of the tier: Kafka log directories imported and exported."""
