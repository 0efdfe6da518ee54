"""Predicted against measured: a matrix of settings run for real, and what the records say."""
