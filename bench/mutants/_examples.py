"""How many examples hypothesis draws for each test while a mutant runs, and that it does not shrink what fails."""

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
