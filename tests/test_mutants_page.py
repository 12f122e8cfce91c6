"""The figures of docs/planted_bugs.md: from the file of results, and from nowhere else."""

import json
from pathlib import Path

from bench._mutants_page import mutants_parts

SHARE = {"tried": 200, "interval_95": [0.75, 0.85]}


def test_the_part(tmp_path: Path) -> None:
    found = {
        "commit": "0123456789",
        "seed": 3,
        "mutants": 12345,
        "at_first": {**SHARE, "caught": 160, "share": 0.8},
        "with_the_tests_since": {**SHARE, "caught": 170, "share": 0.85},
        "without_equivalent_ones": {"caught": 170, "tried": 180, "share": 170 / 180, "interval_95": [0.9, 0.97]},
        "alive_by_kind": {"equivalent": 4, "only speed": 16, "only words": 0, "needs a device": 0, "hole": 10},
        "caught_since": [{}] * 10,
        "out_of_time": 2,
        "controls": {"passed": 5, "run": 5},
        "by_operator": {"sign": {"tried": 7, "caught": 6}},
    }
    (tmp_path / "mutants.json").write_text(json.dumps(found))
    shown = mutants_parts(tmp_path)["mutants"]
    assert "Of 12,345 mutants, 200 were drawn (seed 3) and tried on commit 0123456." in shown
    assert "Caught were 160 of 200, 80.0% (95 % interval 75.0% to 85.0%)" in shown
    assert "catch 10 more: 170 of 200, 85.0%" in shown
    assert "170 of 180, 94.4%" in shown
    assert "Alive are 30: 4 where no input tells them apart; 16 where only time" in shown
    assert "of a message" not in shown
    assert "| sign " in shown
