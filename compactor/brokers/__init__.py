"""Everything that concerns Kafka brokers: their metadata topic, their view of a tier, and publication through them."""
