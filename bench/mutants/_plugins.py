"""What pytest does otherwise while a mutant runs: few examples that are not shrunk, and chosen tests in their order."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Examples:
    """A plugin of pytest: the profile is chosen after tests/conftest.py chose its own, before a test is read."""

    count: int

    def pytest_collection(self) -> None:
        from hypothesis import Phase, settings

        settings.register_profile(
            "mutants",
            settings.get_profile("ci"),
            max_examples=self.count,
            phases=[Phase.explicit, Phase.generate],
            derandomize=True,
            database=None,
            print_blob=False,
        )
        settings.load_profile("mutants")


@dataclass(frozen=True)
class Chosen:
    """A plugin of pytest: these tests in this order. Named one by one on the command line, odd names are not found."""

    tests: Sequence[str]

    def pytest_collection_modifyitems(self, items: list) -> None:
        place = {test: number for number, test in enumerate(self.tests)}
        items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])
