"""What lies on this machine: the disk budget, staged and spooled files, the cache. All of it may be lost."""
