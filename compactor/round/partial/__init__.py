"""Partial rewrites: of a large clean segment only the affected batches are read; the store copies the rest."""
