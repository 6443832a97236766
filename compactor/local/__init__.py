"""Local state that may be lost: the disk budget, staged and spooled files, and the cache."""
