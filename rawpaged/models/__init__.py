"""Model configurations, weights and forward passes, for all backends."""
