"""The data source over remote segments, and rounds whose tasks run on a Spark cluster."""
