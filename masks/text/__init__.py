"""Patterns as text: JSON, expressions, and how they print."""

from ._json import from_json, kept_functions, read_json, read_text, to_json
from ._parse import parse
