"""The small changes that a mutant may be: what each operator makes of a node of the syntax tree."""

import ast
import copy
from collections.abc import Callable, Iterator

# A node -> (the node or the text instead, ...), one for each mutant that the operator makes of it.
Operator = Callable[[ast.AST], Iterator[ast.AST]]

_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.MatMult: ast.Mult,
}
_COMPARISON: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_PAIRS = (
    ("min", "max"),
    ("minimum", "maximum"),
    ("amin", "amax"),
    ("any", "all"),
    ("floor", "ceil"),
    ("argmin", "argmax"),
    ("logical_and", "logical_or"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
)
_TWINS = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}
# Two arguments that may change places without a difference, or that never differ in kind.
_COMMUTES = {"min", "max", "minimum", "maximum", "gcd", "lcm", "isinstance", "zip", "hasattr", "getattr", "print"}
# Keywords that are no part of a result here: `strict` of zip is an invariant of ours, and there is one device.
_UNSEEN = {None, "strict", "device"}


def _with(node: ast.AST, **fields: object) -> ast.AST:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def arithmetic(node: ast.AST) -> Iterator[ast.AST]:
    """+ and -, * and //, % to //, & and |, << and >>."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _ARITHMETIC:
        yield _with(node, op=_ARITHMETIC[type(node.op)]())


def comparison(node: ast.AST) -> Iterator[ast.AST]:
    """< and <=, > and >=, == and !=, in and not in, is and is not; each link of a chain."""
    if isinstance(node, ast.Compare):
        for place, op in enumerate(node.ops):
            yield _with(node, ops=[*node.ops[:place], _COMPARISON[type(op)](), *node.ops[place + 1 :]])


def boolean(node: ast.AST) -> Iterator[ast.AST]:
    """`and` and `or`; `not` and `~` dropped."""
    if isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
        yield node.operand


def sign(node: ast.AST) -> Iterator[ast.AST]:
    """The minus of what is not a number dropped."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield node.operand


def constant(node: ast.AST) -> Iterator[ast.AST]:
    """A whole number one more and one less, another number twice as large, True and False."""
    if not isinstance(node, ast.Constant):
        return
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
        yield ast.Constant(node.value - 1)
    elif isinstance(node.value, float):
        yield ast.Constant(node.value * 2 if node.value else 1.0)


def condition(node: ast.AST) -> Iterator[ast.AST]:
    """What an `if`, a conditional expression or a comprehension asks is always so, or never."""
    if isinstance(node, ast.If | ast.IfExp):
        yield _with(node, test=ast.Constant(True))
        yield _with(node, test=ast.Constant(False))
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        for place, source in enumerate(node.generators):
            if source.ifs:
                asked = [*node.generators[:place], _with(source, ifs=[]), *node.generators[place + 1 :]]
                yield _with(node, generators=asked)


def twin(node: ast.AST) -> Iterator[ast.AST]:
    """min and max, any and all, floor and ceil, zeros and ones."""
    if isinstance(node, ast.Name) and node.id in _TWINS:
        yield _with(node, id=_TWINS[node.id])
    elif isinstance(node, ast.Attribute) and node.attr in _TWINS:
        yield _with(node, attr=_TWINS[node.attr])


def returned(node: ast.AST) -> Iterator[ast.AST]:
    """None returned instead of a value."""
    empty = isinstance(node, ast.Return) and (node.value is None or ast.unparse(node.value) == "None")
    if isinstance(node, ast.Return) and not empty:
        yield _with(node, value=ast.Constant(None))


def deleted(node: ast.AST) -> Iterator[ast.AST]:
    """A call for its effect, a store into something, a check that raises, a jump: not done."""
    called = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
    stored = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    if called or stored or isinstance(node, ast.AugAssign | ast.Continue | ast.Break | ast.Delete | ast.Raise):
        yield ast.Pass()


def swapped(node: ast.AST) -> Iterator[ast.AST]:
    """The first two arguments of a call in each other's place."""
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return
    one, other, *rest = node.args
    starred = isinstance(one, ast.Starred) or isinstance(other, ast.Starred)
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if not starred and name not in _COMMUTES and ast.dump(one) != ast.dump(other):
        yield _with(node, args=[other, one, *rest])


def dropped(node: ast.AST) -> Iterator[ast.AST]:
    """One keyword of a call left out."""
    if isinstance(node, ast.Call):
        for place, keyword in enumerate(node.keywords):
            if keyword.arg not in _UNSEEN:
                yield _with(node, keywords=[*node.keywords[:place], *node.keywords[place + 1 :]])


OPERATORS: tuple[Operator, ...] = (
    *(arithmetic, comparison, boolean, sign, constant, condition, twin, returned, deleted, swapped, dropped),
)
