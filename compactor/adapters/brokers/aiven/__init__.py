"""Objects of Aiven's remote storage manager."""
