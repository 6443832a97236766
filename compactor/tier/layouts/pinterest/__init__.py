"""Pinterest's tiered storage (github.com/pinterest/tiered-storage): an uploader beside the broker, consumers that read the bucket."""
