"""Tests of flexdilated/selection."""
