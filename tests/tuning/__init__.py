"""Measured plans."""
