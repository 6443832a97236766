"""One process's access to one tier, in the same terms for every kind of tier."""
