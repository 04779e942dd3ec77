"""The CPU backend: Numba kernels over NumPy arrays, sums in float32."""
