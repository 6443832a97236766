"""Equivalence gate: a second, simpler implementation of cleaning checks the output of the first one before anything is uploaded."""
