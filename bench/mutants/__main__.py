"""Try a sample of mutants of masks/ and the engines: `python -m bench.mutants --sample 300 --seed 0`.

A copy of the committed tree is mutated, never the checkout. It needs `coverage` (pip install coverage) and an hour or
so: which tests run which line is recorded once for a commit and kept, as is every mutant that was tried.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

from ._child import warm_up
from ._coverage import read, record, test_files
from ._journal import Journal
from ._mutants import Mutant, all_mutants
from ._run import compile_once, copies_of, jobs_of, survivors_of, try_all
from ._sample import sampling_order
from ._score import result, verdicts_in

_RESULT = Path("bench/results/mutants.json")
_VERDICTS = Path(__file__).with_name("verdicts.json")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    folder = options.work.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tree = folder / "tree"
    if not tree.exists():
        _unpack(tree, folder)
    order = sampling_order(all_mutants(tree), options.seed)
    journal = Journal(folder / f"tried-{options.seed}.jsonl")
    if not options.report:
        _try(options, order, tree, folder, journal)
    facts = {"commit": (folder / "commit").read_text().strip(), "seed": options.seed}
    document = result(order, journal, verdicts_in(_VERDICTS), **facts)
    options.out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    share = document["with_the_tests_since"]
    print(f"caught {share['caught']} of {share['tried']}: {share['share']:.1%}; written to {options.out}")
    return 0


def _try(options: argparse.Namespace, order: list[Mutant], tree: Path, folder: Path, journal: Journal) -> None:
    warm_up()
    if not (folder / "copy0").exists():
        compile_once(tree)
    names, recorded_in = test_files(tree), folder / "coverage"
    if options.again:
        names, recorded_in, tree = options.again, folder / "coverage-again", _with_room_for_tests(tree)
        shutil.rmtree(recorded_in, ignore_errors=True)
        for name in names:
            shutil.copy2(name, tree / name)
    record(tree, names, recorded_in, at_once=options.at_once, limit_s=options.limit_s)
    explained = {name for name, found in verdicts_in(_VERDICTS).items() if found["is"] != "hole"}
    sample = order[: options.sample]
    jobs = survivors_of(order, journal) if options.again else jobs_of(sample, tree, journal, explained)
    copies, until = copies_of(tree, folder, options.at_once), time.time() + 60 * options.minutes
    try_all(jobs, read(recorded_in), tree, copies, journal, until)


def _with_room_for_tests(tree: Path) -> Path:
    """A copy, to which tests may be added: the tree stays that of its commit."""
    other = tree.with_name("tree-again")
    shutil.rmtree(other, ignore_errors=True)
    return shutil.copytree(tree, other, symlinks=True)


def _unpack(tree: Path, folder: Path) -> None:
    """The committed tree; what is not committed is not tried."""
    archive = folder / "tree.tar"
    subprocess.run(["git", "archive", "--output", str(archive), "HEAD"], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    (folder / "commit").write_text(commit.stdout)
    with tarfile.open(archive) as packed:
        packed.extractall(tree, filter="data")
    archive.unlink()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.mutants", description=__doc__)
    parser.add_argument("--sample", type=int, default=300, metavar="N", help="how many mutants (300)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no mutant after so long")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="how many run at a time (2)")
    parser.add_argument("--limit-s", type=float, default=600, metavar="S", help="of one file while tests are recorded")
    parser.add_argument(
        "--work", type=Path, default=Path("build/mutants"), help="folder of copies and of what was tried"
    )
    parser.add_argument("--again", nargs="+", metavar="FILE", help="try the survivors again, with these files of tests")
    parser.add_argument("--report", action="store_true", help="try nothing; write what is known")
    parser.add_argument("--out", type=Path, default=_RESULT, help=f"the result ({_RESULT})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
