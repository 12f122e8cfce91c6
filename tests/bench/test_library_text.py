"""The text of byte models."""

import argparse
from pathlib import Path

import torch

from bench._byte_models import library_text, validation_windows


def test_a_sixteenth_is_held_out_and_nothing_is_lost() -> None:
    """Whole files, each followed by a 0."""
    train, validation = (bytes(side.numpy()) for side in library_text())
    assert 1 / 16 <= len(validation) / (len(train) + len(validation)) < 1 / 12
    files = [set(side.split(b"\0")) for side in (train, validation)]
    assert sum(Path(argparse.__file__).read_bytes() in side for side in files) == 1


def test_validation_windows_do_not_overlap() -> None:
    numbers = torch.arange(100, dtype=torch.uint8)
    assert validation_windows(numbers, context=9, limit=4)[:, 0].tolist() == [0, 30, 60, 90]
    assert validation_windows(numbers[:25], context=9, limit=4)[:, 0].tolist() == [0, 10]
