"""Patterns as text."""
