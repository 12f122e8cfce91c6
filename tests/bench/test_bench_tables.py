"""The tables of pages about a subject: from the files of results, and from nowhere else."""

from pathlib import Path

import pytest

from bench._pages import PAGES
from tests.support.measured import cells, write


def part(page: str, name: str, results: Path) -> str:
    return PAGES[Path(f"docs/{page}.md")][name](results)


def test_nothing_measured_is_nothing_shown(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        part("howto/compiling", "first step", tmp_path)


def test_first_steps(tmp_path: Path) -> None:
    detail = {
        "flexdilated": {"first_s": 12.34, "later_s": 0.01, "parts_s": {}},
        "torch's own attention": {"first_s": 11.0, "later_s": 0.02, "parts_s": {}},
    }
    cold = {"measure": "a model: cold first step, over that with torch's own attention", "detail": detail}
    write(tmp_path, "first_step", [cold, {"measure": "import", "measured_text": "0.2 s", "detail": {}}])
    shown = part("howto/compiling", "first step", tmp_path)
    assert cells(shown, "a model") == ["a model: cold first step", "12.3 s", "11 s", "0.01 s"]
    assert "* import: 0.2 s" in shown
    assert "a CPU, 2 cores" in shown


def test_lengths(tmp_path: Path) -> None:
    ways = {
        name: {"compilations": n, "seconds_of_all_steps": 9.87, "seconds_of_steps_that_nowhere_compile": 1.25}
        for name, n in (("as they come", 2), ("padded", 4))
    }
    detail = {"lengths": [5, 6, 7], "steps_that_nowhere_compile": 1, "ways": ways}
    write(tmp_path, "changing_lengths", [{"measure": "a net, 3 lengths: compilations", "detail": detail}])
    shown = part("howto/compiling", "lengths", tmp_path)
    assert cells(shown, "lengths")[2:] == ["all 3 steps", "the 1 steps that nowhere compile"]
    assert cells(shown, "as they come") == ["as they come", "2", "9.87 s", "1.25 s"]
    assert cells(shown, "padded")[1] == "4"
    assert "a net, 3 lengths: a CPU" in shown


def test_ranks(tmp_path: Path) -> None:
    counted = {"tokens_a_kv_head": [3.0, 5.0], "all_gather_tokens_a_kv_head": 1200.0, "all_gather_ratio": 300.4}
    rows = {
        "exchange_bytes": [
            {"measure": "a net, 4K, 2 ranks, counted: K and V", "detail": {"zigzag, 4 heads": counted}},
            {"measure": "run", "detail": {"full": {"ratio": 1.0}}},
        ],
        "rank_accuracy": [{"measure": "float32: error", "target": "≤ 1.1 ×", "measured_text": "1.01 ×", "detail": {}}],
        "work_balance": [
            {
                "measure": "a net, 4K, 2 ranks, zigzag: most over mean",
                "detail": {"zigzag": {"max_over_mean": 1.0}, "contiguous": {"max_over_mean": 1.5}},
            }
        ],
        "ring_memory": [{"measure": "ring: shards", "target": "≤ 2 shards", "measured_text": "2 shards", "detail": {}}],
    }
    for name, found in rows.items():
        write(tmp_path, name, found)
    names = ("keys received", "exactness", "balance", "ring memory")
    parts = {name: part("howto/ranks", name, tmp_path) for name in names}
    assert cells(parts["keys received"], "a net") == ["a net, 4K, 2 ranks", "zigzag, 4 heads", "4", "1,200", "300 ×"]
    assert "run" not in parts["keys received"]
    assert cells(parts["balance"], "a net") == ["a net, 4K, 2 ranks", "1.500", "1.000"]
    assert cells(parts["exactness"], "float32") == ["float32: error", "≤ 1.1 ×", "1.01 ×"]
    assert cells(parts["ring memory"], "ring") == ["ring: shards", "≤ 2 shards", "2 shards"]
