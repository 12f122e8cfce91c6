"""Patterns as text: JSON, and printed expressions."""

from ._json import from_json, kept_functions, parse, read_json, read_text, to_json
