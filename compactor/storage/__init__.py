"""One object-store port and its adapters. Nothing here knows what the objects mean."""
