"""Models of other libraries with a pattern: what `convert` makes of each."""

from collections.abc import Iterator
from importlib import metadata

from ._jobs import say
from ._measures import Row, at_most, measure
from .cases import diffusers as models
from .cases.diffusers import sweep


@measure(names=("Wan",), classes=("SanaTransformer2DModel",))
def diffusers(names: tuple[str, ...] | None = None, classes: tuple[str, ...] | None = None) -> Iterator[Row]:
    """How far are models of diffusers with a pattern from dense attention with its mask?

    Small models with random weights, in training: output and gradients with all pairs, and with three patterns, in
    millionths of the largest. A change of a token of the input changes the query of that token most, in each layer.

    names: of models in bench/cases/diffusers; None for all.
    classes: names of classes in diffusers that convert refuses; None for all transformer models but those of the
        former.
    """
    package = models.diffusers()
    for name in models.MODELS if names is None else names:
        found = sweep.examine(name)
        say(f"{name}: {found['far']}")
        yield Row(name, at_most(100, "ppm"), 1e6 * max(found["far"].values()), detail=found)
    kinds = sweep.other_classes() if classes is None else {name: getattr(package, name) for name in classes}
    refused = {name: sweep.refused(kind) for name, kind in kinds.items()}
    detail = {"diffusers": metadata.version("diffusers"), "refused": refused}
    yield Row(f"modules that convert takes in {len(refused)} other classes", at_most(0), 0, detail=detail)
