"""The tier as a Spark data source."""
