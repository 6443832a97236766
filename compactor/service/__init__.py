"""Code that the agent and the daemon share: stopping, retry delays, log lines, reloading, status and metrics."""
