"""The CUDA backend: launchers, kernels and the device; docs/gpu.md says what is proven of it."""
