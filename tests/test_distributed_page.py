"""The training script of docs/distributed.md, started as the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "distributed.md"


def script() -> str:
    """The block that the page says to save as `train.py`."""
    text = PAGE.read_text(encoding="utf-8").partition("Save this as `train.py`")[2]
    found = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def losses(folder: Path, num_ranks: int) -> list[str]:
    """What the script prints last, without the number of ranks; in a folder that holds nothing else."""
    (folder / "train.py").write_text(script(), encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", str(num_ranks), "train.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PAGE.parents[1])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    ranks, _, rest = done.stdout.partition(" ranks: ")
    assert ranks == str(num_ranks)
    return re.findall(r"\d+\.\d+", rest)


@pytest.mark.slow
def test_script_trains_alike_on_any_number_of_ranks(tmp_path) -> None:
    """On three, shards are of different lengths. The last digit may differ by rounding."""
    first, last = map(float, losses(tmp_path, 3))
    alone = [float(loss) for loss in losses(tmp_path, 1)]
    assert (first, last) == pytest.approx(alone, abs=2e-3)
    assert last < first / 2
