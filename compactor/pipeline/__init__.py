"""plan -> announce -> work -> verify -> publish -> grace -> retire, for one partition, and what to do after a crash."""
