"""A saved pattern is attended by after loading, or loading fails: in a process with this library and in one without."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.peft_utils import check_peft_version

from flexdilated import masks
from flexdilated.integrations.transformers import attention_layers, set_pattern
from flexdilated.integrations.transformers._layers import layer_pattern
from tests.support import vision

from .models import model_of, tokens
from .tiny import tiny_model

WINDOW = masks.local_window(left=2, right=0)
REFUSED = 'Specified `attn_implementation="flexdilated"` is not supported'


def llava() -> Any:
    """Its text config holds the pattern."""
    return set_pattern(tiny_model("llava", "LlavaForConditionalGeneration"), {3: WINDOW})


def bart() -> Any:
    model = tiny_model("bart", "BartForConditionalGeneration", "encoder-decoder")
    return set_pattern(model, lambda layer: WINDOW if layer.is_causal and layer.layer_idx == 0 else None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in each folder, and the logits of one of them in a file."""
    folder, model = tmp_path_factory.mktemp("saved"), model_of("llama")
    set_pattern(model, {1: WINDOW})
    with torch.no_grad():
        torch.save(model(tokens()).logits, folder / "logits")
    for name, each in {"llama": model, "llava": llava(), "bart": bart()}.items():
        each.save_pretrained(folder / name)
    return folder


WITH_THIS_LIBRARY = """
import torch
import transformers
from flexdilated.integrations.transformers import register, set_pattern
tokens = torch.randint(3, 97, (2, 50), generator=torch.Generator().manual_seed(1))
def tried(call):
    try:
        return call()
    except ValueError as error:
        print(error)
load = lambda: transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/llama")
tried(load)
register()
register()
for number, (kind, name, how) in enumerate((
    ("AutoModelForCausalLM", "llama", {}),
    ("AutoModelForCausalLM", "llama", {"attn_implementation": "sdpa"}),
    ("AutoModelForImageTextToText", "llava", {"attn_implementation": "eager"}),
)):
    model = getattr(transformers, kind).from_pretrained(f"{folder}/{name}", **how)
    model.save_pretrained(f"{folder}/unset-{number}")
    print(model.config._attn_implementation)
model = load()
tried(lambda: model(tokens))
set_pattern(model)
with torch.no_grad():
    print(torch.equal(model(tokens).logits, torch.load(f"{folder}/logits")))
model.save_pretrained(f"{folder}/again")
"""
WITHOUT_IT = """
import transformers
for kind, name in (
    ("AutoModel", "llama"), ("AutoModelForCausalLM", "llama"), ("LlamaForCausalLM", "llama"),
    ("AutoModelForImageTextToText", "llava"), ("LlamaForCausalLM", "llava"), ("AutoModelForSeq2SeqLM", "bart"),
    ("AutoModelForCausalLM", "unset-0"), ("LlamaForCausalLM", "unset-1"), ("AutoModelForImageTextToText", "unset-2"),
):
    try:
        getattr(transformers, kind).from_pretrained(f"{folder}/{name}")
    except ValueError as error:
        print(error)
print("flexdilated" in sys.modules)
"""


@pytest.fixture(scope="module")
def printed(folders: Path) -> list[list[str]]:
    """By a new process with this library, which loads and saves, and then by one without it, which loads."""
    path = [each for each in sys.path if each != str(vision.FOLDER)]  # whose import fails there
    begin = f"import sys; sys.path[:] = {path!r}\nfolder = {str(folders)!r}\n"
    command, how = [sys.executable, "-c"], {"check": True, "capture_output": True, "text": True}
    scripts = (WITH_THIS_LIBRARY, WITHOUT_IT)
    return [subprocess.run([*command, begin + each], **how).stdout.splitlines() for each in scripts]


def config_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_without_this_library_loading_fails(printed: list[list[str]]) -> None:
    """By any class, also the text model of a composite one, and a model that was saved before its patterns were set."""
    *said, imported = printed[1]
    assert len(said) == 9
    assert all(each.startswith(REFUSED) for each in said)
    assert imported == "False"


def test_with_this_library_it_attends_by_the_pattern(printed: list[list[str]], folders: Path) -> None:
    """Registered, it loads, and asks for set_pattern at the first pass; then its logits are those before saving."""
    unregistered, *implementations, without, equal = printed[0]
    assert unregistered.startswith(REFUSED)
    assert implementations == ["flexdilated", "sdpa", "eager"]
    assert "call flexdilated.integrations.transformers.set_pattern(model)" in without
    assert equal == "True"
    assert config_in(folders / "again") == config_in(folders / "llama")


@pytest.mark.parametrize(("name", "number"), [("llama", 0), ("llama", 1), ("llava", 2)])
def test_a_model_that_is_saved_before_its_patterns_are_set_keeps_them(
    printed: list[list[str]], folders: Path, name: str, number: int
) -> None:
    """Loaded as it asks or as a dense one; the file is the same then, also of a composite model."""
    first, again = config_in(folders / name), config_in(folders / f"unset-{number}")
    for part in (None, "text_config", "vision_config") if name == "llava" else (None,):
        whole, kept = (each if part is None else each[part] for each in (first, again))
        assert kept["attn_implementation"] == "flexdilated"
        assert kept["flexdilated_patterns"] == whole["flexdilated_patterns"]


@pytest.mark.parametrize("made", [llava, bart])
def test_a_composite_model_gets_its_patterns_back(folders: Path, made: Any) -> None:
    model = made()
    loaded = type(model).from_pretrained(folders / made.__name__)
    with pytest.raises(ValueError, match=r"call flexdilated\.integrations\.transformers\.set_pattern"):
        layer_pattern(attention_layers(loaded)[0])
    set_pattern(loaded)
    want, found = ([layer_pattern(each) for each in attention_layers(x)] for x in (model, loaded))
    assert found == want
    assert sum(own is not None for own, _ in found) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("first", ["pattern", "adapter"])
@pytest.mark.parametrize("own", [False, True])
def test_a_folder_of_adapters_says_that_it_has_no_pattern(tmp_path: Path, first: str, own: bool) -> None:
    """Of PEFT's model around it, and of transformers' own adapters; a whole model is saved without a word."""
    from peft import LoraConfig, get_peft_model

    model, config = model_of("llama"), LoraConfig(target_modules=["q_proj"])
    if own:
        try:
            check_peft_version(MIN_PEFT_VERSION)
        except ValueError as error:
            pytest.skip(str(error))
    if first == "pattern":
        set_pattern(model, WINDOW)
    adapted = model if own else get_peft_model(model, config)
    if own:
        model.add_adapter(config)
    if first == "adapter":
        set_pattern(adapted, WINDOW)
    with pytest.warns(UserWarning, match="saved adapters do not contain the patterns of their base model"):
        adapted.save_pretrained(tmp_path / "adapters")
    set_pattern(adapted, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapted.save_pretrained(tmp_path / "dense")
        whole = model_of("llama")
        set_pattern(whole, WINDOW)
        whole.save_pretrained(tmp_path / "whole")
