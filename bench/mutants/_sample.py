"""An order of all mutants of which every beginning is a fair sample: each file has its share, and none is preferred."""

import random
from collections.abc import Sequence
from itertools import groupby

from ._mutants import Mutant


def sampling_order(mutants: Sequence[Mutant], seed: int) -> list[Mutant]:
    """The same for the same seed.

    The mutants of a file, shuffled, are laid at even distances over [0, 1) from a random start: among the first
    n of all there are n times the file's share, rounded up or down.
    """
    placed = []
    for file, group in groupby(sorted(mutants), key=lambda mutant: mutant.file):
        own = list(group)
        # Seeded by the file too: a change of one file leaves the order of the others.
        generator = random.Random(f"{seed} {file}")
        generator.shuffle(own)
        start = generator.random()
        placed += [((start + place) / len(own), mutant) for place, mutant in enumerate(own)]
    return [mutant for _, mutant in sorted(placed)]
