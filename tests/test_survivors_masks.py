"""Changes of the patterns' code that every other test let pass: each is seen by one here (docs/planted_bugs.md)."""

import types
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from flexdilated import masks
from flexdilated.masks._blocks import build_blocks
from flexdilated.masks._box import Box, Progression
from flexdilated.masks._choice import Candidates, Choice, way_of
from flexdilated.masks._compact import compact_terms
from flexdilated.masks._function_checks import check_mask_mod
from flexdilated.masks._layout import Layout, Listed
from flexdilated.masks._lower import shared_terms
from flexdilated.masks._machine_in_use import machine_of
from flexdilated.masks._needs import needed_keys
from flexdilated.masks._needs_by_boxes import _Boxes
from flexdilated.masks._options import ANYTHING
from flexdilated.masks._packed_blocks import PackedBlocks
from flexdilated.masks._placed import plan_at
from flexdilated.masks._placement import Placement
from flexdilated.masks._range_union import ranges_of
from flexdilated.masks._rule import Rule
from flexdilated.masks._split_causal import split_causal
from flexdilated.masks._tiled_terms import tiled_terms


def numbers(*values: int) -> Tensor:
    return torch.tensor(values)


def test_a_choice_of_sides_that_are_not_offered_does_not_fit() -> None:
    bound = masks.random_blocks(2048).bind(num_heads=1, num_queries=2048, num_keys=2048)
    candidates = Candidates.of(bound, machine_of("cpu"), ANYTHING)
    layout, sides = next(way_of(option) for option in candidates.branches[0] if way_of(option)[1])
    assert candidates.chosen(Choice(False, ((layout, sides),))) is not None
    assert candidates.chosen(Choice(False, ((layout, tuple(3 * side for side in sides)),))) is None


def test_squares_are_no_beginning_where_one_side_has_an_order_of_its_own() -> None:
    """Tables list squares of positions: slots of queries that lie apart are none."""
    pattern = masks.block_list([[0], [1], [2], [3], [4]], block=8)
    queries = Listed((range(8, 16), range(32, 40)))
    rule = Rule(pattern, 1, (0,), queries.pieces(0), Layout(40).pieces(0))
    found = build_blocks(rule, q_block=8, k_block=8)
    assert list(zip(found.row.tolist(), found.column.tolist(), strict=True)) == [(0, 1), (1, 4)]


def test_a_built_in_function_is_known_by_its_name() -> None:
    """Equal code that captured one is an equal pattern, in every process."""

    def choosing(choose):
        return lambda b, h, q, k: choose(q > k, q, k) > 3

    one, same, other = (masks.custom(choosing(function)) for function in (torch.where, torch.where, torch.clamp))
    assert one.text == same.text != other.text


def test_what_is_read_of_a_module_within_a_module_takes_part() -> None:
    """A rule that reads `outer.inner.width` is another one where that is another number."""

    def reading(width: int, depth: int):
        outer, inner = types.ModuleType("outer"), types.ModuleType("inner")
        outer.inner, outer.depth, inner.width = inner, depth, width
        return lambda b, h, q, k: (q - k).abs() <= outer.inner.width + outer.depth

    rules = [masks.custom(reading(*numbers)) for numbers in ((3, 1), (3, 1), (4, 1), (3, 2))]
    assert rules[0].text == rules[1].text
    assert len({rule.text for rule in rules}) == 3
    blocks = masks.block_mask(rules[2], 16, num_heads=1, block_size=4)
    assert int(blocks.kv_num_blocks.sum() + blocks.full_kv_num_blocks.sum()) == 14


def test_keys_of_an_incomplete_placement_stand_side_by_side() -> None:
    with pytest.raises(ValueError, match="keys must stand in runs of step 1"):
        Placement((range(2),), ((range(3), range(4, 9, 2)),), complete=False)


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_a_head_that_becomes_a_new_tensor_is_followed() -> None:
    """It hands its value on in second place, after a tensor of which only the kind counts."""
    found = check_mask_mod(lambda b, h, q, k: q.new_tensor(h) + 0 * q >= k, ())
    assert found.uses_head
    assert not check_mask_mod(lambda b, h, q, k: h.new_tensor(3) + 0 * q >= k, ()).uses_head


def test_runs_of_keys_are_told_apart() -> None:
    """Keys 3 to 7 and keys 4 to 7: first and number add up to the same."""
    boxes = _Boxes(numbers(0, 0, 9), numbers(1, 1, 1), numbers(3, 4, 3), numbers(5, 4, 5))
    runs, number = boxes.key_runs()
    assert runs == 2
    assert number[0] == number[2] != number[1]


def test_packed_lists_take_room_for_their_heads_too() -> None:
    bound = masks.causal().bind(num_heads=8, num_queries=64, num_keys=64)
    packed = PackedBlocks.pack(build_blocks(_rule(bound.pattern), q_block=8, k_block=8).with_heads((0,) * 8))
    assert packed.nbytes == len(packed.data) + 64


def _rule(pattern: masks.Pattern) -> Rule:
    return Rule(pattern, 8, (0,), Layout(64).pieces(0), Layout(64).pieces(0))


def test_two_positions_apart_are_no_range() -> None:
    assert ranges_of(numbers(2, 3, 5)) == (range(2, 4), range(5, 6))
    assert ranges_of(numbers(3, 6, 9, 10, 11)) == (range(3, 7, 3), range(9, 12))
    assert ranges_of(numbers(15, 28)) == (range(15, 16), range(28, 29))
    assert ranges_of(numbers(15, 28, 41)) == (range(15, 42, 13),)


def test_patterns_of_single_heads_are_asked_about_all_heads() -> None:
    """A part that has rules for three heads is no rule for two."""
    pattern = masks.per_head([masks.head_groups([masks.causal()] * 3), masks.causal()])
    with pytest.raises(ValueError, match="head"):
        pattern.bind(num_heads=2, num_queries=4, num_keys=4)


def test_a_window_reaches_no_less_than_nothing() -> None:
    for sides in ({"left": -1, "right": 0}, {"left": 0, "right": -1}):
        with pytest.raises(ValueError, match="must be at least 0; got"):
            masks.local_window(**sides)


def test_no_head_before_the_first_draws() -> None:
    text = masks.to_json(masks.random_blocks(64, block=8)).replace('"head":null', '"head":-1')
    assert '"head":-1' in text
    with pytest.raises(ValueError, match="head must be at least 0"):
        masks.from_json(text)


def test_terms_that_meet_in_one_run_of_queries_are_merged_in_all() -> None:
    """The first queries are computed in one term, those far on in several over the same rows."""
    rule = masks.strided(8) | masks.local_window(left=64, right=0)
    heads = {"num_heads": 1, "head_offset": 0, "num_heads_global": 1}
    for queries in ((range(8), range(1024, 2048)), (range(1024), range(2040, 2048))):
        placement = Placement(queries, ((range(2048),),), complete=False)
        assert plan_at(rule, placement, **heads).shares_rows


def test_keys_of_blocks_that_lie_in_long_progressions() -> None:
    """Every third block of four keys, far more blocks than a block has keys."""
    pattern = masks.blockwise(masks.landmark_tokens(3), block=4)
    found = needed_keys(pattern, queries=(range(4, 8),), keys=(range(400),), heads=[0], num_heads_global=1)
    expected = [key for key in range(400) if key // 4 % 3 == 0]
    assert sorted(key for each in found for key in each) == expected


@pytest.mark.parametrize("queries", [range(80), range(512, 640)], ids=str)
def test_keys_that_a_table_lists_are_needed(queries: range) -> None:
    """Over more pairs than are looked at one by one, from position 0 on and from elsewhere."""
    pattern, keys = masks.random_blocks(1024, block=16, count=2, seed=3), range(1024)
    found = needed_keys(pattern, queries=(queries,), keys=(keys,), heads=[1], num_heads_global=2)
    mask_mod, nothing = pattern.mask_mod(num_heads=2, device=torch.device("cpu")), torch.tensor(0)
    allowed = mask_mod(nothing, nothing + 1, torch.arange(queries.start, queries.stop)[:, None], torch.arange(1024))
    assert sorted(key for each in found for key in each) == allowed.any(0).nonzero().flatten().tolist()


def test_rows_of_a_table_are_held_to_the_keys_there_are() -> None:
    """Those of the queries that take part: row 2 names block 5, row 0 does not."""
    pattern = masks.block_list([[0], [1], [5]], block=8)
    sizes = {"num_heads": 1, "num_queries": 8, "num_keys": 40}
    assert pattern.bind(**sizes).num_queries == 8
    with pytest.raises(ValueError, match="5"):
        pattern.bind(q_offset=16, **sizes)


def test_no_part_without_keys_is_split_off() -> None:
    """Queries that begin where the keys do: there are none before all of them."""
    bound = masks.causal().bind(num_heads=2, num_queries=8, num_keys=20)
    (term,) = shared_terms(masks.causal(), 1, bound, 1)
    blocks = replace(term, shape="blocks")
    assert all(part.k.num_slots > 0 for part in split_causal([blocks]) or ())


def test_run_time_tensors_reach_to_the_last_token_here() -> None:
    assert Placement((range(3),), ((range(5),),), complete=False).end == 5
    assert Placement((range(8, 11),), ((range(5),),), complete=False, num_tokens=20).end == 20


def test_tiles_are_for_the_whole_grid() -> None:
    """Not for all its queries over some of its keys."""
    pattern = masks.neighborhood((64, 64), radius=6)
    bind = partial(pattern.bind, num_heads=1, num_queries=4096)
    assert tiled_terms(pattern, 1, bind(num_keys=4096))
    assert tiled_terms(pattern, 1, bind(num_keys=4000)) == {}


def test_a_table_reaches_as_far_as_any_of_its_rows() -> None:
    """Few rows that name late blocks, and one that names an early one."""
    pattern = masks.block_list([[9], [0]], block=4)
    side = [Progression(numbers(0), 1, numbers(count)) for count in (8, 40)]
    bounds = pattern.count(Box(numbers(0), *side), num_heads=1)
    mask_mod, nothing = pattern.mask_mod(num_heads=1, device=torch.device("cpu")), torch.tensor(0)
    allowed = mask_mod(nothing, nothing, torch.arange(8)[:, None], torch.arange(40))
    assert int(bounds.low) <= int(allowed.sum()) == 32 <= int(bounds.high)


def test_bounds_in_grids_are_counts() -> None:
    """At least 0, where the keys that all queries reach are fewer than those that some miss."""
    pattern = masks.neighborhood((12,), radius=2)
    allowed = pattern.mask_mod(num_heads=1, device=torch.device("cpu"))(
        torch.tensor(0), torch.tensor(0), torch.arange(12)[:, None], torch.arange(12)
    )
    for q_step, k_step in ((1, 1), (2, 1), (1, 3), (3, 3)):
        box, truth = _progressions(allowed, q_step, k_step)
        bounds = pattern.count(box, num_heads=1)
        assert ((bounds.low >= 0) & (bounds.low <= truth) & (truth <= bounds.high) & (bounds.high <= box.area)).all()


def test_a_complement_holds_no_more_than_all_pairs() -> None:
    box = Box(numbers(0, 0), Progression(numbers(0, 3), 1, numbers(4, 2)), Progression(numbers(0, 9), 1, numbers(4, 2)))
    bounds = (~masks.causal()).count(box, num_heads=1)
    assert bounds.low.tolist() == bounds.high.tolist() == [6, 4]


def test_a_position_past_all_that_are_held_has_some_slot() -> None:
    slots = Placement((range(2),), ((range(3, 9, 2),),), complete=True).key_slots(0)
    assert slots.of(numbers(3, 5, 7)).tolist() == [0, 1, 2]
    assert 0 <= int(slots.of(numbers(100))) <= 2


def test_the_rule_of_a_compact_term_is_that_of_its_heads() -> None:
    """Over the term's own heads and slots; both the dilated factor and the rest choose by head."""
    rest = masks.per_head([masks.every(), masks.blockwise(masks.causal(), block=4) & masks.chunked(8)] * 2)
    pattern = masks.dilated(8, 2, "interleaved") & rest
    bound = pattern.bind(num_heads=4, num_queries=32, num_keys=32)
    terms = [term for term in compact_terms(pattern, 1, bound) or [] if term.shape == "blocks"]
    whole = pattern.mask_mod(num_heads=4, device=torch.device("cpu"))
    nothing = torch.tensor(0)
    assert terms
    for term in terms:
        mask_mod = term.mask_mod(torch.device("cpu"))
        for index, head in enumerate(term.heads):
            q, k = (side.alone(0).tokens()[index, 0] for side in (term.q, term.k))
            slots = torch.arange(len(q))
            found = mask_mod(nothing, torch.tensor(index), slots[:, None], torch.arange(len(k)))
            assert torch.equal(found, whole(nothing, torch.tensor(head), q[:, None], k))


@pytest.mark.parametrize("part", [masks.causal(), masks.every(), masks.dilated(4, 2)], ids=str)
def test_bounds_within_documents_are_sound(part: masks.Pattern) -> None:
    """Progressions that step over whole documents too."""
    ids = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3, -1, 4])
    rule = part.per_document(ids).bind(num_heads=1, num_queries=12, num_keys=12).pattern
    places = torch.arange(12)
    allowed = rule.mask_mod(num_heads=1, device=torch.device("cpu"))(
        torch.tensor(0), torch.tensor(0), places[:, None], places[None]
    )
    for q_step in (1, 2, 5):
        for k_step in (1, 3, 7):
            box, truth = _progressions(allowed.expand(12, 12), q_step, k_step)
            bounds = rule.count(box, num_heads=1)
            assert ((bounds.low <= truth) & (truth <= bounds.high) & (bounds.high <= box.area)).all()


def _progressions(allowed: Tensor, q_step: int, k_step: int) -> tuple[Box, Tensor]:
    """Every box of these steps with up to four queries and keys, and how many pairs it holds."""
    sides = [
        [(first, count) for first in range(12) for count in range(1, 5) if first + step * (count - 1) < 12]
        for step in (q_step, k_step)
    ]
    boxes = [(q, k) for q in sides[0] for k in sides[1]]
    truth = [
        int(allowed[q : q + q_step * (n - 1) + 1 : q_step, k : k + k_step * (m - 1) + 1 : k_step].sum())
        for (q, n), (k, m) in boxes
    ]
    (q_first, q_count), (k_first, k_count) = (torch.tensor(side).T.contiguous() for side in zip(*boxes, strict=True))
    box = Box(torch.zeros_like(q_first), Progression(q_first, q_step, q_count), Progression(k_first, k_step, k_count))
    return box, torch.tensor(truth)
