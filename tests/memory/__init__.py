"""Predicted memory."""
