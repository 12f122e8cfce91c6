"""Boxes, the algebra of patterns, and laws that any exact attention obeys."""
