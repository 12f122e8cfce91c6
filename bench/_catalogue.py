"""The catalogue: each pattern with one set of parameters for long sequences, and one that is small enough to draw."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from flexdilated import masks
from flexdilated.masks import Mixture, Pattern

# N tokens

MILLION = 1 << 20
PICTURED = 64  # tokens of a picture


@dataclass(frozen=True)
class Entry:
    """One pattern of the page. `name` is its constructor's, and what tells it from others of that constructor.

    `text` is its expression, in the words of `names_for`, and `small` that of the picture. `million` replaces
    `text` where a grid grows with the tokens. `waste_why` and `build_why` say what keeps it from a target;
    `largest` is the number of tokens that its tables are built for where a million are out of reach.
    """

    name: str
    text: str
    small: str
    num_heads: int = 1
    million: str = ""
    largest: int = MILLION
    waste_why: str = ""
    build_why: str = ""

    @property
    def kind(self) -> str:
        """The name of its constructor."""
        return self.name.partition(",")[0]

    def pattern(self, num_tokens: int) -> Pattern | Mixture:
        """The pattern over this many tokens."""
        return _read(self.million if self.million and num_tokens == MILLION else self.text, num_tokens)

    def pictured(self, num_tokens: int = PICTURED) -> Pattern | Mixture:
        """The pattern of the picture, over as many tokens; those of a grid have `PICTURED`."""
        return _read(self.small, num_tokens)


def _read(text: str, num_tokens: int) -> Pattern | Mixture:
    # An expression of this file, in Python: `masks.parse` knows no tensors and no functions.
    return eval(text, names_for(num_tokens))


_LONGNET = "masks.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])"
_LONGNET_SMALL = "masks.longnet([16, 32, 64], [1, 2, 4])"

QUADRATIC = "The number of blocks grows with the square of the tokens, so fewer tokens are measured."
WIDE_ROW = (
    "A `BlockMask` is as wide as its longest row. Where a token sees all, or all see it, that is every block: "
    "8,192 x 8,192 entries, once by queries and once by keys."
)
_QUARTER = (
    "A residue class has 512 tokens here, four blocks: of the ten blocks on and below its diagonal, four are half used."
)
_ROW_MAJOR = (
    "A `BlockMask` over tokens in row-major order has over a million partial blocks, none of which repeats another. "
    "`attend` computes in tiles: see its plan."
)

ENTRIES = (
    Entry("causal", "masks.causal()", "masks.causal()", largest=1 << 18, build_why=QUADRATIC),
    Entry("every", "masks.every()", "masks.every()", largest=1 << 17, build_why=QUADRATIC),
    Entry("local_window", "masks.local_window(left=4095, right=0)", "masks.local_window(left=20, right=0)"),
    Entry("dilated_window", "masks.dilated_window(left=1023, right=0, rate=4)",
        "masks.dilated_window(left=7, right=0, rate=4)"),
    Entry("chunked", "masks.chunked(4096) & masks.causal()", "masks.chunked(20) & masks.causal()"),
    Entry("strided", "masks.strided(128) & masks.causal()", "masks.strided(8) & masks.causal()"),
    Entry("fixed", "masks.fixed(128, summary=32) & masks.causal()", "masks.fixed(16, summary=4) & masks.causal()",
        largest=1 << 18, waste_why=_QUARTER, build_why=QUADRATIC),
    Entry("dilated", "masks.dilated(8192, 4) & masks.causal()", "masks.dilated(32, 4) & masks.causal()"),
    Entry("longnet", f"{_LONGNET} & masks.causal()", f"{_LONGNET_SMALL} & masks.causal()", num_heads=4),
    Entry("longnet, full", _LONGNET, _LONGNET_SMALL, num_heads=4),
    Entry("global_tokens", "masks.global_tokens(128)", "masks.global_tokens(6)", build_why=WIDE_ROW),
    Entry("first_tokens", "masks.first_tokens(4) & masks.causal()", "masks.first_tokens(4) & masks.causal()",
        waste_why="Four keys in a block of 128. Beside a window, as in `streaming_llm`, that hardly counts."),
    Entry("landmark_tokens", "masks.landmark_tokens(256)", "masks.landmark_tokens(16)", build_why=WIDE_ROW),
    Entry("landmark_tokens, keys", "masks.landmark_tokens(64, rows=False) & masks.causal()",
        "masks.landmark_tokens(8, rows=False) & masks.causal()"),
    Entry("prefix_lm", "masks.prefix_lm(8192)", "masks.prefix_lm(20)", largest=1 << 18, build_why=QUADRATIC),
    Entry("random_blocks", "masks.random_blocks(num_tokens, block=128, count=3)",
        "masks.random_blocks(num_tokens, block=16, count=1)", num_heads=2),
    Entry("block_list", "masks.block_list(block_rows(num_tokens, block=128), block=128)",
        "masks.block_list(block_rows(num_tokens, block=8), block=8)"),
    Entry("blockwise", "masks.blockwise(masks.dilated_window(left=15, right=0, rate=2), 128)",
        "masks.blockwise(masks.dilated_window(left=2, right=0, rate=2), 8)"),
    Entry("neighborhood, 1-D", "masks.neighborhood((num_tokens,), 1024)", "masks.neighborhood((num_tokens,), 8)"),
    Entry("neighborhood, 2-D", "masks.neighborhood((256, 256), (32, 32))", "masks.neighborhood((8, 8), (2, 2))",
        million="masks.neighborhood((1024, 1024), (32, 32))",
        waste_why="The windows of a tile of 8 x 16 tokens cover 72 x 80 together, that of a token 65 x 65.",
        build_why=_ROW_MAJOR),
    Entry("neighborhood, 3-D", "masks.neighborhood((16, 64, 64), (4, 8, 8))",
        "masks.neighborhood((4, 4, 4), (1, 1, 1))", million="masks.neighborhood((64, 128, 128), (4, 8, 8))",
        waste_why="The windows of a tile of 2 x 8 x 8 tokens cover 10 x 24 x 24 together, that of a token 9 x 17 x 17.",
        build_why=_ROW_MAJOR),
    Entry("grid_window", "masks.grid_window((num_tokens // 4096, 4096), [(1, 4095), (15, 255)])",
        "masks.grid_window((4, 16), [(1, 15), (3, 2)])"),
    Entry("per_head",
        "masks.per_head([masks.local_window(left=4095, right=0), masks.dilated_window(left=1023, right=0, rate=4)])",
        "masks.per_head([masks.local_window(left=12, right=0), masks.dilated_window(left=7, right=0, rate=4)])",
        num_heads=2),
    Entry("head_groups",
        "masks.head_groups([masks.local_window(left=4095, right=0), masks.dilated(16384, 4, 0) & masks.causal()])",
        "masks.head_groups([masks.local_window(left=12, right=0), masks.dilated(32, 4, 0) & masks.causal()])",
        num_heads=4),
    Entry("documents", "masks.documents(ids) & masks.causal()", "masks.documents(ids) & masks.causal()"),
    Entry("lengths", "masks.lengths(length) & masks.local_window(left=2047, right=2047)",
        "masks.lengths(length) & masks.local_window(left=12, right=12)"),
    Entry("visible_keys", "masks.visible_keys(marks) & masks.local_window(left=4095, right=0)",
        "masks.visible_keys(marks) & masks.local_window(left=30, right=0)"),
    Entry("selected_blocks",
        "masks.selected_blocks(chosen_blocks(num_tokens, block=128), block=128, most=4) & masks.causal()",
        "masks.selected_blocks(chosen_blocks(num_tokens, block=8), block=8, most=4) & masks.causal()"),
    Entry("per_document", "masks.longnet([1024, 2048, 4096], [1, 2, 4]).per_document(ids) & masks.causal()",
        "masks.longnet([4, 8, 16], [1, 2, 4]).per_document(ids) & masks.causal()", num_heads=4,
        waste_why="Documents have 128 to 4096 tokens. The shorter ones hold less than a block of each residue class.",
        build_why="The rule starts anew in each document. No block repeats another, and some are settled pair by "
        "pair."),
    Entry("custom", "masks.custom(widening(1024), classify=boxes_of_widening(1024), period=1)",
        "masks.custom(widening(4), classify=boxes_of_widening(4), period=1)", num_heads=4),
    Entry("longformer", "recipes.longformer(256, 16)", "recipes.longformer(8, 3)",
        waste_why="16 global tokens in a block of 128, and a window of 513 keys in five blocks.", build_why=WIDE_ROW),
    Entry("bigbird", "recipes.bigbird(num_tokens)", "recipes.bigbird(num_tokens, block=4, num_random=2)",
        build_why=WIDE_ROW),
    Entry("bigbird, block 128", "recipes.bigbird(num_tokens, block=128)",
        "recipes.bigbird(num_tokens, block=8, num_global=1, num_random=1)", build_why=WIDE_ROW),
    Entry("sparse_transformer_strided", "recipes.sparse_transformer_strided(128)",
        "recipes.sparse_transformer_strided(8)",
        waste_why="A window of 128 keys lies in two blocks, and a residue class of 512 tokens in four: of the "
        "ten on and below its diagonal, four are half used.",
        build_why="One `BlockMask` has one order of the tokens, and in that of the stride the window is "
        "everywhere. `attend` computes the two parts in an order each: see its plan."),
    Entry("sparse_transformer_fixed", "recipes.sparse_transformer_fixed(128, summary=32)",
        "recipes.sparse_transformer_fixed(16, summary=4)", largest=1 << 18, waste_why=_QUARTER, build_why=QUADRATIC),
    Entry("streaming_llm", "recipes.streaming_llm(4096)", "recipes.streaming_llm(16)"),
    Entry("sliding_tile", "recipes.sliding_tile((16, 64, 64), tile=(4, 8, 8), num_tiles=(3, 3, 3))",
        "recipes.sliding_tile((4, 4, 4), tile=(1, 2, 2), num_tiles=(3, 1, 1))",
        million="recipes.sliding_tile((256, 64, 64), tile=(4, 8, 8), num_tiles=(3, 3, 3))"),
    Entry("radial", "recipes.radial((num_tokens // 4096, 64, 64))", "recipes.radial((4, 4, 4))", largest=1 << 18,
        build_why=QUADRATIC),
    Entry("sparse_videogen_spatial", "recipes.sparse_videogen_spatial((num_tokens // 4096, 64, 64), near_frames=1)",
        "recipes.sparse_videogen_spatial((4, 4, 4), near_frames=1)"),
    Entry("sparse_videogen_temporal",
        "recipes.sparse_videogen_temporal((num_tokens // 4096, 64, 64), near_places=256)",
        "recipes.sparse_videogen_temporal((4, 4, 4), near_places=2)", largest=1 << 18, build_why=QUADRATIC),
    Entry("darcstar_local_window", "recipes.darcstar_local_window()",
        "recipes.darcstar_local_window(local_window_size=16, block_size=4)"),
    Entry("darcstar_dilated_sparse", "recipes.darcstar_dilated_sparse([1, 2, 4])",
        "recipes.darcstar_dilated_sparse([1, 2, 4], block_size=4)"),
    Entry("darcstar_global_local", "recipes.darcstar_global_local(global_tokens=512)",
        "recipes.darcstar_global_local(global_tokens=8, local_window_size=16, block_size=4)"),
    Entry("darcstar_hierarchical", "recipes.darcstar_hierarchical()",
        "recipes.darcstar_hierarchical([(4, 16), (16, 32), (32, -1)], block_size=4)", largest=1 << 18,
        build_why="Its last level sees all keys from every 16th block: the number of blocks grows with the "
        "square of the tokens."),
)  # fmt: skip


# What the expressions name beside `masks`: document ids, a length, marks, rows, a table of blocks, a function.


def document_ids(num_tokens: int) -> Tensor:
    """Packed documents of 128 to 4096 tokens; in short sequences, of 7 to half of them."""
    longest = min(4096, num_tokens // 2)
    lengths = longest * 32 ** -torch.rand(num_tokens, generator=_seeded())  # log-uniform
    lengths = lengths.long().clamp(min=7)
    count = int((lengths.cumsum(0) < num_tokens).sum()) + 1
    return torch.arange(count).repeat_interleave(lengths[:count])[:num_tokens]


def real_tokens(num_tokens: int) -> Tensor:
    """The length of a sequence of which about a seventh is padding."""
    return torch.tensor(num_tokens - num_tokens // 7)


def key_marks(num_tokens: int) -> Tensor:
    """Passages padded to 2048 tokens each, of which at least half are real; in short sequences, to a quarter."""
    size = min(2048, num_tokens // 4)
    lengths = torch.randint(size // 2, size + 1, (-(-num_tokens // size), 1), generator=_seeded())
    return (torch.arange(size) < lengths).flatten()[:num_tokens]


def block_rows(num_tokens: int, *, block: int) -> list[list[int]]:
    """A table such as a router makes: its own block, the one before, the first, and two others before it."""
    rows, generator = -(-num_tokens // block), _seeded()
    chosen = (torch.rand(rows, 2, generator=generator) * torch.arange(rows)[:, None]).long()
    return [sorted({0, max(0, row - 1), row, *others}) for row, others in enumerate(chosen.tolist())]


def chosen_blocks(num_tokens: int, *, block: int) -> Tensor:
    """A table as a selector makes it: its own block, and three drawn ones at or before it, of which some are one."""
    rows = torch.arange(-(-num_tokens // block))[:, None]
    drawn = (torch.rand(len(rows), 3, generator=_seeded()) * (rows + 1)).long()
    return torch.cat([rows, drawn], 1)[None]


def widening(width: int) -> Callable[..., Tensor]:
    """Each head sees twice as many keys before the query as the head before it, the first `width`."""
    reach = width * 2 ** torch.arange(32)  # kernels know no powers of whole numbers

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < reach[h])

    return mask_mod


def boxes_of_widening(width: int) -> Callable[..., Tensor]:
    """What boxes of `widening` hold."""

    def classify(head: Tensor, q_first: Tensor, q_last: Tensor, k_first: Tensor, k_last: Tensor) -> Tensor:
        reach = width * 2**head
        empty = (q_last < k_first) | (q_first - k_last >= reach)
        full = (q_first >= k_last) & (q_last - k_first < reach)
        return torch.where(full, masks.FULL, torch.where(empty, masks.EMPTY, masks.PARTIAL))

    return classify


def names_for(num_tokens: int) -> dict[str, Any]:
    """The names that an expression over this many tokens may use."""
    return {
        "masks": masks,
        "recipes": masks.recipes,
        "num_tokens": num_tokens,
        "ids": document_ids(num_tokens),
        "length": real_tokens(num_tokens),
        "marks": key_marks(num_tokens),
        "block_rows": block_rows,
        "chosen_blocks": chosen_blocks,
        "widening": widening,
        "boxes_of_widening": boxes_of_widening,
    }


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def dense(pattern: Pattern, head: int, num_heads: int, num_tokens: int) -> Bool[Tensor, "N N"]:
    """One head's mask, pair by pair."""
    allowed = pattern.bind(num_heads=num_heads, num_queries=num_tokens, num_keys=num_tokens).mask_mod()
    zero, position = torch.zeros((), dtype=torch.int64), torch.arange(num_tokens)
    rows = [allowed(zero, zero + head, some[:, None], position[None, :]) for some in position.split(512)]
    return torch.cat(rows)
