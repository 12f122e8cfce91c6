"""Patterns as text: JSON, expressions, and how they print."""

from ._json import from_json, kept_functions, read_text, to_json
from ._parse import parse
from ._plain_json import read_json
