"""The training script of docs/howto/ranks.md, on ranks as torchrun would start them."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.support.ranks import on_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "ranks.md"


def script() -> str:
    """The block that the page says to save as `train.py`."""
    text = PAGE.read_text(encoding="utf-8").partition("Save this as `train.py`")[2]
    found = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def run_script(code: str) -> str:
    """What the script prints on this rank, in the process group that is there."""
    printed = io.StringIO()
    kept = mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT)
    with kept, redirect_stdout(printed):
        exec(compile(code, "train.py", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def losses(num_ranks: int) -> list[float]:
    """What the first rank prints, and no other."""
    printed, *others = on_ranks(num_ranks, run_script, script())
    assert others == [""] * (num_ranks - 1)
    ranks, _, rest = printed.partition(" ranks: ")
    assert ranks == str(num_ranks)
    return [float(loss) for loss in re.findall(r"\d+\.\d+", rest)]


@pytest.mark.slow
def test_script_trains_alike_on_any_number_of_ranks() -> None:
    """On three, shards are of different lengths. The last digit may differ by rounding."""
    first, last = losses(3)
    assert (first, last) == pytest.approx(losses(1), abs=2e-3)
    assert last < first / 2
