"""Train a small Llama, give it a pattern, and train on: a model that was dense learns to attend by the pattern.

python docs/examples/adapt_llama.py
python docs/examples/adapt_llama.py --pattern "local_window(left=255, right=0) | first_tokens(4)" --steps 400
"""

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from flexdilated import masks
from flexdilated.integrations.transformers import FlexdilatedCache, set_pattern


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="A dense Llama goes over to a pattern")
    parser.add_argument("--text", type=Path, help="a file; without one, modules of Python's standard library")
    parser.add_argument(
        "--pattern", default="longnet((64, 512), (1, 4))", help="an expression; causal order is Llama's"
    )
    parser.add_argument("--tokens", type=int, default=512, help="bytes in a sequence")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100, help="half of them dense, half with the pattern")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--write", type=int, default=100, help="bytes to write in the end")
    return parser.parse_args(arguments)


def read(path: Path | None) -> Tensor:
    """All bytes of the text, as numbers."""
    modules = ("argparse", "ast", "dataclasses", "inspect", "pdb", "tarfile", "typing", "zipfile")
    library = Path(sysconfig.get_path("stdlib"))
    paths = [path] if path else [library / f"{name}.py" for name in modules]
    data = bytearray().join(each.read_bytes() for each in paths)
    return torch.frombuffer(data, dtype=torch.uint8).long()


def train(model: LlamaForCausalLM, text: Tensor, given: argparse.Namespace) -> None:
    """Half of the steps, on pieces of the text drawn anew for each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    model.train()
    for _ in range(given.steps // 2):
        starts = torch.randint(len(text) - given.tokens, (given.batch, 1))
        rows = text[starts + torch.arange(given.tokens)]
        loss = model(rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def loss_on(model: LlamaForCausalLM, rows: Tensor) -> float:
    """Mean loss of a byte, without training."""
    return float(model.eval()(rows, labels=rows).loss)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """The loss on text that was held out: at first, dense, with the pattern at once, and after training with it."""
    given = options(arguments)
    torch.manual_seed(0)
    text = read(given.text)
    held_out = text[-given.batch * given.tokens :].view(given.batch, given.tokens)
    text = text[: -given.batch * given.tokens]
    sizes: dict[str, Any] = {"hidden_size": given.hidden_size, "intermediate_size": 2 * given.hidden_size}
    heads = {"num_hidden_layers": given.layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes, **heads, **ends))
    losses = {"at first": loss_on(model, held_out)}
    train(model, text, given)
    losses["dense"] = loss_on(model, held_out)
    set_pattern(model, masks.parse(given.pattern))
    losses["with the pattern at once"] = loss_on(model, held_out)
    train(model, text, given)
    losses["after training with it"] = loss_on(model, held_out)
    for name, loss in losses.items():
        print(f"{loss:.3f}  {name}")
    new = {"max_new_tokens": given.write, "do_sample": False, "past_key_values": FlexdilatedCache()}
    if given.write:
        print(bytes(model.eval().generate(held_out[:1, :64], **new)[0].tolist()).decode(errors="replace"))
    return losses


if __name__ == "__main__":
    main()
