"""The cache when it is full: copies go before masters, and threads may do all at once."""

from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st

from flexdilated.masks.plan_cache._cache import Cache

META = torch.device("meta")


def look_up(cache: Cache, key: str, nbytes: int, device: torch.device | None = None) -> bool:
    built = []
    assert cache.get(key, lambda: built.append(1) or key, lambda value: nbytes, device=device) == key
    return not built


def held(cache: Cache) -> list[str]:
    return [str(entry.key) for entry in (*cache._copies, *cache._masters)]


@dataclass
class Held:
    nbytes: int
    is_master: bool
    last_use: int


class Model:
    """The rule of eviction, one sort each time."""

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self.max_bytes, self.max_entries = max_bytes, max_entries
        self.held: dict[int, Held] = {}

    def evict(self, spare: int | None = None) -> int:
        gone = 0
        for key in sorted(self.held, key=lambda key: (self.held[key].is_master, self.held[key].last_use)):
            if sum(each.nbytes for each in self.held.values()) <= self.max_bytes and len(self.held) <= self.max_entries:
                break
            if key != spare:
                del self.held[key]
                gone += 1
        return gone


STEPS = st.tuples(st.sampled_from(["use", "use", "use", "bytes", "entries", "clear"]), st.integers(0, 11))


@given(st.lists(STEPS, max_size=60))
def test_eviction_follows_its_rule(steps):
    """Keys 0 to 11 weigh 3 times their number; the even ones are copies."""
    cache, model, evictions = Cache(60, 6), Model(60, 6), 0
    for now, (step, key) in enumerate(steps):
        if step == "use":
            was_there = look_up(cache, str(key), 3 * key, None if key % 2 else META)
            assert was_there == (key in model.held)
            if was_there:
                model.held[key].last_use = now
            elif 3 * key <= model.max_bytes and model.max_entries:
                model.held[key] = Held(3 * key, key % 2 == 1, now)
                evictions += model.evict(spare=key)
        elif step == "bytes":
            cache.budget_bytes = model.max_bytes = 5 * key + 5
            evictions += model.evict()
        elif step == "entries":
            cache.budget_entries = model.max_entries = key
            evictions += model.evict()
        else:
            cache.clear()
            model.held, evictions = {}, 0
        order = sorted(model.held, key=lambda key: (model.held[key].is_master, model.held[key].last_use))
        assert held(cache) == [str(key) for key in order]
        stats = cache.stats()
        assert (stats.bytes, stats.entries) == (sum(each.nbytes for each in model.held.values()), len(model.held))
        assert stats.evictions == evictions
