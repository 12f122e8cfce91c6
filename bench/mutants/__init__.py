"""Mutation testing of masks/ and the engines; docs/planted_bugs.md says how, and what came out."""
