"""Hold set_pattern to every family of transformers, and write docs/integrations/transformers_families.md.

    python -m bench.cases.transformers.sweep [class ...]

The outcomes are kept in families.json, one class after another: a run does the classes that are not in it, or those
that are named.
"""

import copy
import json
import signal
import sys
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from flexdilated import masks
from flexdilated.integrations.transformers import set_pattern

from . import BATCH, LENGTH, families, inputs_of, liven, tiny_model

FAMILIES = Path(__file__).with_name("families.json")
PAGE = Path(__file__).parents[3] / "docs" / "integrations" / "transformers_families.md"
_SECONDS = 240
_WAYS = ("plain", "padded", "training", "dynamic", "static", "packed", "compiled")
_ANSWERS = ("yes", "refused", "refused or yes")
_INTRODUCTION = """# Families of transformers

Every class that `AutoModelForCausalLM`, `AutoModelForMaskedLM`, `AutoModelForSeq2SeqLM`, `AutoModel` and those of
images and speech make, as a tiny model with random weights, of transformers {version}. The command `python -m
bench.cases.transformers.sweep` writes this page.

A model that is served gives, after `set_pattern(model, {{}})`, the outputs of its own attention to 1e-4 of the largest
value: plain, with padding on the right, in training (the gradients too, to 1e-3), and the same greedy tokens over a
dynamic and a static cache; and it runs with a local window. "–" marks a way that the model does not have, or does not
go with its own attention.

"packed" is two documents in a row, by `position_ids`: a change of the first does not move the second, by default, with
and without a cache, with an `attention_mask` of ones, with three and four axes of positions, and by gradients with
checkpointing; "compiled" is the same in a graph. "refused" is an error that names what works; an `attention_mask` of
segment numbers is refused in each family.

A model that is not served is refused by `set_pattern`, which then changes nothing.
"""


class Late(Exception):
    """What the sweep looks for: raised after set_pattern took the model, or other results."""


def output_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    torch.manual_seed(3)
    out = model(**batch)
    for each in out.values() if hasattr(out, "values") else out:
        if isinstance(each, Tensor) and each.is_floating_point() and each.numel() and each.dim():
            return each
    raise ValueError("no tensor comes out")


def distance(got: Tensor, want: Tensor, rows: Tensor | None = None) -> float:
    """The largest difference in parts of the largest value."""
    if rows is not None and want.shape[:2] == rows.shape:
        got, want = got[rows], want[rows]
    if not want.numel():
        return 0.0 if got.shape == want.shape else float("inf")
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-6))


def runs(model: Any) -> dict[str, Tensor]:
    """A batch that the model takes."""
    said: list[str] = []
    for batch in inputs_of(model):
        try:
            output_of(model, batch)
        except Exception as error:
            said.append(f"{'/'.join(batch)}: {type(error).__name__} {error}")
            continue
        return batch
    raise ValueError("no input fits: " + " | ".join(s[:160] for s in said))


def padded(batch: dict[str, Tensor]) -> dict[str, Tensor] | None:
    if "input_ids" not in batch:
        return None
    mask = torch.ones(batch["input_ids"].shape, dtype=torch.long)
    mask[1, LENGTH - 7 :] = 0
    return {**batch, "attention_mask": mask}


def trained(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.train().zero_grad()
    torch.manual_seed(3)
    out = output_of(model, batch)
    out.pow(2).mean().backward()
    return out.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def generated(model: Any, batch: dict[str, Tensor], cache: str) -> Tensor:
    torch.manual_seed(3)
    return model.generate(
        batch["input_ids"], attention_mask=torch.ones_like(batch["input_ids"]), max_new_tokens=4, min_new_tokens=4,
        do_sample=False, cache_implementation=cache, disable_compile=True,
    )  # fmt: skip


def attempt(what: str, dense: Any, ours: Any, found: dict[str, Any], compare: Any) -> None:
    """Do a thing with the model's own attention, and, where that works, with this library's."""
    try:
        want = dense()
    except Exception as error:
        found[what] = f"not with its own attention: {type(error).__name__} {str(error)[:100]}"
        return
    try:
        got = ours()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise Late(
            f"{what}: {type(error).__name__} {str(error)[:300]} ({Path(where.filename).name}:{where.lineno})"
        ) from error
    far = compare(got, want)
    if not far <= 1e-4:
        raise Late(f"{what}: differs by {far:.1e}")
    found[what] = "yes"


_FIRST = 8  # tokens of the first of two documents in a row
CALLS: dict[str, dict[str, Any]] = {
    "default": {},
    "no cache": {"use_cache": False},
    "cache": {"use_cache": True},
    "mask": {"attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long)},
    "3 axes": {},
    "4 axes": {},
    "checkpointed": {},
    "compiled": {},
    "segments": {"position_ids": None, "attention_mask": (torch.arange(LENGTH) >= _FIRST).long().expand(BATCH, -1) + 1},
}
_REFUSED = (
    "position_ids begin several documents in one row, and",
    "attention_mask must hold 0 and 1",
    "takes the attention_mask (batch, tokens) of a tokenizer",
)


def of_tokens(model: Any, batch: dict[str, Any]) -> Tensor:
    """The first output that has a row for each token."""
    torch.manual_seed(3)
    out = model(**batch)
    outputs = [x for x in (out.values() if hasattr(out, "values") else out) if isinstance(x, Tensor)]
    found = [x for x in outputs if x.is_floating_point() and x.shape[:2] == (BATCH, LENGTH)]
    if not found:
        raise ValueError("no output has a row for each token")
    return found[0]


def reach(model: Any, batch: dict[str, Any]) -> float:
    """How far a change of the first document moves outputs of the second, in parts of the largest."""
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][:, :_FIRST] = 73 - batch["input_ids"][:, :_FIRST]
    one, two = (of_tokens(model, each)[:, _FIRST:] for each in (batch, other))
    return distance(two, one)


def reach_of_gradients(model: Any, batch: dict[str, Any]) -> float:
    """The gradient of outputs of the second document at embeddings of the first, in parts of the largest."""
    model.train().gradient_checkpointing_enable()
    kept: list[Tensor] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda *each: kept.append(each[-1]))
    try:
        with torch.enable_grad():
            out = of_tokens(model, batch)[:, _FIRST:]
            (grad,) = torch.autograd.grad(out.pow(2).mean(), kept[:1])
    finally:
        hook.remove()
        model.eval().gradient_checkpointing_disable()
    return float(grad[:, :_FIRST].abs().max() / grad.abs().max())


def reach_compiled(model: Any, batch: dict[str, Any]) -> float:
    torch.compiler.reset()
    return reach(torch.compile(model, backend="eager"), batch)


def takes_axes(model: Any) -> bool:
    """Whether the model's positions have an axis for each of time, height and width."""
    return "mrope_section" in str(model.config) or any(hasattr(each, "mrope_section") for each in model.modules())


def packed(own: Any, model: Any, batch: dict[str, Tensor], calls: Any) -> dict[str, str]:
    """For each kind of call "yes" if two documents in a row, by position_ids, do not see each other, or "refused"."""
    begins = torch.cat([torch.arange(_FIRST), torch.arange(LENGTH - _FIRST)]).expand(BATCH, -1)
    axes = {"3 axes": begins.expand(3, -1, -1), "4 axes": begins.expand(4, -1, -1)}
    measures = {"checkpointed": reach_of_gradients, "compiled": reach_compiled}
    found = {}
    for what in calls:
        if what in axes and not takes_axes(model):
            continue
        given = {**batch, "position_ids": axes.get(what, begins), **CALLS[what]}
        try:  # what a model takes plain it takes compiled, which needs no trace of its own
            (reach if what == "compiled" else measures.get(what, reach))(own, given)
        except Exception as error:
            found[what] = f"not with its own attention: {type(error).__name__} {str(error)[:80]}"
            continue
        try:
            far = measures.get(what, reach)(model, given)
        except Exception as error:
            if not any(each in str(error) for each in _REFUSED):
                raise Late(f"packed, {what}: {type(error).__name__} {str(error)[:300]}") from error
            found[what] = "refused"
            continue
        if not far <= 1e-5:
            raise Late(f"packed, {what}: the first document moves the second by {far:.1e}")
        found[what] = "yes"
    return found


def summary(calls: dict[str, str]) -> dict[str, str]:
    """What the page says of packed rows, plain and compiled: "yes" or "refused"; without either where none is taken."""
    if calls.get("segments") == "yes":
        raise Late("packed, segments: taken, although segment numbers are no mask of padding")
    said = {"packed": {calls[each] for each in calls if each not in ("segments", "compiled")}}
    said["compiled"] = {calls["compiled"]} if "compiled" in calls else set()
    found = {}
    for what, answers in said.items():
        taken = sorted(answers & {"yes", "refused"})
        if taken:
            found[what] = " or ".join(taken)
    return found


def examine(model_type: str, class_name: str, kind: str, calls: Any = tuple(CALLS)) -> dict[str, Any]:
    """The outcome of a family; calls: the kinds of calls with several documents in a row."""
    try:
        model = tiny_model(model_type, class_name, kind)
        model.eval()
        before = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            liven(model)
            batch = runs(model)
            if not bool(torch.isfinite(output_of(model, batch)).all()):
                model.load_state_dict(before)
                output_of(model, batch)
    except Exception as error:
        return {"outcome": "not built", "why": f"{type(error).__name__}: {str(error)[:600]}"}
    found: dict[str, Any] = {"outcome": "serves"}
    own = copy.deepcopy(model)
    with torch.no_grad():
        own.set_attn_implementation("eager")
        if distance(output_of(own, batch), output_of(model, batch)) <= 1e-4:
            own.set_attn_implementation(model.config._attn_implementation)
        # Else SDPA leaves the model's mask out, as it does where a layer says is_causal=False.
    try:
        set_pattern(model, {})
    except (ValueError, TypeError) as error:
        return {"outcome": "refused", "why": str(error)}
    try:
        with torch.no_grad():
            attempt("plain", lambda: output_of(own, batch), lambda: output_of(model, batch), found, distance)
            if (short := padded(batch)) is not None:
                rows = short["attention_mask"].bool()
                attempt("padded", lambda: output_of(own, short), lambda: output_of(model, short), found,
                        lambda got, want: distance(got, want, rows))  # fmt: skip
            if kind == "causal" and "input_ids" in batch:
                for cache in ("dynamic", "static"):
                    dense, ours = partial(generated, own, batch, cache), partial(generated, model, batch, cache)
                    attempt(cache, dense, ours, found, lambda got, want: float(not torch.equal(got, want)))
            if "input_ids" in batch:
                found.update(summary(packed(own, model, batch, calls)))
            set_pattern(model, masks.local_window(left=1, right=1))
            attempt("pattern", lambda: output_of(own, batch), lambda: output_of(model, batch), found,
                    lambda got, want: 0.0 if bool(torch.isfinite(got).all()) else 1.0)  # fmt: skip
            found["changes"] = "yes" if distance(output_of(model, batch), output_of(own, batch)) > 1e-3 else "no"
            set_pattern(model, {})
        model.train()
        try:
            set_pattern(model, {})
        except ValueError as error:
            return {**found, "training": f"refused: {error}"}
        again = trained(own, batch)
        if distance(trained(own, batch)[0], again[0]) == 0:
            attempt("training", lambda: trained(own, batch), lambda: trained(model, batch), found, far_gradients)
    except Late as late:
        return {**found, "outcome": "raises later", "why": str(late)}
    return found


def far_gradients(got: Any, want: Any) -> float:
    if got[1].keys() != want[1].keys():
        return float("inf")
    grads = {name: x for name, x in want[1].items() if x.numel()}
    largest = max((float(x.abs().max()) for x in grads.values()), default=1.0)
    far = [distance(got[0], want[0])]
    for name, x in grads.items():
        far.append(0.1 * float((got[1][name] - x).abs().max()) / max(float(x.abs().max()), 1e-3 * largest))
    return max(far)


def results() -> dict[str, dict[str, Any]]:
    return json.loads(FAMILIES.read_text(encoding="utf-8")) if FAMILIES.exists() else {}


def page(found: dict[str, dict[str, Any]], version: str = transformers.__version__) -> str:
    """The tables of what is served, refused and not built by this version of transformers."""
    by_outcome: dict[str, dict[str, dict[str, Any]]] = {}
    for name, row in sorted(found.items()):
        by_outcome.setdefault(row["outcome"], {})[name] = row
    counts = ", ".join(f"{len(rows)} {outcome}" for outcome, rows in sorted(by_outcome.items()))
    lines = [_INTRODUCTION.format(version=version), f"Classes: {counts}.", "", "## Served", ""]
    lines += [f"| class | {' | '.join(_WAYS)} |", f"|---|{'---|' * len(_WAYS)}"]
    for name, row in by_outcome.pop("serves", {}).items():
        lines.append(f"| {name} | {' | '.join(row[way] if row.get(way) in _ANSWERS else '–' for way in _WAYS)} |")
    for outcome, rows in sorted(by_outcome.items()):
        lines += ["", f"## {outcome.capitalize()}", "", "| class | why |", "|---|---|"]
        lines += [f"| {name} | {_cell(row['why'].replace(f'{name} ', '', 1))} |" for name, row in rows.items()]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    short = " ".join(text.split())
    short = short if len(short) <= 200 else f"{short[:200]}…"
    return "`" + short.replace("`", "'").replace("|", "/") + "`"


def main(chosen: list[str]) -> None:
    known = results()

    def too_long(*_: Any) -> None:
        raise TimeoutError(f"over {_SECONDS} s")

    signal.signal(signal.SIGALRM, too_long)
    transformers.logging.set_verbosity_error()
    for model_type, kind, class_name in families():
        if (chosen and {model_type, class_name}.isdisjoint(chosen)) or (not chosen and class_name in known):
            continue
        signal.alarm(_SECONDS)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row = examine(model_type, class_name, kind)
        except Exception as error:
            row = {"outcome": "sweep failed", "why": f"{type(error).__name__}: {str(error)[:300]}"}
        signal.alarm(0)
        known[class_name] = {"family": model_type, "kind": kind, **row}
        FAMILIES.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        print(class_name, row["outcome"], row.get("why", "")[:200], flush=True)
    PAGE.write_text(page(known), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
