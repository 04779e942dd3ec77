"""The CPU backend: Numba kernels over NumPy arrays, float32 arithmetic."""
