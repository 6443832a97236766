"""`serve`: a read-only endpoint that speaks Kafka's protocol over a tier. ``endpoint.run`` is its face."""
