"""Reads checkpoints: HF directories of safetensors, GGUF files, hub ids, the built-in model."""
