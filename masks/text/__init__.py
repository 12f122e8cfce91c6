"""Patterns as text: JSON, expressions, and how they print."""
