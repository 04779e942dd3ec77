"""CUDA C++ sources, read as package data."""
