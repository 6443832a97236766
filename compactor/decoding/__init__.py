"""Keys and values as people read them: text, JSON, and Avro by a schema registry."""
