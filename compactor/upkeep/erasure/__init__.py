"""Whether a key is gone from a tier: what still holds it, what has to pass until it is gone, and a report that can be filed."""
