"""The agent: runs beside a broker and uploads sealed segments of the partitions that this broker leads."""
