"""Modules over many ranks: their tokens in, their rows of the whole out, and gradients that add up to one rank's."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed import Sharding
from tests.support.agreement import TIGHT
from tests.support.ranks import on_ranks
from tests.support.sharded_cases import line, on_rank_0, summed

N, VOCABULARY = 41, 17
BRANCHES = ((8, 40), (1, 4))
SHARDINGS = {
    "zigzag": Sharding(N, 3, "zigzag"),
    "ragged": Sharding(N, 3, shard_lengths=(30, 0, 11)),
    "ragged zigzag": Sharding(N, 3, "zigzag", (0, 40, 1)),
    "rows": Sharding(N, 3, shard_lengths=(24, 0, 17)),  # of four queries
}
EACH = fd.SelectedLayers(block=4, most=2)
ROWS = fd.SelectedLayers(block=4, most=2, layers=(1,), gradient="bias", query_block=4)
PADDED = {"key_padding_mask": torch.arange(N) >= torch.tensor([[N - 7], [N - 30]])}


def config(**changes) -> fd.LongNetConfig:
    sizes = {"vocab_size": VOCABULARY, "embed_dim": 24, "depth": 2, "num_heads": 6, "num_kv_heads": 3}
    branches = {"segment_lengths": BRANCHES[0], "dilation_rates": BRANCHES[1]}
    return fd.LongNetConfig(**(sizes | branches | changes))


def longnet(**changes) -> fd.LongNet:
    """A model in float64, the same on every rank."""
    torch.manual_seed(0)
    arguments = {name: changes.pop(name) for name in ("mesh", "sharding", "schedule", "pool") if name in changes}
    return fd.LongNet(config(**changes), **arguments).double()


def text(batch: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens, and those that follow them."""
    tokens = torch.randint(VOCABULARY, (batch, N + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, tokens: Tensor, following: Tensor) -> Tensor:
    """A sum over tokens, so that shards' losses add up to the whole text's."""
    return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten(), reduction="sum")


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def assert_is_one_rank(name: str, make, whole: list[Tensor], sharding: Sharding, dim: int, **call) -> None:
    """Output and gradients of the inputs are this rank's of one without a mesh, those of parameters add up to its own.

    Tensors of a call are for the whole sequence; dropout uses the generator of rank 0.
    """

    def about(words: str) -> str:
        return f"{name}: {words}"

    held = sharding.positions(dist.get_rank())

    def run(**over) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        module = make(**over)
        inputs = [x.detach().index_select(dim, held) if over else x.detach().clone() for x in whole]
        inputs = [x.requires_grad_(x.is_floating_point()) for x in inputs]
        torch.manual_seed(1 + (dist.get_rank() if over else 0))
        out = module(*inputs, **call)
        out = out[0] if isinstance(out, tuple) else out
        weights = torch.randn(
            *(length if at != dim else sharding.num_tokens for at, length in enumerate(out.shape)),
            dtype=out.dtype,
            generator=torch.Generator().manual_seed(3),
        )
        (out * (weights.index_select(dim, held) if over else weights)).sum().backward()
        return out.detach(), [x.grad for x in inputs if x.grad is not None], gradients(module)

    truth, true_inputs, true_gradients = on_rank_0(run)
    found, of_inputs, of_parameters = run(mesh=line(), sharding=sharding)
    for one, other in zip([truth, *true_inputs], [found, *of_inputs], strict=True):
        assert_close(other, one.index_select(dim, held), **TIGHT, msg=about)
    for one, other in zip(true_gradients, of_parameters, strict=True):
        assert_close(summed(other), one, **TIGHT, msg=about)


TRAINED = {
    ("exchange", "ragged zigzag"): {"padded": True, "checkpoint": True},
    ("heads", "ragged"): {"padded": True, "checkpoint": True},
    ("exchange", "ragged"): {"attention_dropout": 0.3, "checkpoint": True},
    ("ring", "zigzag"): {"selection": EACH, "pool": "auto"},
    ("heads", "rows"): {"selection": ROWS, "padded": True},
    ("auto", "rows"): {"selection": ROWS, "padded": True, "checkpoint": True, "causal": False},
}


def longnets() -> None:
    """With checkpoints, blocks and their transfers run again in the backward; some have layers that select keys."""
    for (schedule, name), features in TRAINED.items():
        depth = {"depth": 2 if "selection" in features else 1}
        changes = depth | {key: value for key, value in features.items() if key != "padded"}

        def make(schedule=schedule, changes=changes, **over) -> nn.Module:
            only = {"schedule": schedule} if over else {}
            own = {key: value for key, value in changes.items() if over or key != "pool"}
            return longnet(**own, **only, **over)

        call = PADDED if features.get("padded") else {}
        assert_is_one_rank(f"{schedule}, {name}, {features}", make, [text()[0]], SHARDINGS[name], 1, **call)
    x = torch.randn(1, 15, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    # Embedded inputs, no sharding given: as many tokens on every rank.
    equal = lambda mesh=None, sharding=None: longnet(vocab_size=None, depth=1, mesh=mesh)  # noqa: E731
    assert_is_one_rank("equal shards", equal, [x], Sharding(15, 3), 1)


def attention_module(kind: str, **over) -> nn.Module:
    options = {"enable_gqa": True, "dropout": 0.3 if "drops" in kind else 0.0, **over}
    kind = kind.removeprefix("drops, ")
    if not over:
        options |= {"sinks": True, "num_heads": 6} if "sinks" in kind else {}
    if over and kind == "heads":
        return fd.HeadParallelDilatedAttention(*BRANCHES, True, **options)
    if over and kind in ("ring", "exchange"):
        return fd.RingDilatedAttention(*BRANCHES, True, schedule=kind, **options)
    if over:
        options |= {"schedule": kind.split()[-1], "sinks": True, "num_heads": 6}
    module = fd.BlockSparseAttention(masks.longnet(*BRANCHES) & masks.causal(), **options).double()
    for parameter in module.parameters():
        parameter.data.copy_(torch.linspace(-1, 1, 6))
    return module


def attention_modules() -> None:
    """Key/value heads that several query heads share; without gradients, a module in inference drops nothing."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, H, N, 8, dtype=torch.float64, generator=generator) for H in (6, 3, 3)]
    kinds = "heads", "ring", "exchange", "sinks, heads", "sinks, ring", "sinks, exchange"
    for kind in (*kinds, "drops, heads", "drops, ring", "drops, exchange"):
        call = PADDED if "sinks" in kind else {}
        assert_is_one_rank(kind, partial(attention_module, kind), whole, SHARDINGS["ragged"], 2, **call)
    shard = [x[:, :, SHARDINGS["ragged"].positions(dist.get_rank())] for x in whole]
    plain, dropping = (
        attention_module(kind, mesh=line(), sharding=SHARDINGS["ragged"]).eval()(*shard)
        for kind in ("ring", "drops, ring")
    )
    assert torch.equal(plain, dropping)


def multiheads_and_patterns() -> None:
    sharding = SHARDINGS["ragged zigzag"]
    x = torch.randn(2, N, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    pattern = (masks.longnet(*BRANCHES) & masks.documents("ids")) + masks.first_tokens(1)
    bindings = {"ids": torch.arange(N) // torch.tensor([[20], [11]])}
    padding = torch.arange(N) >= torch.tensor([[N - 3], [N - 20]])
    by_pattern = {"vocab_size": None, "segment_lengths": None, "dilation_rates": None, "pattern": pattern}

    def make(schedule: str, branches=BRANCHES, pattern=None, **options) -> nn.Module:
        over = {"schedule": schedule} if "mesh" in options else {}
        module = fd.MultiheadDilatedAttention(24, 6, *branches, pattern=pattern, causal=True, **over, **options)
        return module.double()

    for schedule, batch_first, dropout in (("exchange", True, 0.0), ("heads", False, 0.0), ("ring", True, 0.3)):
        own = partial(make, schedule, batch_first=batch_first, dropout=dropout)
        inputs, dim = ([x] * 3, 1) if batch_first else ([x.transpose(0, 1)] * 3, 0)
        assert_is_one_rank(f"multihead, {schedule}", own, inputs, sharding, dim, key_padding_mask=padding)

    def model(**over) -> nn.Module:
        return longnet(**by_pattern, **over, **({"schedule": "heads"} if over else {}))

    rules = partial(make, schedule="ring", branches=(), pattern=pattern, batch_first=True)
    assert_is_one_rank("pattern", rules, [x] * 3, sharding, 1, bindings=bindings)
    assert_is_one_rank("LongNet by a pattern", model, [x], sharding, 1, bindings=bindings)


@pytest.mark.parametrize(
    "function", [longnets, attention_modules, multiheads_and_patterns], ids=lambda function: function.__name__
)
def test_modules_are_those_of_one_rank(function) -> None:
    """Also if a rank has no tokens."""
    on_ranks(3, function)


def data_and_sequence(wrapper: str, schedule: str) -> None:
    """A mesh of 2 x 2: two texts, each over two ranks; the wrapper averages gradients over all four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    sharding = Sharding(N, 2, "zigzag")
    model = longnet(mesh=mesh["sp"], sharding=sharding, schedule=schedule, checkpoint=wrapper == "FSDP2, checkpoint")
    run = model
    if wrapper == "DDP":
        run = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        for part in (*model.blocks, model):
            fully_shard(part, mesh=line())
    held, mine = (
        sharding.positions(mesh["sp"].get_local_rank()),
        slice(mesh.get_local_rank("dp"), mesh.get_local_rank("dp") + 1),
    )
    loss = loss_of(run, *(x[mine, held] for x in text()))
    loss.backward()
    alone = longnet()
    true_loss = loss_of(alone, *text())
    true_loss.backward()
    assert_close(summed(loss), true_loss.detach(), **TIGHT)
    for found, truth in zip(gradients(model), gradients(alone), strict=True):
        whole = found.full_tensor() if hasattr(found, "full_tensor") else found
        assert_close(4 * whole, truth, **TIGHT)


def test_under_data_parallelism() -> None:
    for wrapper, schedule in (("DDP", "heads"), ("FSDP2", "exchange"), ("FSDP2, checkpoint", "ring")):
        on_ranks(4, data_and_sequence, wrapper, schedule)


def live() -> str:
    """Copied, pickled and saved, a model is the same over these ranks; its weights are those of one without a mesh."""
    sharding = Sharding(N, 2)
    model = longnet(mesh=line(), sharding=sharding, schedule="heads")
    tokens = text()[0][:, sharding.positions(dist.get_rank())]
    expected = model(tokens)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_close(other(tokens), expected, rtol=0, atol=0)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    alone = fd.LongNet(config()).double()
    alone.load_state_dict(torch.load(file))
    model.load_state_dict(alone.state_dict())
    whole = alone(text()[0])[:, sharding.positions(dist.get_rank())]
    assert_close(model(tokens), whole, **TIGHT)
    module = fd.RingDilatedAttention(*BRANCHES, mesh=line(), pool="auto", schedule="ring")
    assert not list(pickle.loads(pickle.dumps(module)).parameters())
    assert not module.state_dict()
    return f"{module}\n{model}"


def test_a_module_with_a_mesh_lives_as_any_module() -> None:
    shown = on_ranks(2, live)[1]
    assert "mesh=2 ranks of axis 'sp', schedule='ring', pool='auto')" in shown
    assert "schedule='heads', sharding=Sharding(num_tokens=41, num_ranks=2, order='contiguous'" in shown


def tensor_and_sequence(schedule: str) -> None:
    """A mesh of 2 x 2: each rank has half of the heads of half of the tokens."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "sp"))
    sharding = Sharding(N, 2, "zigzag")
    H, E = 8, 16
    torch.manual_seed(0)
    weights = [torch.randn(3, H, E, 4, dtype=torch.float64), torch.randn(H, 4, E, dtype=torch.float64)]
    x, grad = torch.randn(2, 1, N, E, dtype=torch.float64)
    pattern = masks.longnet(*BRANCHES) & masks.causal()

    def layer(attention, x: Tensor, project: Tensor, join: Tensor) -> Tensor:
        q, k, v = torch.einsum("bne,shed->sbhnd", x, project)
        return torch.einsum("bhnd,hde->bne", attention(q, k, v), join)

    whole = [weight.clone().requires_grad_() for weight in weights]
    truth = layer(partial(fd.attend, pattern=pattern), x, *whole)
    true_gradients = torch.autograd.grad(truth, whole, grad)
    first = mesh.get_local_rank("tp") * H // 2
    heads = slice(first, first + H // 2)
    mine = [weights[0][:, heads].clone().requires_grad_(), weights[1][heads].clone().requires_grad_()]
    module = fd.BlockSparseAttention(pattern, mesh=mesh["sp"], sharding=sharding, schedule=schedule)
    held = sharding.positions(mesh.get_local_rank("sp"))
    out = layer(partial(module, head_offset=first, num_heads_global=H), x[:, held], *mine)
    assert_close(summed(out, mesh.get_group("tp")), truth[:, held].detach(), **TIGHT)
    found = torch.autograd.grad(out, mine, grad[:, held])
    for mine_alone, true_gradient, chosen in zip(found, true_gradients, ((slice(None), heads), heads), strict=True):
        assert_close(summed(mine_alone, mesh.get_group("sp")), true_gradient[chosen], **TIGHT)


def test_with_tensor_parallelism() -> None:
    """Dilation offsets are those of the head among all heads, wherever it lives."""
    for schedule in ("exchange", "ring", "heads"):
        on_ranks(4, tensor_and_sequence, schedule)
