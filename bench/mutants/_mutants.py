"""Every mutant of a file: where, what it was and what it becomes; and what is left out by rule."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ._operators import OPERATORS

# What computes masks and attention.
_MUTATED = ("masks", "flexdilated/engines", "flexdilated/decoding")
_MUTATED += tuple(f"flexdilated/_{name}.py" for name in ("attend", "engines", "validate"))
# Text for people; what computes nothing that a caller could see.
_TEXT = {"__repr__", "__str__"}
_SAID = {"debug", "info", "warning", "warn", "cast", "TypeVar"}
# Whether the constants of a machine are right decides what is fast, never what is computed.
_RATES = {"masks/planning/machine/_machine.py"}


@dataclass(frozen=True, order=True)
class Mutant:
    """One change of one file: bytes start to end of it become `after`; `seen` says how the line changes."""

    file: str
    line: int
    column: int
    operator: str
    number: int
    start: int
    end: int
    before: str
    after: str

    @property
    def name(self) -> str:
        """What it is called in the table of results: as long as the file stays, so does the name."""
        return f"{self.file}:{self.line}:{self.column}+{self.end - self.start}:{self.operator}:{self.number}"

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def mutated_files(tree: Path) -> list[str]:
    """The files of which there are mutants."""
    places = [tree / name for name in _MUTATED]
    files = [file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place])]
    return sorted(file.relative_to(tree).as_posix() for file in files if file.name != "__init__.py")


def all_mutants(tree: Path) -> list[Mutant]:
    """In the order of files and lines; the same for the same tree."""
    return [mutant for file in mutated_files(tree) for mutant in mutants_of(file, (tree / file).read_bytes())]


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """Every mutant of the file; a few may not compile."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in _nodes(ast.parse(source), file):
        for operator in OPERATORS:
            for number, (old, new) in enumerate((_written(node), _written(other)) for other in operator(node)):
                first = starts[old.lineno - 1] + old.col_offset
                last = starts[(old.end_lineno or 0) - 1] + (old.end_col_offset or 0)
                before, place = source[first:last].decode(), (old.lineno, old.col_offset)
                found.append(Mutant(file, *place, operator.__name__, number, first, last, before, _text(new)))
    return sorted(found)


def _written(node: ast.AST) -> ast.stmt | ast.expr:
    """What of the node is written anew: of an `if`, only what it asks."""
    written = node.test if isinstance(node, ast.If) else node
    assert isinstance(written, ast.stmt | ast.expr)
    return written


def _nodes(node: ast.AST, file: str) -> Iterator[ast.AST]:
    """The nodes that may be mutated, outermost first."""
    for child in ast.iter_child_nodes(node):
        if not _is_left_out(child, node, file):
            yield child
            yield from _nodes(child, file)


def _is_left_out(node: ast.AST, parent: ast.AST, file: str) -> bool:
    """Annotations, decorators, documentation, text of errors, the log, our own invariants, names of types."""
    if isinstance(node, ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom | ast.Global | ast.alias):
        return True
    if isinstance(node, ast.FunctionDef) and node.name in _TEXT:
        return True
    if isinstance(parent, ast.Raise):
        return True
    if isinstance(node, ast.expr) and _is_of_a_type(node, parent):
        return True
    if isinstance(parent, ast.FunctionDef | ast.ClassDef) and node in parent.decorator_list:
        return True
    call = node.value if isinstance(node, ast.Expr) else node
    if isinstance(call, ast.Call):
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        if name in _SAID:
            return True
    return file in _RATES and isinstance(node, ast.Constant)


def _is_of_a_type(node: ast.expr, parent: ast.AST) -> bool:
    if isinstance(parent, ast.AnnAssign | ast.arg) and node is parent.annotation:
        return True
    if isinstance(parent, ast.FunctionDef) and node is parent.returns:
        return True
    named = isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Name)
    return named and isinstance(node, ast.Subscript) and parent.targets[0].id[:1].isupper()  # pyright: ignore


def _text(node: ast.stmt | ast.expr) -> str:
    text = ast.unparse(node)
    return text if isinstance(node, ast.stmt | ast.Constant | ast.Name) else f"({text})"


def compiles(source: bytes) -> bool:
    """Whether it is Python at all."""
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True
