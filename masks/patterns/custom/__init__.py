"""Patterns from functions of a caller, identified by their code and captured values."""

from ._custom import custom
