"""attention-gym's masks and score functions against what is written here in their place.

Source: https://github.com/meta-pytorch/attention-gym, the package attn-gym.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from attn_gym import masks as gym
from attn_gym import mods
from attn_gym.masks.document_mask import length_to_offsets
from attn_gym.masks.natten import morton_encode
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import flexdilated as fd
from bench._dense import counts
from flexdilated import masks
from tests.support import oracle

ANY = ((1, 1), (5, 5), (33, 33), (200, 200), (17, 64), (64, 17))
TOKENS = ((200, 200),)
SCATTERED = torch.arange(200) % 37 == 3
LENGTHS = [70, 1, 90, 39]
OFFSETS = length_to_offsets(LENGTHS, "cpu")
DOCUMENTS = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))
INTERVALS = torch.tensor([[0, 30], [30, 31], [20, 64], [64, 64]])
TREE = gym.build_tree_ancestor_matrix([-1, 0, 0, 1, 1, 2, 5], "cpu")
TILES = torch.tensor([[[0, 3], [1, 2], [2, 3], [0, 1], [4, 2]], [[0, 1], [1, 0], [2, 0], [3, 4], [4, 3]]])  # 2 heads


# The slots of a 16 x 16 grid's row-major tokens, in tiles of 8 x 4 and along a Z curve.
TILED = torch.arange(256).view(2, 4, 8, 4).transpose(1, 2).flatten()
MORTON = morton_encode(torch.arange(256) % 16, torch.arange(256) // 16)


def moved(theirs: Callable, slot: Tensor) -> Callable:
    """Their rule of slots, by tokens whose slots these are."""
    return lambda b, h, q, k: theirs(b, h, slot[q], slot[k])


def marked(token: Tensor):
    """Pairs of a marked query or a marked key."""
    return lambda b, h, q, k: token[q] | token[k]


def interval_rows(start: Tensor, end: Tensor, image_tokens: int):
    """The queries from an image's start to its end see its tokens."""
    return lambda b, h, q, k: (q >= start[k // image_tokens]) & (q < end[k // image_tokens])


def table(pairs: Tensor):
    """Pairs by a table."""
    last = len(pairs) - 1
    return lambda b, h, q, k: (q <= last) & (k <= last) & pairs[q.clamp(max=last), k.clamp(max=last)]


def block_diffusion(length: int, block: int) -> masks.Pattern:
    """A noised block sees itself and the clean blocks before it, a clean block the clean blocks up to its own."""
    count = length // block
    clean = range(count, 2 * count)
    noised = [[row, *clean[:row]] for row in range(count)]
    return masks.block_list([*noised, *(list(clean[: row + 1]) for row in range(count))], block=block)


@dataclass(frozen=True)
class Pair:
    """A pattern, their mask function, and the numbers of queries and keys for which theirs is defined."""

    ours: masks.Pattern
    theirs: Callable
    sizes: tuple[tuple[int, int], ...] = ANY
    q_offset: int = 0
    num_heads: int = 1


# Their windows count tokens to each side, dilated or not; a sliding window looks back only.
SAME = {
    "causal_mask": Pair(masks.causal(), gym.causal_mask),
    "sliding_window": Pair(masks.local_window(left=3, right=0), gym.generate_sliding_window(3)),
    "dilated_sliding_window": Pair(
        masks.dilated_window(left=4, right=4, rate=3), gym.generate_dilated_sliding_window(12, 3)
    ),
    "global_sliding_window, tokens anywhere": Pair(
        masks.local_window(left=2, right=2) | masks.custom(marked(SCATTERED)),
        gym.generate_global_sliding_window(2, SCATTERED),
    ),
    "prefix_lm": Pair(masks.prefix_lm(6), gym.generate_prefix_lm_mask(6)),
    "doc_mask": Pair(
        masks.prefix_lm(6).per_document(DOCUMENTS),
        gym.generate_doc_mask_mod(gym.generate_prefix_lm_mask(6), OFFSETS),
        TOKENS,
    ),
    "packed_causal_doc_mask": Pair(
        masks.causal() & masks.documents(DOCUMENTS), gym.generate_packed_causal_doc_mask_mod(OFFSETS), TOKENS
    ),
    "block_diffusion": Pair(block_diffusion(100, 20), gym.generate_block_diffusion_mask(100, 20), TOKENS),
    "vision_cross_attention": Pair(
        masks.custom(interval_rows(*INTERVALS.T.contiguous(), 16)),
        gym.generate_vision_cross_attention_mask_mod(INTERVALS, 16),
        ((70, 64),),
    ),
    # A square, where what attention-gym calls the width of its canvas is that of both axes.
    "natten": Pair(masks.neighborhood((15, 15), (3, 1)), gym.generate_natten(15, 15, 7, 3), ((200, 200), (225, 225))),
    "sta_2d": Pair(
        masks.blockwise(masks.neighborhood((4, 5), (1, 2)), 12),
        gym.generate_sta_mask_mod_2d((16, 15), (12, 15), (4, 3)),
        ((240, 240),),
    ),
    # Theirs has the text behind the grid, ours before it.
    "sta_2d with a text": Pair(
        masks.blockwise(masks.neighborhood((4, 5), (1, 2)), 12).after(9) | masks.global_tokens(9),
        moved(gym.generate_sta_mask_mod_2d((16, 15), (12, 15), (4, 3), 9), torch.arange(249).roll(9)),
        ((249, 249),),
    ),
    "tiled_natten": Pair(
        masks.neighborhood((16, 16), (1, 2)), moved(gym.generate_tiled_natten(16, 16, 5, 3, 4, 8), TILED), ((256, 256),)
    ),
    "morton_natten": Pair(
        masks.neighborhood((16, 16), (1, 2)), moved(gym.generate_morton_natten(16, 16, 5, 3), MORTON), ((256, 256),)
    ),
    "sta_3d": Pair(
        masks.blockwise(masks.neighborhood((3, 4, 2), (1, 1, 0)), 8),
        gym.generate_sta_mask_mod_3d((6, 8, 4), (6, 6, 2), (2, 2, 2)),
        ((192, 192),),
    ),
    "spatial_head with a sink": Pair(
        masks.local_window(left=31, right=31) | masks.global_tokens(10) | masks.first_tokens(10 + 19),
        gym.generate_spatial_head_mask_mod(10, 5, 19, 2, attn_sink=True, round_width=16),
        ((105, 105),),
    ),
    "jetspec_tree_causal": Pair(
        masks.first_tokens(20) | masks.custom(table(TREE)).after(20),
        gym.generate_jetspec_tree_causal_mask_mod(20, TREE),
        ((7, 27),),
        q_offset=20,
    ),
    "jetspec_training": Pair(
        masks.first_tokens(20) | (masks.causal() & masks.chunked(8)).after(20),
        gym.generate_jetspec_training_mask_mod(20, 8),
        ((40, 60),),
        q_offset=20,
    ),
    "vsa with padded tiles": Pair(
        masks.selected_blocks(TILES[None], block=8, most=TILES.shape[-1])
        & masks.visible_keys(torch.arange(40) % 8 < 5),
        gym.generate_vsa_mask_mod(TILES[None], 8, torch.full((5,), 5)),
        ((40, 40),),
        num_heads=2,
    ),
}
CASES = [(name, *sizes) for name, pair in SAME.items() for sizes in pair.sizes]


@pytest.mark.parametrize(("name", "num_queries", "num_keys"), CASES)
def test_same_pairs(name: str, num_queries: int, num_keys: int) -> None:
    case = SAME[name]
    found = counts(case.ours, num_queries, num_keys, num_heads=case.num_heads, q_offset=case.q_offset) > 0
    expected = create_mask(case.theirs, 1, case.num_heads, num_queries, num_keys, "cpu")[0]
    assert torch.equal(found, expected)
    assert expected.any()


def operands(num_heads: int = 4, num_tokens: int = 40) -> Tensor:
    return torch.randn(3, 2, num_heads, num_tokens, 16, generator=torch.Generator().manual_seed(0))


def graph() -> Tensor:
    """(2, 40, 40): two graphs."""
    edges = torch.rand(2, 40, 40, generator=torch.Generator().manual_seed(1)) < 0.06
    return edges | edges.mT


DISTANCES = mods.shortest_path_distances(graph(), 4)
PATHS = mods.shortest_path_edge_types(graph(), torch.arange(1600).view(1, 40, 40).expand(2, -1, -1) % 3, 4)
BIAS = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
EDGE_BIAS = torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(3))
MODS = {
    "alibi": mods.generate_alibi_bias(4),
    "tanh_softcap": mods.generate_tanh_softcap(2),
    "sandwich": mods.generate_sandwich_bias(4, 40),
    "graphormer_spatial": mods.generate_graphormer_spatial_bias(BIAS, DISTANCES),
    "graphormer_edge": mods.generate_graphormer_edge_bias(EDGE_BIAS, *PATHS),
}


@pytest.mark.parametrize("name", MODS)
def test_score_functions_go_in_as_they_are(name: str) -> None:
    q, k, v = operands().double()
    tokens = torch.arange(40)
    b, h = torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None]

    def modify(score: Tensor) -> Tensor:
        return MODS[name](score, b, h, tokens[:, None], tokens)

    expected, _ = oracle.attention(q, k, v, tokens <= tokens[:, None], modify=modify)
    found = fd.attend(q, k, v, masks.causal(), score_mod=MODS[name], engine="reference")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, fd.attend(q, k, v, masks.causal()), atol=1e-2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_rotary_part_of_latent_attention() -> None:
    """Their score function takes dot products of rows of tensors; here these are more dims of q and k."""
    q, k, v = operands()
    q_rope, k_rope = (x[..., :8] for x in operands().flip(-1)[:2])
    k_rope = k_rope[:, :1]
    block_mask = create_block_mask(gym.causal_mask, None, None, 40, 40, device="cpu")
    theirs = mods.generate_mla_rope_score_mod(q_rope, k_rope, 4, scale=0.4)
    expected = flex_attention(q, k, v, score_mod=theirs, block_mask=block_mask, scale=0.3)
    wide = torch.cat([q, q_rope * 0.4 / 0.3], -1), torch.cat([k, k_rope.expand(-1, 4, -1, -1)], -1), F.pad(v, (0, 8))
    found = fd.attend(*wide, masks.causal(), scale=0.3)[..., :16]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("what", ["function", "block mask"])
def test_flex_attention_line_by_line(what: str) -> None:
    """`create_block_mask` and `flex_attention`, and the one line in their place."""
    rule = gym.generate_prefix_lm_mask(6)
    block_mask = create_block_mask(rule, None, None, 40, 40, device="cpu")
    q, k, v = operands()
    expected = flex_attention(q, k, v, block_mask=block_mask, scale=0.3)
    pattern = masks.custom(rule if what == "function" else block_mask)
    torch.testing.assert_close(fd.attend(q, k, v, pattern, scale=0.3), expected, rtol=1e-4, atol=1e-5)
