"""A saved pattern is attended by after loading, or loading fails: in a process with this library and in one without."""

import copy
import importlib.util
import inspect
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from bench.cases.transformers import tiny_model
from flexdilated import masks
from flexdilated.integrations.transformers import attention_layers, register, set_pattern
from flexdilated.integrations.transformers._layers import layer_pattern

from .models import model_of, tokens

WINDOW = masks.local_window(left=5, right=2)


def llava() -> Any:
    """Its text config holds the pattern."""
    return set_pattern(tiny_model("llava", "LlavaForConditionalGeneration"), {3: WINDOW})


UNSET = [
    ("AutoModelForCausalLM", "llama", {}, "flexdilated"),
    ("AutoModelForCausalLM", "llama", {"attn_implementation": "sdpa"}, "sdpa"),
    ("AutoModelForImageTextToText", "llava", {"attn_implementation": "eager"}, "eager"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with patterns in each folder, and those that were loaded and saved before their patterns were set."""
    folder = tmp_path_factory.mktemp("saved")
    for name, each in {"llama": set_pattern(model_of("llama"), {1: WINDOW}), "llava": llava()}.items():
        each.save_pretrained(folder / name)
    register()
    register()
    for number, (kind, name, how, implementation) in enumerate(UNSET):
        model = getattr(transformers, kind).from_pretrained(folder / name, **how)
        assert model.config._attn_implementation == implementation
        model.save_pretrained(folder / f"unset-{number}")
    return folder


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process without this library, or that has only imported it, which is done here."""
    monkeypatch.setattr(PreTrainedConfig, "to_dict", inspect.unwrap(PreTrainedConfig.to_dict))
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.delitem(interface._global_mapping, "flexdilated")
    for name in ("", "._attention"):
        spec = importlib.util.find_spec(f"flexdilated.integrations.transformers{name}")
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.usefixtures("unregistered")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "llama") for kind in ("AutoModel", "AutoModelForCausalLM", "LlamaForCausalLM")),
        *((kind, "llava") for kind in ("AutoModelForImageTextToText", "LlamaForCausalLM")),
        *((kind, f"unset-{number}") for number, (kind, *_) in enumerate(UNSET)),
    ],
)
def test_without_this_library_loading_fails(folders: Path, kind: str, name: str) -> None:
    """By any class, also the text model of a composite one; and with it, before `register` or `set_pattern`."""
    with pytest.raises(ValueError, match=r'^Specified `attn_implementation="flexdilated"` is not supported'):
        getattr(transformers, kind).from_pretrained(folders / name)


@pytest.mark.parametrize("compose", ["and", "replace"])
def test_saved_and_loaded(tmp_path: Path, compose: str) -> None:
    """It asks for set_pattern at the first pass; then its logits are those before saving, and so is its config."""
    model = model_of("llama")
    set_pattern(model, {0: masks.longnet((4, 16), (1, 2)) & masks.causal(), 1: WINDOW}, compose=compose)
    model.save_pretrained(tmp_path / "first")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first").eval()
    with pytest.raises(ValueError, match=r"call flexdilated\.integrations\.transformers\.set_pattern\(model\)"):
        loaded(tokens())
    set_pattern(loaded)
    with torch.no_grad():
        want = model(tokens()).logits
        for each in (loaded, copy.deepcopy(loaded)):
            assert torch.equal(each(tokens()).logits, want)
    loaded.save_pretrained(tmp_path / "again")
    assert config_in(tmp_path / "again") == config_in(tmp_path / "first")


def config_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_a_custom_pattern_is_asked_for_again(tmp_path: Path) -> None:
    model = set_pattern(model_of("llama"), masks.custom(lambda b, h, q, k: (q + k) % 3 == 0))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has a pattern without JSON: give it to set_pattern"):
        set_pattern(loaded)


@pytest.mark.parametrize(("name", "number"), [("llama", 0), ("llama", 1), ("llava", 2)])
def test_a_model_that_is_saved_before_its_patterns_are_set_keeps_them(folders: Path, name: str, number: int) -> None:
    """Loaded as it asks or as a dense one; the file is the same then, also of a composite model."""
    first, again = config_in(folders / name), config_in(folders / f"unset-{number}")
    for part in (None, "text_config", "vision_config") if name == "llava" else (None,):
        whole, kept = (each if part is None else each[part] for each in (first, again))
        assert kept["attn_implementation"] == "flexdilated"
        assert kept["flexdilated_patterns"] == whole["flexdilated_patterns"]


def test_a_composite_model_gets_its_patterns_back(folders: Path) -> None:
    model = llava()
    loaded = type(model).from_pretrained(folders / "llava")
    with pytest.raises(ValueError, match=r"call flexdilated\.integrations\.transformers\.set_pattern"):
        layer_pattern(attention_layers(loaded)[0])
    set_pattern(loaded)
    want, found = ([layer_pattern(each) for each in attention_layers(x)] for x in (model, loaded))
    assert found == want
    assert sum(own is not None for own, _ in found) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("first", ["pattern", "adapter"])
def test_a_folder_of_adapters_says_that_it_has_no_pattern(tmp_path: Path, first: str) -> None:
    """Of PEFT's model around it; a whole model is saved without a word."""
    from peft import LoraConfig, get_peft_model

    model, config = model_of("llama"), LoraConfig(target_modules=["q_proj"])
    if first == "pattern":
        set_pattern(model, WINDOW)
    adapted = get_peft_model(model, config)
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
