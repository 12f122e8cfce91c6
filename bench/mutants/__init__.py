"""Mutation testing of masks/ and the engines: `python -m bench.mutants --help` says how, docs/planted_bugs.md what came out."""
