"""Settings: what the configuration file may hold, and where each value in force comes from."""
