"""What people ask of a tier. Nothing here writes."""
