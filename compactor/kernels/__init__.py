"""Helpers that numba compiles into kernels: loads and stores in byte arrays, varints, and CRC-32C."""
