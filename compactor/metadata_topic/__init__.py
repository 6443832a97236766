"""``__remote_log_metadata``: where brokers write what lies in their tier, read and folded as they read and fold it."""
