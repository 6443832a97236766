"""Web pages, JSON API, health and metrics of the daemon and the agent."""
