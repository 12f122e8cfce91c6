"""Patterns that follow training."""
