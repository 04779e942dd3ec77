"""The GPU backend's place: imported as `rawpaged.gpu`. This version holds no kernels yet."""
