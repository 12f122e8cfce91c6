"""Patterns from functions of a caller, known by their code and what they captured."""

from ._custom import custom
