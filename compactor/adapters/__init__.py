"""Adapters of the core's ports: brokers, and the stores of cloud vendors."""
