"""Modules over many ranks: their tokens in, their rows of the whole out, and gradients that add up to one rank's."""

import copy
import io
import pickle
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed import Sharding
from tests.support.agreement import TIGHT
from tests.support.ranks import on_ranks
from tests.support.sharded_cases import compiled_on_the_last

N, VOCABULARY = 41, 17
BRANCHES = ((8, 40), (1, 4))
SCHEDULES = ("auto", "exchange", "ring", "heads")
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


def loss_of(model, tokens: Tensor, following: Tensor, **call) -> Tensor:
    """A sum over tokens, so that shards' losses add up to the whole text's."""
    return F.cross_entropy(model(tokens, **call).flatten(0, 1), following.flatten(), reduction="sum")


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@cache
def one_rank(padded: bool, **changes) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of a model without a mesh."""
    model = longnet(**changes)
    torch.manual_seed(1)
    loss = loss_of(model, *text(), **(PADDED if padded else {}))
    loss.backward()
    return loss.detach(), gradients(model)


def line(size: int | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", (size or dist.get_world_size(),), mesh_dim_names=("sp",))


def summed(x: Tensor, group=None) -> Tensor:
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total


TRAINED = {
    ("auto", "zigzag"): {"padded": True},
    ("exchange", "zigzag"): {},
    ("exchange", "ragged zigzag"): {"padded": True, "checkpoint": True},
    ("ring", "ragged zigzag"): {"pool": "auto"},
    ("ring", "ragged"): {"padded": True, "checkpoint": True},
    ("heads", "zigzag"): {},
    ("heads", "ragged"): {"padded": True, "checkpoint": True},
    ("exchange", "ragged"): {"attention_dropout": 0.3, "checkpoint": True},
    ("ring", "zigzag"): {"selection": EACH},
    ("heads", "rows"): {"selection": ROWS, "padded": True},
    ("auto", "rows"): {"selection": ROWS, "padded": True, "checkpoint": True, "causal": False},
}


def train_longnets() -> None:
    """Over all ranks, loss and gradients add up to one rank's."""
    for (schedule, name), features in TRAINED.items():
        changes, sharding = dict(features), SHARDINGS[name]
        padded = changes.pop("padded", False)
        model = longnet(mesh=line(), sharding=sharding, schedule=schedule, **changes)
        held = sharding.positions(dist.get_rank())
        torch.manual_seed(1 + dist.get_rank())
        loss = loss_of(model, *(x[:, held] for x in text()), **(PADDED if padded else {}))
        loss.backward()
        kind = {name: features[name] for name in ("selection", "causal", "attention_dropout") if name in features}
        true_loss, true_gradients = one_rank(padded, **kind)

        def about(text: str, what: tuple = (schedule, name, features)) -> str:
            return f"{what}: {text}"

        assert_close(summed(loss), true_loss, **TIGHT, msg=about)
        for found, truth in zip(gradients(model), true_gradients, strict=True):
            assert_close(summed(found), truth, **TIGHT, msg=about)


def test_longnet_is_that_of_one_rank() -> None:
    """The loss and the gradients of the parameters are those of one rank, also if a rank has no tokens.

    The padding mask is for the whole sequence; dropout uses the generator of rank 0. With checkpointing, blocks and
    their transfers run again in the backward. Some models have layers that select keys from the data.
    """
    on_ranks(3, train_longnets)


def features_in_equal_shards() -> None:
    """Embedded inputs, no sharding given: as many tokens on every rank, at any length."""
    mesh = line()
    many = longnet(vocab_size=None, mesh=mesh, depth=1)
    one = longnet(vocab_size=None, depth=1)
    for length in (5, 9):
        x = torch.randn(1, 3 * length, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        shard = x[:, dist.get_rank() * length :][:, :length]
        assert_close(many(shard), one(x)[:, dist.get_rank() * length :][:, :length], **TIGHT)


def test_equal_shards_need_no_sharding() -> None:
    on_ranks(3, features_in_equal_shards)


def attention_module(kind: str, mesh: DeviceMesh, sharding: Sharding) -> nn.Module:
    options = {"mesh": mesh, "sharding": sharding, "enable_gqa": True, "dropout": 0.3 if "drops" in kind else 0.0}
    kind = kind.removeprefix("drops, ")
    if kind == "heads":
        return fd.HeadParallelDilatedAttention(*BRANCHES, True, **options)
    if kind in ("ring", "exchange", "auto"):
        return fd.RingDilatedAttention(*BRANCHES, True, schedule=kind, **options)
    pattern = masks.longnet(*BRANCHES) & masks.causal()
    return fd.BlockSparseAttention(pattern, schedule=kind.split()[-1], sinks=True, num_heads=6, **options).double()


def attend_in_module(kind: str, sharding: Sharding) -> None:
    torch.manual_seed(0)
    shapes = [(2, H, N, 8) for H in (6, 3, 3)]
    whole = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    grad = torch.randn(shapes[0], dtype=torch.float64)
    module, held = attention_module(kind, line(), sharding), sharding.positions(dist.get_rank())
    sinks = torch.linspace(-1, 1, 6, dtype=torch.float64) if "sinks" in kind else None
    for parameter in module.parameters():
        parameter.data.copy_(sinks)
    torch.manual_seed(1)
    options = {"enable_gqa": True, "sinks": sinks, "dropout_p": module.dropout}
    out = fd.attend(*whole, masks.longnet(*BRANCHES) & masks.causal(), **options)
    true_gradients = torch.autograd.grad(out, whole, grad)
    shard = [x.detach()[:, :, held].requires_grad_() for x in whole]
    torch.manual_seed(1 + dist.get_rank())
    mine = module(*shard)
    assert_close(mine, out[:, :, held], **TIGHT)
    if module.dropout:
        assert torch.equal(module.eval()(*shard), mine) == (not len(held))
    for found, truth in zip(torch.autograd.grad(mine, shard, grad[:, :, held]), true_gradients, strict=True):
        assert_close(found, truth[:, :, held], **TIGHT)


def attend_in_modules() -> None:
    kinds = "heads", "ring", "exchange", "auto", "sinks, heads", "sinks, ring", "sinks, exchange"
    for kind in (*kinds, "drops, heads", "drops, ring", "drops, exchange", "drops, sinks, ring"):
        attend_in_module(kind, SHARDINGS["ragged"])


def test_attention_modules_are_one_rank() -> None:
    """Output and gradients of q, k and v, with key/value heads that several query heads share."""
    on_ranks(3, attend_in_modules)


def attend_multihead(schedule: str, batch_first: bool, dropout: float) -> None:
    sharding = SHARDINGS["ragged zigzag"]
    x, grad = torch.randn(2, 2, N, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    padding = torch.arange(N) >= torch.tensor([[N - 3], [N - 20]])

    def run(x: Tensor, grad: Tensor, **over_ranks) -> tuple[Tensor, nn.Module]:
        torch.manual_seed(0)
        options = {"batch_first": batch_first, "causal": True, "dropout": dropout, **over_ranks}
        module = fd.MultiheadDilatedAttention(12, 6, *BRANCHES, **options).double()
        torch.manual_seed(1 + (dist.get_rank() if over_ranks else 0))
        x, grad = (y if batch_first else y.transpose(0, 1) for y in (x, grad))
        out, _ = module(x, x, x, key_padding_mask=padding)
        out.backward(grad)
        return out.detach() if batch_first else out.detach().transpose(0, 1), module

    held = sharding.positions(dist.get_rank())
    out, module = run(x[:, held], grad[:, held], mesh=line(), sharding=sharding, schedule=schedule)
    truth, alone = run(x, grad)
    assert_close(out, truth[:, held], **TIGHT)
    for found, true_gradient in zip(gradients(module), gradients(alone), strict=True):
        assert_close(summed(found), true_gradient, **TIGHT)


def attend_multiheads() -> None:
    for schedule, batch_first, dropout in (("exchange", True, 0.0), ("heads", False, 0.0), ("ring", True, 0.3)):
        attend_multihead(schedule, batch_first, dropout)


def test_multihead_is_that_of_one_rank() -> None:
    on_ranks(3, attend_multiheads)


def attend_by_patterns() -> None:
    """Compare modules over ranks with modules on one device; bindings are for the whole sequence."""
    pattern = (masks.longnet(*BRANCHES) & masks.documents("ids")) + masks.first_tokens(1)
    sharding = SHARDINGS["ragged zigzag"]
    held, over = sharding.positions(dist.get_rank()), {"mesh": line(), "sharding": sharding}
    bindings = {"ids": torch.arange(N) // torch.tensor([[20], [11]])}
    x = torch.randn(2, N, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for schedule in ("exchange", "ring", "heads"):
        torch.manual_seed(0)
        many, one = (
            fd.MultiheadDilatedAttention(24, 6, pattern=pattern, batch_first=True, causal=True, **options).double()
            for options in ({"schedule": schedule, **over}, {})
        )
        one.load_state_dict(many.state_dict())
        truth, _ = one(x, x, x, bindings=bindings)
        assert_close(many(*[x[:, held]] * 3, bindings=bindings)[0], truth[:, held], **TIGHT)
        sizes = {"vocab_size": None, "segment_lengths": None, "dilation_rates": None, "pattern": pattern}
        many, one = longnet(schedule=schedule, **over, **sizes), longnet(**sizes)
        assert_close(many(x[:, held], bindings=bindings), one(x, bindings=bindings)[:, held], **TIGHT)


def test_any_pattern_is_that_of_one_rank() -> None:
    on_ranks(3, attend_by_patterns)


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
            fully_shard(part, mesh=line(4))
    held, mine = (
        sharding.positions(mesh["sp"].get_local_rank()),
        slice(mesh.get_local_rank("dp"), mesh.get_local_rank("dp") + 1),
    )
    loss = loss_of(run, *(x[mine, held] for x in text()))
    loss.backward()
    true_loss, true_gradients = one_rank(False)
    assert_close(summed(loss), true_loss, **TIGHT)
    for found, truth in zip(gradients(model), true_gradients, strict=True):
        whole = found.full_tensor() if hasattr(found, "full_tensor") else found
        assert_close(4 * whole, truth, **TIGHT)


def data_and_sequences() -> None:
    for wrapper, schedule in (("DDP", "heads"), ("FSDP2", "exchange"), ("FSDP2, checkpoint", "ring")):
        data_and_sequence(wrapper, schedule)


def test_under_data_parallelism() -> None:
    on_ranks(4, data_and_sequences)


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


def tensor_and_sequences() -> None:
    for schedule in ("exchange", "ring", "heads"):
        tensor_and_sequence(schedule)


def test_with_tensor_parallelism() -> None:
    """Dilation offsets are those of the head among all heads, wherever it lives."""
    on_ranks(4, tensor_and_sequences)


def compile_longnet(schedule: str) -> None:
    model = longnet(mesh=line(), sharding=Sharding(N, 2, "zigzag"), schedule=schedule, depth=1)
    eager = longnet(mesh=line(), sharding=Sharding(N, 2, "zigzag"), schedule=schedule, depth=1)
    held = Sharding(N, 2, "zigzag").positions(dist.get_rank())
    tokens, following = (x[:, held] for x in text())
    loss_of(compiled_on_the_last(model, backend="aot_eager"), tokens, following).backward()
    loss_of(eager, tokens, following).backward()
    for found, truth in zip(gradients(model), gradients(eager), strict=True):
        assert_close(found, truth, **TIGHT)


@pytest.mark.parametrize("schedule", ["auto", "heads"])
def test_traces_without_a_graph_break(schedule: str) -> None:
    """Exchange and ring by themselves are compiled in test_distributed_attend.py."""
    on_ranks(2, compile_longnet, schedule)


def compile_attention(schedules: tuple[str, ...], backend: str) -> None:
    """Without a sharding, which then follows from the shape."""
    for schedule in schedules:
        module = fd.BlockSparseAttention(masks.causal() & masks.longnet(*BRANCHES), mesh=line(), schedule=schedule)
        leaves = [x.requires_grad_() for x in torch.randn(3, 1, 4, 10, 8, dtype=torch.float64)]
        results = []
        for run in (module, compiled_on_the_last(module, backend=backend)):
            out = run(*leaves)
            results.append((out.detach(), *torch.autograd.grad(out.sum(), leaves)))
        for compiled, eager in zip(*results, strict=True):
            assert_close(compiled, eager, **TIGHT)


def test_traces_without_a_sharding() -> None:
    on_ranks(2, compile_attention, SCHEDULES, "eager")


@pytest.mark.slow
def test_compiles() -> None:
    """LongNet without a mesh is compiled in tests/nn/."""
    on_ranks(2, compile_attention, ("exchange",), "inductor")


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


def assigned(models: DeviceMesh | None, layers: DeviceMesh | None) -> None:
    """A layer that chooses, over other ranks than its model."""
    model = longnet(selection=ROWS, mesh=models)
    model.blocks[0].selected = fd.SelectedAttention(fd.BlockSelector(block=4, choose=fd.TopK(2)), mesh=layers)
    model(text()[0])


REFUSED = {  # tests/project/errors.md has more
    "schedule": (lambda mesh: fd.RingDilatedAttention(*BRANCHES, mesh=mesh, schedule="heads"), "HeadParallelDilated"),
    "other ranks": (lambda mesh: longnet(mesh=mesh, sharding=Sharding(N, 3)), "as many ranks as the mesh, 2; got 3"),
    "pool": (lambda mesh: longnet(mesh=mesh, pool="big"), 'pool must be None, a BufferPool or "auto"'),
    "caches": (lambda mesh: longnet(mesh=mesh).new_caches(), "new_caches needs a model that was made without a mesh"),
    "its layer's mesh": (lambda mesh: assigned(mesh, None), "must have the mesh and the sharding of its model"),
    "its model's mesh": (lambda mesh: assigned(None, mesh), "must have the mesh and the sharding of its model"),
    "tokens": (
        lambda mesh: longnet(mesh=mesh, sharding=Sharding(N, 2))(text()[0]),
        "21 of 41 tokens for rank 0 of 2",
    ),
    "padding": (
        lambda mesh: longnet(mesh=mesh)(text()[0], key_padding_mask=torch.zeros(2, N, dtype=torch.bool)),
        "key_padding_mask must have shape (2, 82)",
    ),
}


def refusals() -> dict[str, str]:
    mesh, found = line(), {}
    for name, (call, _) in REFUSED.items():
        with pytest.raises((ValueError, TypeError)) as error:
            call(mesh)
        found[name] = str(error.value)
    return found


def test_what_does_not_go_with_a_mesh_is_refused() -> None:
    found = on_ranks(2, refusals)[0]
    assert {name: answer for name, answer in found.items() if REFUSED[name][1] not in answer} == {}
