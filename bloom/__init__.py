"""What one segment's keys are, and what forces it to be read: key hash, filter sizing, Bloom filter, sidecar bytes."""
