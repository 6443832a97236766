"""The equivalence gate: a second, simpler implementation that checks the first before anything is uploaded."""
