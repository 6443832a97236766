"""Client for the topic ``__remote_log_metadata``: reads the brokers' records about their tier and folds them as brokers do."""
