"""The object-store port, the directory store, and what all stores share. Nothing here knows what the objects mean."""
