"""Simulated serving over lengths of requests: the PagedAttention paper's tables."""
