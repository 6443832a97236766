"""Keeping a tier sound: retire what was replaced, verify what is there, make sidecars anew."""
