"""The offset map: which record of a key is its last, in memory or on local disk."""
