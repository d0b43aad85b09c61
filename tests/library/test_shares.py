"""Eviction when a tier is full: quotas, guaranteed shares, pins."""

import library_tools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from library_tools import drop, make_chunk, saved, text_key

from mpic.errors import BadRequest, FileNotFound, StorageFull, StorageQuotaExceeded
from mpic.keys import KeyLimits
from mpic.kv.chunk import KVKey, Recipe
from mpic.library import SHARED, StorageUsage
from mpic.library.caches import CachedText
from mpic.library.limits import Limits
from mpic.library.store.shares import Held, TierBounds, make_room


def size_of(library):
    """Bytes of one test chunk on disk."""
    library.store.save(make_chunk(text_key("measure", owner="nobody")))
    size = library.store.stats()["bytes"]
    drop(library.store, text_key("measure", owner="nobody"), library.catalog)
    return size


def save(library, owner, *names):
    for name in names:
        library.clock.now += 1
        library.store.save(make_chunk(text_key(name, owner=owner)))


def held(library, owner, names):
    found = []
    for name in names:
        library.clock.now += 1
        if library.store.open(text_key(name, owner=owner)) is not None:
            found.append(name)
    return found


@pytest.fixture
def ten(open_library):
    """A library whose disk holds ten chunks."""

    library = open_library()
    size = size_of(library)
    library.close()

    def opened(**limits):
        return open_library(disk_bytes=10 * size, **limits)

    opened.size = size
    return opened


# The rule


def turns_of(stock):
    """The candidates of a stock: of two owners' chunks, the one with the lower number was used before."""
    return lambda owner: [
        Held((owner, i), size, pin, i) for i, (size, pin) in enumerate(stock.get(owner, ()))
    ]


def used_by(stock):
    return {owner: sum(size for size, _ in chunks) for owner, chunks in stock.items()}


stocks = st.dictionaries(
    st.sampled_from(["ann", "bob", "cat", SHARED]),
    st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=8),
)


@settings(max_examples=400, deadline=None)
@given(
    stocks, st.sampled_from(["ann", "bob", SHARED]), st.integers(1, 60), st.integers(0, 80), st.integers(0, 9)
)
def test_no_user_loses_its_share_to_another(stock, saver, size, quota, slack):
    used = used_by(stock)
    rules = TierBounds(max(sum(used.values()) + slack, 1), quota, 0.5)
    full = {**used, saver: used.get(saver, 0) + size}
    try:
        gone = make_room(rules, used, saver, size, turns_of(stock))
    except (StorageFull, StorageQuotaExceeded):
        assert sum(full.values()) > rules.budget or (quota and full[saver] > quota)
        return
    left = dict(full)
    for chunk, why in gone:
        owner = chunk.key[0]
        assert (why == "share") == (owner != saver)
        share = rules.share(owner, left)
        if owner != saver:
            assert left[owner] > share  # who is not beyond its share loses nothing
        left[owner] -= chunk.bytes
        if owner == saver or left[owner] < share - 1e-6:
            assert not chunk.pinned
    assert sum(left.values()) <= rules.budget
    own = [chunk.bytes for chunk, why in gone if why == "budget"]
    assert not own or sum(left.values()) + min(own) > rules.budget  # none went that could stay
    assert not quota or saver == SHARED or left[saver] <= quota
    if sum(full.values()) <= rules.budget and not (quota and full[saver] > quota):
        assert not gone


@settings(max_examples=200, deadline=None)
@given(stocks, st.integers(1, 30))
def test_a_user_within_its_share_gets_room_from_users_beyond_theirs(stock, size):
    """Unless a chunk is so large that giving it up would take its owner below the share."""
    stock = {
        owner: [(1, pin) for bytes, pin in chunks for _ in range(bytes)] for owner, chunks in stock.items()
    }
    stock.pop("ann", None)
    used = used_by(stock)
    rules = TierBounds(max(sum(used.values()), 1), 0, 0.25)
    if size + 4 <= rules.share("ann", {**used, "ann": size}):  # 4: whole chunks of every owner
        gone = make_room(rules, used, "ann", size, turns_of(stock))
        assert sum(chunk.bytes for chunk, _ in gone) == size


@settings(max_examples=200, deadline=None)
@given(stocks, st.integers(1, 60))
def test_a_user_within_its_share_always_gets_room_if_nothing_is_pinned(stock, size):
    stock = {owner: [(bytes, False) for bytes, _ in chunks] for owner, chunks in stock.items()}
    used = used_by(stock)
    rules = TierBounds(max(sum(used.values()), 1), 0, 0.25)
    full = {**used, "ann": used.get("ann", 0) + size}
    if full["ann"] <= rules.share("ann", full):
        gone = make_room(rules, used, "ann", size, turns_of(stock))
        assert sum(full.values()) - sum(chunk.bytes for chunk, _ in gone) <= rules.budget
        assert {why for _, why in gone} <= {"share"}  # what was lent goes before its own


def test_a_user_below_its_share_gets_the_least_recently_used_chunk_that_is_partly_lent():
    """Ten owners of one chunk each leave nothing that is wholly beyond a share of 100 / 11."""
    owners = [f"user{i}" for i in range(10)]
    turns = {owner: (number + 3) % 10 for number, owner in enumerate(owners)}

    def held(owner):
        return [Held(owner, 10, owner == "user7", turns[owner])] if owner in turns else []

    room = [chunk.key for chunk, _ in make_room(TierBounds(100), dict.fromkeys(owners, 10), "ann", 9, held)]
    assert room == ["user8"]  # user7's was used before, and is pinned
    with pytest.raises(StorageFull, match="its owner would exceed a share of 9 bytes"):
        make_room(TierBounds(100), dict.fromkeys(owners, 10), "ann", 10, held)
    with pytest.raises(StorageFull, match="beyond their shares is pinned"):
        make_room(TierBounds(100), dict.fromkeys(owners, 10), "ann", 9, lambda owner: [])


@pytest.mark.parametrize(
    ("stock", "size", "gone"),
    [
        ({"ann": [5] * 4, "bob": [80]}, 25, ["bob0"]),
        ({"ann": [10], "bob": [90]}, 10, ["bob0"]),
        # ann's first is chosen before bob has to return anything, and then fits again
        ({"ann": [5] * 4, "bob": [80]}, 35, ["bob0"]),
        ({"ann": [2, 3, 50], "bob": [45]}, 10, ["ann2"]),
    ],
)
def test_no_chunk_of_the_saver_goes_that_could_stay(stock, size, gone):
    stock = {owner: [(bytes, False) for bytes in chunks] for owner, chunks in stock.items()}
    found = make_room(TierBounds(100), used_by(stock), "ann", size, turns_of(stock))
    assert ["{}{}".format(*chunk.key) for chunk, _ in found] == gone


def test_pinned_chunks_go_last_and_only_beyond_the_share():
    stock = {"bob": [(10, True), (10, False), (10, True), (10, False)]}
    rules = TierBounds(40, 0, 0.5)
    order = [chunk.key[1] for chunk, _ in make_room(rules, used_by(stock), "ann", 20, turns_of(stock))]
    assert order == [1, 3]
    with pytest.raises(StorageFull, match="pinned"):
        make_room(rules, used_by(stock), "ann", 21, turns_of(stock))
    with pytest.raises(StorageFull):
        make_room(rules, {"bob": 40}, "bob", 5, turns_of({"bob": [(10, True)] * 4}))


# On disk


def test_one_user_filling_the_disk_evicts_nobody_else(ten):
    library = ten()
    save(library, "ann", "a1", "a2", "a3")
    many = [f"b{i}" for i in range(30)]
    save(library, "bob", *many)
    assert held(library, "ann", ["a1", "a2", "a3"]) == ["a1", "a2", "a3"]
    assert held(library, "bob", many) == many[-7:]
    stats = library.store.stats()
    assert (stats["evicted"], stats["evicted_budget"], stats["evicted_share"]) == (23, 23, 0)
    assert stats["bytes_evicted"] == 23 * stats["bytes"] // 10
    assert library.store.missing_reason(text_key("b0", owner="bob")) == "evicted"
    assert library.store.stats()["missed_evicted"] == 1


def test_lent_bytes_are_evicted_when_another_user_needs_its_share(ten):
    library = ten()
    many = [f"b{i}" for i in range(10)]
    save(library, "bob", *many)
    save(library, "ann", *(f"a{i}" for i in range(8)))
    assert held(library, "bob", many) == many[-5:]
    assert held(library, "ann", [f"a{i}" for i in range(8)]) == ["a3", "a4", "a5", "a6", "a7"]
    assert library.store.stats()["evicted_share"] == 5
    row = library.catalog.one("SELECT why FROM chunks WHERE key = ?", text_key("b0", owner="bob").digest)
    assert row["why"] == "share"


def test_the_disk_gives_a_new_user_the_chunk_that_was_used_longest_ago(open_library, clock):
    big = {f"user{i}": make_chunk(text_key("big", owner=f"user{i}"), n=500) for i in range(10)}
    library = open_library(disk_bytes=10 * library_tools.size_of(big["user0"]))
    saved(library, *big.values(), clock=clock)
    clock.now += 1
    assert library.store.open(big["user0"].key)
    library.store.save(make_chunk(text_key("small", owner="ann"), n=400))
    assert [user for user in big if library.store.open(big[user].key) is None] == ["user1"]


def test_references_keep_their_guaranteed_part(ten):
    library = ten(shared_fraction=0.3)
    save(library, SHARED, "s1", "s2", "s3")
    for user in ("ann", "bob", "cat"):
        save(library, user, *(f"{user}{i}" for i in range(5)))
    assert held(library, SHARED, ["s1", "s2", "s3"]) == ["s1", "s2", "s3"]
    save(library, SHARED, "s4", "s5")
    assert held(library, SHARED, ["s1", "s2", "s3", "s4", "s5"]) == ["s3", "s4", "s5"]


def test_a_users_quota_of_compiled_chunks_takes_its_own_oldest(ten):
    library = ten(user_disk_bytes=3 * ten.size)
    save(library, "ann", "a1", "a2", "a3", "a4")
    save(library, "bob", "b1")
    assert held(library, "ann", ["a1", "a2", "a3", "a4"]) == ["a2", "a3", "a4"]
    assert library.store.stats()["evicted_quota"] == 1
    library.set_quota("ann", disk=ten.size)
    save(library, "ann", "a5")
    assert held(library, "ann", ["a2", "a3", "a4", "a5"]) == ["a5"]
    library.set_quota("ann", disk=ten.size - 1)
    with pytest.raises(StorageQuotaExceeded):
        save(library, "ann", "a6")
    library.check()


def test_a_pinned_file_is_not_evicted_by_newer_ones(ten):
    library = ten()
    file = library.files.add("ann", b"pinned", "p.txt")
    key = KVKey("ann", file.key, text_key().model, Recipe("float32"))
    library.store.save(make_chunk(key))
    assert library.files.pin("ann", file.id).pinned
    save(library, "ann", *(f"a{i}" for i in range(20)))
    assert library.store.open(key) is not None
    assert not library.files.pin("ann", file.id, False).pinned
    library.store._rows._touched.clear()
    save(library, "ann", *(f"c{i}" for i in range(20)))
    assert library.store.open(key) is None
    with pytest.raises(FileNotFound):
        library.files.pin("bob", file.id)


async def test_a_pinned_reference_is_not_evicted_by_newer_ones(ten):
    library = ten()
    added = await library.references.add(b"pinned", "p.txt", title="P")
    key = KVKey(SHARED, added.key, text_key().model, Recipe("float32"))
    library.store.save(make_chunk(key))
    assert library.references.pin(added.id).pinned
    new = await library.references.replace(added.id, b"pinned", title="Q")
    assert new.pinned
    library.references.collect_retired()
    save(library, SHARED, *(f"s{i}" for i in range(20)))
    assert library.store.open(key) is not None


def test_usage_adds_up_over_a_life(open_library, clock):
    library = open_library(user_files=7, user_bytes=10**6)
    file = library.files.add("ann", b"12345", "t")
    library.files.add("bob", b"123", "t", expires_after=60)
    save(library, "ann", "a1", "a2")
    drop(library.store, text_key("a2", owner="ann"), library.catalog)
    save(library, "ann", "a1", "a3")  # a1 is there already
    size = library.store.stats()["bytes"] // 2
    assert library.usage() == [
        StorageUsage("ann", "original", 1, 5, 7, 10**6),
        StorageUsage("ann", "disk", 2, 2 * size, 0, 0),
        StorageUsage("bob", "original", 1, 3, 7, 10**6),
    ]
    library.check()
    library.files.delete("ann", file.id)
    clock.now += 60
    library.files.collect_expired()
    assert [row[:3] for row in library.usage()] == [("ann", "disk", 2)]


# Originals


def test_a_quota_of_files_and_bytes_refuses_what_is_too_much(open_library, clock):
    library = open_library(user_files=2, user_bytes=100)
    library.files.add("ann", b"x" * 60, "t")
    with pytest.raises(StorageQuotaExceeded, match="100 bytes"):
        library.files.add("ann", b"x" * 41, "t")
    short = library.files.add("ann", b"x" * 40, "t", expires_after=10)
    with pytest.raises(StorageQuotaExceeded, match="2 files"):
        library.files.add("ann", b"x", "t")
    library.files.add("bob", b"x" * 100, "t")
    clock.now += 11  # expired, not collected yet
    again = library.files.add("ann", b"x" * 40, "t")
    assert len(library.files.page("ann").files) == 2
    library.files.collect_expired()
    with pytest.raises(FileNotFound):
        library.files.get("ann", short.id)
    library.files.delete("ann", again.id)
    library.set_quota("ann", files=1)
    with pytest.raises(StorageQuotaExceeded):
        library.files.add("ann", b"x", "t")
    library.set_quota("ann", files=0, bytes=0)
    for _ in range(3):
        library.files.add("ann", b"x" * 100, "t")
    with pytest.raises(BadRequest):
        library.set_quota("ann", files=-1)


def test_without_any_setting_a_user_has_a_quota_and_the_refusal_names_its_key(open_library):
    assert (Limits().user_files, Limits().user_bytes) == (50_000, 16 << 30)
    library = open_library(user_files=0, user_bytes=0)  # as a version without these quotas filled it
    held = [library.files.add("ann", b"x" * n, "t") for n in (1, 2, 3)]
    library.close()
    for limits, key in (({"user_files": 2}, "user_files"), ({"user_bytes": 5}, "user_bytes")):
        library = open_library(**limits)
        assert [library.files.get("ann", one.id).bytes for one in held] == [1, 2, 3]
        with pytest.raises(StorageQuotaExceeded, match=rf"\({key} in \[library\]"):
            library.files.add("ann", b"y", "t")
        library.files.add("bob", b"y", "t")
        library.check()
        library.close()
    library = open_library()
    library.set_quota("ann", files=1)
    with pytest.raises(StorageQuotaExceeded) as refused:
        library.files.add("ann", b"z", "t")
    assert "user_files" not in str(refused.value)


def test_the_tightest_of_a_users_and_a_keys_quota_decides_and_the_error_says_which(open_library):
    library = open_library(user_files=3)
    library.files.add("ann", b"x", "t")
    for key, whose in (
        (KeyLimits(files=1), "your key's quota is 1"),
        (KeyLimits(bytes=1), "your key's quota is 1"),
    ):
        with pytest.raises(StorageQuotaExceeded, match=whose):
            library.files.add("ann", b"y", "t", key=key)
        with pytest.raises(StorageQuotaExceeded, match=whose):
            library.caches.create("ann", [CachedText("y", 0, 1)], key=key)
    with pytest.raises(StorageQuotaExceeded, match="your quota is 3 files"):
        library.caches.create(
            "ann", [CachedText(c, i, i + 1) for i, c in enumerate("abc")], key=KeyLimits(files=9)
        )
    assert len(library.files.page("ann").files) == 1 and library.caches.page("ann").caches == []


# Expiry


def test_an_expiry_can_be_moved_and_removed(library, clock):
    file = library.files.add("ann", b"text", "t", expires_after=10)
    assert library.files.extend("ann", file.id, 100).expires_at == clock.now + 100
    clock.now += 50
    assert library.files.extend("ann", file.id, None).expires_at is None
    assert library.files.extend("ann", file.id, 5).expires_at == clock.now + 5
    with pytest.raises(FileNotFound):
        library.files.extend("bob", file.id, 100)
    with pytest.raises(BadRequest):
        library.files.extend("ann", file.id, 0)
    clock.now += 5
    with pytest.raises(FileNotFound):
        library.files.extend("ann", file.id, 100)


def test_a_file_extended_while_it_is_collected_stays(library, clock):
    file = library.files.add("ann", b"text", "t", expires_after=10)
    clock.now += 10
    expired = library.files._rows.expired()
    clock.now -= 1
    library.files.extend("ann", file.id, 100)
    clock.now += 1
    assert [f.id for f in expired] == [file.id] and library.files._remove(expired, "expired") == []
    assert library.files.content("ann", file.id) == b"text"
