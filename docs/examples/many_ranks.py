"""Train a byte language model on sequences that are spread over ranks, with LongNet's attention between them.

torchrun --nproc-per-node 2 docs/examples/many_ranks.py                     # CPUs, or a GPU for each process
torchrun --nproc-per-node 8 docs/examples/many_ranks.py --tokens 1048576 --segments 4096 65536 1048576 --rates 1 16 256
"""

import argparse
import math
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import flexdilated as fd


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A byte language model over many ranks")
    parser.add_argument("--tokens", type=int, default=8192, help="bytes in a sequence, over all ranks")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--embed-dim", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--segments", type=int, nargs="+", default=[256, 2048, 8192], help="segment lengths, in tokens")
    parser.add_argument("--rates", type=int, nargs="+", default=[1, 4, 16], help="dilation rates")
    return parser.parse_args(arguments)


def train(given: argparse.Namespace, mesh: DeviceMesh) -> list[float]:
    """Bits per byte of each step, over all ranks."""
    torch.manual_seed(0)  # the same weights and sequences on every rank
    # Zigzag: each rank has a part of the beginning and one of the end, as causal work grows towards the end.
    sharding = fd.distributed.Sharding(given.tokens, mesh.size(), order="zigzag")
    mine = sharding.positions(mesh.get_local_rank())
    sizes = {"embed_dim": given.embed_dim, "depth": given.depth, "num_heads": given.heads}
    config = fd.LongNetConfig(vocab_size=256, **sizes, segment_lengths=given.segments, dilation_rates=given.rates)
    model = fd.LongNet(config, mesh=mesh, sharding=sharding, device=mesh.device_type)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = library()
    if len(text) <= given.tokens:
        raise SystemExit(f"the text must be longer than a sequence; it has {len(text)} bytes")
    bits = []
    for begin in torch.randint(len(text) - given.tokens, (given.steps,)):
        tokens, targets = (text[begin + shift + mine][None].to(mesh.device_type) for shift in (0, 1))
        loss = F.cross_entropy(parallel(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss / given.tokens / math.log(2)  # this rank's part of the mean over all tokens
        optimizer.zero_grad()
        (loss * mesh.size()).backward()  # DistributedDataParallel divides by the number of ranks
        optimizer.step()
        dist.all_reduce(total := loss.detach())
        bits.append(float(total))
        if mesh.get_rank() == 0 and len(bits) % 10 == 0:
            print(f"step {len(bits)}: {bits[-1]:.3f} bits per byte")
    return bits


def library() -> Tensor:
    """The source text of Python's standard library."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8).long()


def main(arguments: Sequence[str] | None = None) -> list[float]:
    given = options(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    bits = train(given, mesh)
    if mesh.get_rank() == 0:
        print(f"{mesh.size()} ranks: {bits[0]:.2f} bits per byte, after {given.steps} steps {bits[-1]:.2f}")
    dist.destroy_process_group()
    return bits


if __name__ == "__main__":
    main()
