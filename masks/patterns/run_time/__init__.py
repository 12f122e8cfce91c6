"""Patterns whose tensors come with a call: documents, lengths, visible keys."""
