"""Patterns and what is planned from them, room by room."""
