"""Blocks of pairs: a rule over slots, the search for blocks by bounds, tables of them."""
