"""What numba compiles: loads and stores inside byte arrays, CRC."""
