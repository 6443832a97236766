"""Report and bring forward the erasure of keys: which objects still hold a key, and what has to happen until it is gone."""
