"""What was tried, a line a run: a later session goes on where an earlier one ended."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# name, verdict (killed, timeout, survived, untested), effort, seconds, tests, by (the test that failed)
Entry = Mapping[str, Any]


class Journal:
    """A file of JSON lines; the newest entry of a mutant counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.entries: list[Entry] = [json.loads(line) for line in lines]
        self._newest = {entry["name"]: entry for entry in self.entries}

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        self._newest[entry["name"]] = entry
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def newest(self, name: str) -> Entry | None:
        return self._newest.get(name)
