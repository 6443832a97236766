"""The agent beside a broker without tiered storage: it uploads closed segments."""
