"""The remote tier over a folder: what one server has compiled another loads, and what a store that fails costs."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, suppress
from random import Random
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from engine_kit import family, ids, image_chunk, prompt_of, request_of, text_chunk
from library_tools import chunks, drop, flip, make_chunk, picture, read, size_of, text_key
from remote_kit import PATIENCE, Dead, Hung, ManualClock, folder_client, server, settled, tier_of
from threads_kit import in_threads

from mpic.engine.native.engine import NativeEngine
from mpic.errors import CorruptFile, NotFound
from mpic.kv.file import HEAD_BYTES
from mpic.library import Limits
from mpic.library.store import objects as objects_module
from mpic.library.store.objects import Objects, StoreUnavailable, TransferRate
from mpic.library.store.remote import content_of, object_of


@pytest.fixture
def client(tmp_path):
    return folder_client(tmp_path / "store")


@pytest.fixture
def opened(tmp_path, client):
    libraries = []

    def open_one(name="a", through=client, **options):
        libraries.append(server(tmp_path / name, through, **options))
        return libraries[-1]

    yield open_one
    for library in libraries:
        library.check()
        library.close()


def test_what_one_server_has_compiled_another_loads(opened):
    a, b, chunk = opened("a"), opened("b"), make_chunk(image=True, n=50)
    a.store.save(chunk)
    assert settled(a)["saved"] == 1
    found = b.store.find([chunk.key, text_key("other")])
    assert list(found) == [chunk.key] and found[chunk.key].tier == "remote"
    assert torch.equal(read(found[chunk.key], chunk.kv), chunk.kv)
    assert torch.equal(found[chunk.key].inputs.embeds, chunk.inputs.embeds)
    assert b.store.find([chunk.key])[chunk.key].tier == "disk"
    assert settled(b)["saved"] == 0


def test_what_another_user_has_compiled_is_not_visible(opened):
    a, b, chunk = opened("a"), opened("b"), make_chunk()
    a.store.save(chunk)
    settled(a)
    assert b.store.find([text_key(owner="bob")]) == {}
    assert object_of(text_key(owner="bob")).split("/")[1] != object_of(chunk.key).split("/")[1]


def test_a_chunk_of_another_user_under_this_users_name_is_refused(opened, tmp_path):
    """Whoever can write to the store cannot pass one user's chunk off as another's."""
    a, chunk, mine = opened(), make_chunk(), text_key(owner="bob")
    a.store.save(chunk)
    settled(a)
    here, there = (tmp_path / "store" / object_of(key) for key in (chunk.key, mine))
    there.parent.mkdir(parents=True)
    there.write_bytes(here.read_bytes())
    assert a.store.find([mine]) == {} and settled(a)["damaged"] == 1


@pytest.mark.parametrize("at", [4096 + 100, 100, -100], ids=["layers", "header", "inputs"])
def test_an_object_with_a_wrong_byte_is_moved_aside_and_stored_anew(opened, tmp_path, at):
    a, b, chunk = opened("a"), opened("b"), make_chunk(image=True)
    a.store.save(chunk)
    settled(a)
    path = tmp_path / "store" / object_of(chunk.key)
    flip(path, at)
    for stored in b.store.find([chunk.key]).values():
        with pytest.raises(CorruptFile):
            _ = stored.inputs
            read(stored, chunk.kv)
    assert settled(b)["damaged"] == 1
    assert b.store.find([chunk.key]) == {} and path.with_suffix(".damaged").exists()
    b.store.save(chunk)
    settled(b)
    c = opened("c")
    assert torch.equal(read(c.store.find([chunk.key])[chunk.key], chunk.kv), chunk.kv)


@pytest.mark.parametrize("size", [0, 10, 5000])
def test_an_object_that_was_cut_is_moved_aside(opened, tmp_path, size):
    a, b, chunk = opened("a"), opened("b"), make_chunk()
    a.store.save(chunk)
    settled(a)
    path = tmp_path / "store" / object_of(chunk.key)
    path.write_bytes(path.read_bytes()[:size])
    for stored in b.store.find([chunk.key]).values():
        with pytest.raises(CorruptFile):
            read(stored, chunk.kv)
    assert settled(b)["damaged"] == 1 and not path.exists()


def test_a_chunk_that_is_damaged_on_the_disk_does_not_reach_the_store(opened, client):
    a, chunk, hung = opened(), make_chunk(), Hung("head")
    client.fault = hung
    a.store.save(chunk)
    assert hung.reached.wait(PATIENCE)
    flip(a.store.path(chunk.key), 4096 + 100)
    hung.go.set()
    assert settled(a)["saved"] == 0 and client.count("put") == 0


def large_chunk(text="some text", **options):
    """A chunk whose layers take several reads."""
    return make_chunk(text_key(text), n=600, layers=8, heads=8, dim=64, **options)


def test_layers_are_read_by_ranges_one_after_the_other_and_some_ahead(opened, client):
    a, b, chunk = opened("a"), opened("b"), large_chunk()
    a.store.save(chunk)
    settled(a)
    stored = b.store.find([chunk.key])[chunk.key]
    ranges, reads = [], threading.Semaphore(0)

    def note(method, name):
        if method == "get":
            ranges.append(name)
            reads.release()

    client.fault = note
    layers = stored.read_layers(torch.empty_like(chunk.kv))
    next(layers)
    for _ in range(5):
        assert reads.acquire(timeout=PATIENCE)
    assert len(ranges) == 5, "one range, and four ahead"
    assert list(layers) == list(range(1, 8)) and len(ranges) == 9, "a range a layer, and the inputs"
    assert tier_of(b).objects._ahead_bytes == 0


def test_an_abandoned_load_gives_back_what_it_reads_ahead(opened):
    a, b, chunk = opened("a"), opened("b"), large_chunk()
    a.store.save(chunk)
    settled(a)
    layers = b.store.find([chunk.key])[chunk.key].read_layers(torch.empty_like(chunk.kv))
    next(layers)
    layers.close()
    assert tier_of(b).objects._ahead_bytes == 0
    assert b.store.find([chunk.key])[chunk.key].tier == "remote"


def test_a_store_that_dies_in_the_middle_of_a_load_ends_it(opened, client):
    a, b, chunk = opened("a"), opened("b"), large_chunk()
    a.store.save(chunk)
    settled(a)
    stored = b.store.find([chunk.key])[chunk.key]
    layers = stored.read_layers(torch.empty_like(chunk.kv))
    next(layers)
    client.fault = Dead()
    with pytest.raises(StoreUnavailable):
        list(layers)
    assert tier_of(b).stats()["up"] == 0
    client.calls.clear()
    assert b.store.find([chunk.key]) == {}
    with pytest.raises(StoreUnavailable):
        read(stored, chunk.kv)
    assert client.count("get") == 0


def test_a_range_that_was_cut_is_never_served(opened, client):
    a, b, chunk = opened("a"), opened("b"), large_chunk()
    a.store.save(chunk)
    settled(a)
    stored = b.store.find([chunk.key])[chunk.key]
    client.change = lambda name, data: data[:-1]
    with pytest.raises(CorruptFile, match="ends at byte"):
        read(stored, chunk.kv)


def test_an_object_that_is_replaced_during_a_load_is_gone(opened, client, tmp_path):
    """Layers of two versions are never mixed."""
    a, b, chunk = opened("a"), opened("b"), large_chunk()
    a.store.save(chunk)
    settled(a)
    layers = b.store.find([chunk.key])[chunk.key].read_layers(torch.empty_like(chunk.kv))
    next(layers)
    client.put(object_of(chunk.key), (tmp_path / "store" / object_of(chunk.key)).read_bytes() + b"more")
    with pytest.raises(NotFound):
        list(layers)
    assert tier_of(b).stats()["up"] == 1


def test_a_dead_store_is_asked_once_and_then_left_alone_until_a_pause_has_passed(opened, client):
    clock, chunk, dead = ManualClock(), make_chunk(), Dead()
    a, b = opened("a"), opened("b", clock_remote=clock)
    a.store.save(chunk)
    settled(a)
    client.fault, tier = dead, tier_of(b)
    assert b.store.find([chunk.key]) == {} and b.store.find([chunk.key]) == {}
    assert client.calls.count(("get", object_of(chunk.key))) == 1
    assert tier.stats()["up"] == 0
    clock.now += 2
    assert b.store.find([chunk.key]) == {} and b.store.find([chunk.key]) == {}  # it has failed once more
    assert client.calls.count(("get", object_of(chunk.key))) == 2
    dead.down = False
    clock.now += 4
    assert list(b.store.find([chunk.key])) == [chunk.key] and tier.stats()["up"] == 1


def test_a_store_that_can_be_read_and_not_written_is_still_read(opened, client):
    a, b, chunk, other = opened("a"), opened("b"), make_chunk(), make_chunk(text_key("other"))
    a.store.save(chunk)
    settled(a)

    def read_only(method, name):
        if method == "put":
            raise PermissionError("access denied")

    client.fault, tier = read_only, tier_of(b)
    b.store.save(other)
    with tier._changed:
        assert tier._changed.wait_for(lambda: tier.objects.writes.error, PATIENCE)
    assert list(b.store.find([chunk.key])) == [chunk.key]
    assert (tier.stats()["up"], tier.stats()["writable"], tier.stats()["uploads_waiting"]) == (1, 0, 1)


def test_the_pause_between_two_attempts_doubles_up_to_a_minute(client):
    clock = ManualClock()
    breaker = Objects(1.0, client, clock=clock).reads
    pauses = []
    for _ in range(7):
        for _ in range(3):  # several calls under way
            breaker.failed(ConnectionError("no route"))
        pauses.append(breaker.pause())
        clock.now += breaker.pause()
    assert pauses == [2, 4, 8, 16, 32, 60, 60]
    breaker.succeeded()
    breaker.failed(ConnectionError("no route"))
    assert breaker.pause() == 2


def test_a_store_that_does_not_answer_costs_all_chunks_of_a_prompt_one_limit(opened, client):
    """Both are asked for at once; the next request asks for nothing."""
    b, hung = opened("b", seconds=1.0), Hung()
    client.fault = hung
    keys = [chunk.key for chunk in chunks(40)]
    assert b.store.find(keys) == {} and b.store.find(keys) == {}
    asked = client.count("get")
    hung.go.set()
    assert asked <= 40 and tier_of(b).stats()["up"] == 0


def test_loads_under_way_do_not_keep_a_look_up_waiting(opened, client):
    a, b, chunk, hung = opened("a"), opened("b"), make_chunk(), Hung(pattern="large")
    a.store.save(chunk)
    settled(a)
    client.fault, objects = hung, tier_of(b).objects
    for _ in range(2 * objects_module.THREADS):
        objects.ask("large", 0, 10, None)
    found = list(b.store.find([chunk.key]))
    hung.go.set()
    assert found == [chunk.key] and tier_of(b).stats()["up"] == 1


def test_a_store_that_has_answered_some_look_ups_of_a_long_prompt_is_still_used(opened, client, monkeypatch):
    some = chunks(objects_module.THREADS + 10)
    a, b, hung = opened("a"), opened("b"), Hung(pattern=object_of(some[0].key))
    for chunk in some:
        a.store.save(chunk)
    settled(a)

    def all_but_one(futures, limit):
        _, *others = futures
        for future in others:
            future.result()
        return wait(futures, 0)

    monkeypatch.setattr(objects_module, "wait", all_but_one)
    client.fault = hung
    found = b.store.find([chunk.key for chunk in some])
    hung.go.set()
    assert list(found) == [chunk.key for chunk in some[1:]] and tier_of(b).stats()["up"] == 1


def test_an_answer_that_comes_too_late_does_not_have_the_next_request_wait_again(opened, client):
    clock, chunk = ManualClock(), make_chunk()
    a, b = opened("a"), opened("b", seconds=10.0, clock_remote=clock)
    a.store.save(chunk)
    settled(a)

    def slow(method, name):
        clock.now += 3  # a look-up may take 2

    objects, client.fault = tier_of(b).objects, slow
    objects.reads.failed(TimeoutError("no answer"))
    clock.now += 2
    assert objects.head(object_of(chunk.key)) is not None and objects.reads.open
    clock.now += 4
    client.fault = lambda method, name: None
    assert objects.head(object_of(chunk.key)) is not None and not objects.reads.open


def test_uploads_wait_in_a_bounded_queue_and_what_found_no_room_is_uploaded_when_it_is_next_used(
    opened, client
):
    a, hung = opened(queue=2), Hung("head")
    client.fault = hung
    some = chunks(5)
    for chunk in some:
        a.store.save(chunk)
        assert hung.reached.wait(PATIENCE)
    assert tier_of(a).stats()["refused"] == 3
    hung.go.set()
    assert settled(a)["saved"] == 2
    for chunk in some:
        a.store.find([chunk.key])
        settled(a)
    assert settled(a)["saved"] == 5


def test_uploads_that_a_dead_store_has_kept_waiting_are_made_later_also_by_the_next_process(tmp_path, client):
    chunk, dead = make_chunk(), Dead()
    client.fault = dead
    with server(tmp_path / "a", client) as library:
        library.store.save(chunk)
    assert client.count("put") == 0
    dead.down = False
    with server(tmp_path / "a", client) as library:
        assert library.store.find([chunk.key])[chunk.key].tier == "disk"
        assert settled(library)["saved"] == 1


def test_what_the_store_has_is_not_uploaded_again(opened, client):
    a, chunk = opened(), make_chunk()
    a.store.save(chunk)
    settled(a)
    client.calls.clear()
    a.store.find([chunk.key])
    settled(a)
    assert client.calls == []


def uploaded(library, chunk_text="some text", owner="ann"):
    """Add a text and store two forms of its chunk; return the file and its chunks."""
    file = library.files.add(owner, chunk_text.encode(), "t")
    forms = [make_chunk(text_key(chunk_text, owner, **more)) for more in ({}, {"sink": 4})]
    for chunk in forms:
        library.store.save(chunk)
    settled(library)
    return file, forms


def names_in(store):
    return {str(path.relative_to(store)) for path in store.rglob("*") if path.is_file()}


def test_a_deletion_reaches_the_store_with_all_forms_of_all_servers(opened, tmp_path):
    a, b = opened("a"), opened("b")
    file, forms = uploaded(a)
    other = make_chunk(text_key(sink=8))
    b.store.save(other)
    settled(b)
    a.files.delete("ann", file.id)
    assert settled(a)["deleted"] == 3
    assert names_in(tmp_path / "store") == {f"deleted/{content_of('ann', file.key)}"}
    assert b.store.find([chunk.key for chunk in forms]) == {}
    assert a.store.disk.owed() == []


def test_a_deletion_under_a_dead_store_is_made_by_the_next_process(tmp_path, client):
    dead = Dead(False)
    with server(tmp_path / "a", client) as library:
        file, forms = uploaded(library)
        client.fault = dead
        dead.down = True
        library.files.delete("ann", file.id)
        assert library.store.find([forms[0].key]) == {}
    assert len(names_in(tmp_path / "store")) == 2
    dead.down = False
    with server(tmp_path / "a", client) as library:
        assert settled(library)["deleted"] == 2
    assert names_in(tmp_path / "store") == {f"deleted/{content_of('ann', file.key)}"}


def test_a_deletion_that_the_store_has_missed_for_longer_than_others_are_remembered_is_made(tmp_path, client):
    now, dead = [1e9], Dead(False)
    options = {"clock": lambda: now[0], "limits": Limits(tombstone_seconds=60)}
    with server(tmp_path / "a", client, **options) as library:
        file, _ = uploaded(library)
        client.fault = dead
        dead.down = True
        library.files.delete("ann", file.id)
        now[0] += 61
        library.forget_gone()
    dead.down = False
    with server(tmp_path / "a", client, **options) as library:
        assert settled(library)["deleted"] == 2


def test_a_content_that_is_deleted_while_it_is_uploaded_does_not_stay_in_the_store(opened, client, tmp_path):
    a, hung = opened(), Hung("put", "^chunks")
    file = a.files.add("ann", b"some text", "t")
    client.fault = hung
    a.store.save(make_chunk())
    assert hung.reached.wait(PATIENCE)
    a.files.delete("ann", file.id)
    hung.go.set()
    settled(a)
    assert names_in(tmp_path / "store") == {f"deleted/{content_of('ann', file.key)}"}


def test_a_content_that_one_server_deletes_while_another_uploads_it_does_not_stay(opened, client, tmp_path):
    a, b, hung = opened("a"), opened("b"), Hung("put", "^chunks")
    file = a.files.add("ann", b"some text", "t")
    client.fault = hung
    b.store.save(make_chunk())
    assert hung.reached.wait(PATIENCE)
    a.files.delete("ann", file.id)
    settled(a)
    hung.go.set()
    settled(b)
    assert names_in(tmp_path / "store") == {f"deleted/{content_of('ann', file.key)}"}


def test_a_tombstone_keeps_other_servers_from_storing_a_content_until_its_library_stores_it_again(opened):
    a, b, chunk = opened("a"), opened("b"), make_chunk()
    file, _ = uploaded(a)
    a.files.delete("ann", file.id)
    settled(a)
    b.store.save(chunk)
    assert (settled(b)["saved"], settled(b)["kept_away"]) == (0, 1)
    assert b.store.find([chunk.key])[chunk.key].tier == "disk"
    assert a.store.find([chunk.key]) == {}  # a request looks for it, as after a new upload
    a.store.save(chunk)
    settled(a)
    assert opened("c").store.find([chunk.key])[chunk.key].tier == "remote"


def test_a_chunk_that_the_disk_has_evicted_comes_back_from_the_store(opened):
    some = chunks(2)
    a = opened(limits=Limits(disk_bytes=size_of(some[0])))
    for chunk in some:
        a.store.save(chunk)
        settled(a)
    assert a.store.missing_reason(some[0].key) == "evicted"
    found = a.store.find([chunk.key for chunk in some])
    assert [found[chunk.key].tier for chunk in some] == ["remote", "disk"]
    assert torch.equal(read(found[some[0].key], some[0].kv), some[0].kv)


def test_a_load_that_outlasts_the_limit_ends_and_the_store_is_still_used(opened, client):
    """A store may be slow without being dead."""
    clock, chunk = ManualClock(), large_chunk()
    a, b = opened("a"), opened("b", seconds=30.0, clock_remote=clock)
    a.store.save(chunk)
    settled(a)
    layers = b.store.find([chunk.key])[chunk.key].read_layers(torch.empty_like(chunk.kv))
    assert [next(layers) for _ in range(3)] == [0, 1, 2]
    clock.now += 30
    with pytest.raises(StoreUnavailable, match="longer than 30 s"):
        next(layers)
    assert tier_of(b).stats()["up"] == 1 and tier_of(b).objects._ahead_bytes == 0


def test_inputs_that_are_not_answered_cost_the_chunks_of_a_prompt_one_limit(opened, client):
    a, b, some = opened("a"), opened("b"), [large_chunk("one"), large_chunk("two")]
    for chunk in some:
        a.store.save(chunk)
    settled(a)
    found = b.store.find([chunk.key for chunk in some])
    client.fault, tier = Hung(), tier_of(b)
    tier.objects.seconds, asked = 0.05, client.count("get")
    for stored in found.values():
        with pytest.raises(StoreUnavailable):
            _ = stored.inputs
    client.fault.go.set()
    assert client.count("get") == asked + 1 and tier.stats()["up"] == 0


def test_no_byte_is_wrong_under_many_threads_over_a_store_that_fails_and_lies(opened, client):
    some = [
        make_chunk(text_key(f"text {i}", owner="ab"[i % 2]), n=300, layers=4, heads=8, seed=i)
        for i in range(8)
    ]
    chance, served = Random(7), []
    a, b = opened("a"), opened("b")

    def fault(method, name):
        if chance.random() < 0.03:
            raise ConnectionError("no route to host")

    def lie(name, data):
        at = chance.randrange(len(data)) if data and chance.random() < 0.1 else None
        return data if at is None else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    client.fault, client.change = fault, lie

    def work(number):
        store = (a, b)[number % 2].store
        for i in range(40):
            chunk = some[(3 * i + number) % len(some)]
            stored = store.find([chunk.key]).get(chunk.key)
            if stored is None:
                store.save(chunk)
                continue
            destination = torch.empty_like(chunk.kv)
            with suppress(CorruptFile, NotFound, StoreUnavailable):
                for layer in stored.read_layers(destination):
                    assert torch.equal(destination[layer], chunk.kv[layer])
                served.append(stored.tier)
            if i % 5 == 4:
                drop(store, chunk.key, (a, b)[number % 2].catalog)
            for one in (a, b):
                one_tier = tier_of(one).objects
                one_tier.reads.succeeded()
                one_tier.writes.succeeded()

    in_threads(work, range(4))
    assert served and all(tier_of(one).objects._ahead_bytes == 0 for one in (a, b))


# The cost rule


def test_the_bandwidth_is_that_of_all_reads_together_less_one_latency():
    clock = ManualClock()
    rate = TransferRate(clock)
    assert rate.seconds(1) is None
    rate.answered(0.02)
    rate.begin()
    rate.begin()
    clock.now += 1.02
    rate.end(50 << 20)
    rate.end(50 << 20)
    assert rate.seconds(100 << 20) == pytest.approx(1.02)
    rate.begin()
    rate.end(0)  # it has failed
    assert rate.seconds(100 << 20) == pytest.approx(1.02)


@pytest.mark.parametrize(
    "per_token, bandwidth, seconds_per_token, loaded",
    [
        (512 << 10, 1e9, 0.05e-3, False),  # a 7 B model with every head on an H100, over 10 Gbit/s
        (512 << 10, 12e9, 0.05e-3, True),  # the same from the memory of another machine
        (56 << 10, 1e9, 0.05e-3, False),  # a model with grouped heads breaks even at 1.15 GB/s
        (56 << 10, 1.3e9, 0.05e-3, True),
        (512 << 10, 0.1e9, 10e-3, True),  # a CPU
    ],
)
def test_the_rule_decides_by_what_it_has_measured(
    opened, client, per_token, bandwidth, seconds_per_token, loaded
):
    """A simulation: the clock moves by what a store of this bandwidth would take."""
    clock, chunk = ManualClock(), large_chunk()
    a, b = opened("a"), opened("b", clock_remote=clock)
    a.store.save(chunk)
    settled(a)

    def take_time(name, data):
        with clock.lock:
            clock.now += 0.0 if len(data) == HEAD_BYTES else len(data) / bandwidth
        return data

    client.change = take_time
    stored, tier = b.store.find([chunk.key])[chunk.key], tier_of(b)
    assert stored.worth(0.0), "it is loaded as long as nothing is known"
    read(stored, chunk.kv)
    tokens = 1000
    file = SimpleNamespace(kv_end=tokens * per_token)
    assert tier.worth(file, tokens * seconds_per_token) is loaded
    assert tier.objects.rate.seconds(file.kv_end) == pytest.approx(tokens * per_token / bandwidth)


@pytest.mark.parametrize("factor, loaded", [(0.99, True), (1.01, False)])
def test_a_chunk_is_loaded_where_latency_and_bytes_over_bandwidth_are_less_than_computing_it(
    opened, factor, loaded
):
    a, b, chunk = opened("a"), opened("b", clock_remote=ManualClock()), large_chunk()
    a.store.save(chunk)
    settled(a)
    stored, rate = b.store.find([chunk.key])[chunk.key], tier_of(b).objects.rate
    rate.latency, rate.seconds_per_byte = 0.01, 2e-9
    computing = 600 * 0.0002
    rate.seconds_per_byte = factor * (computing - 0.01) / stored._stored._file.kv_end
    assert stored.worth(computing) is loaded
    assert tier_of(b).stats()["slower"] == (0 if loaded else 1)


def test_a_bandwidth_that_speaks_against_loading_is_measured_again_by_one_load_a_minute_later(opened):
    clock, chunk = ManualClock(), large_chunk()
    a, b = opened("a"), opened("b", clock_remote=clock)
    a.store.save(chunk)
    settled(a)
    stored, rate = b.store.find([chunk.key])[chunk.key], tier_of(b).objects.rate
    rate.latency, rate.seconds_per_byte = 0.0, 1.0
    assert not stored.worth(1.0)
    clock.now += 60
    assert stored.worth(1.0) and not stored.worth(1.0), "others do not load meanwhile"
    read(stored, chunk.kv)
    assert rate.seconds_per_byte < 0.9
    assert tier_of(b).stats()["slower"] == 2


# With an engine


def answer(library, prompt, rate=None, name="llama", pages=40):
    with closing(NativeEngine(family(name).loaded, library.store, pages=pages)) as engine:
        if rate is not None:
            engine.scheduler.pace.seconds_per_row = rate
        return engine.submit(request_of(prompt, "mpic-4")).result()


def test_an_engine_links_a_remote_chunk_with_the_same_answer_and_says_why_it_does_not(opened):
    document = text_chunk(ids(3, 40))
    prompt = prompt_of(ids(1, 5), document, ids(2, 5))
    a, b, c, d = (opened(name) for name in "abcd")
    tokens = {tuple(answer(a, prompt).token_ids)}
    settled(a)
    for library, rate, expected in (
        (b, None, ("remote", None)),
        (c, 1e3, ("remote", None)),
        (d, 0.0, ("compiled", "slower")),
    ):
        tier_of(library).objects.rate.seconds_per_byte = 1e-9
        answered = answer(library, prompt, rate)
        (use,) = answered.usage.chunks
        assert (use.tier, use.reason if use.tier == "compiled" else None) == expected
        tokens.add(tuple(answered.token_ids))
    assert len(tokens) == 1


def test_an_engine_computes_a_chunk_whose_store_dies_and_gives_the_same_answer(opened, client):
    prompt = prompt_of(ids(1, 5), text_chunk(ids(3, 400)), ids(2, 5))
    a, b = opened("a"), opened("b")
    wanted = answer(a, prompt)
    settled(a)
    heads = []

    def fault(method, name):
        if method == "get":
            heads.append(name)
            if len(heads) > 1:
                raise ConnectionError("no route to host")

    client.fault = fault
    answered = answer(b, prompt)
    assert answered.token_ids == wanted.token_ids and len(heads) > 1
    assert [(use.tier, use.reason) for use in answered.usage.chunks] == [("compiled", "unavailable")]


def test_the_embeddings_of_an_image_that_is_slower_to_load_are_fetched_and_not_computed(opened, monkeypatch):
    prompt = prompt_of(ids(1, 5), image_chunk(picture()), ids(2, 5))
    model, answers = family("llava").loaded, []
    encoded = Mock(side_effect=model.image_inputs)
    monkeypatch.setattr(model, "image_inputs", encoded)
    for name in "ab":
        library = opened(name)
        tier_of(library).objects.rate.seconds_per_byte = 1e-9
        answers.append(answer(library, prompt, 0.0, "llava"))
        settled(library)
    assert [use.reason for one in answers for use in one.usage.chunks] == ["new", "slower"]
    assert answers[0].token_ids == answers[1].token_ids and encoded.call_count == 1


def test_an_answer_over_chunks_of_the_disk_does_not_wait_for_loads_of_a_slow_store(opened, client):
    a, b, hung = opened("a"), opened("b"), Hung()
    far = prompt_of(ids(1, 5), *(text_chunk(ids(seed, 400)) for seed in (3, 4)), ids(2, 5))
    near = prompt_of(ids(7, 5), text_chunk(ids(5, 40)), ids(2, 5))
    for library, prompt in ((a, far), (b, near)):
        wanted = answer(library, prompt, pages=150)
        settled(library)

    def fault(method, name):
        if client.count("get") > heads + 2:
            hung(method, name)

    heads, client.fault = client.count("get"), fault
    with closing(NativeEngine(family("llama").loaded, b.store, pages=150, loaders=2)) as engine:
        waiting = engine.submit(request_of(far, "mpic-4"))
        try:
            assert hung.reached.wait(PATIENCE)
            with ThreadPoolExecutor(1) as other:
                found = other.submit(engine.submit(request_of(near, "mpic-4")).result)
                try:
                    answered = found.result(PATIENCE / 2)
                finally:
                    hung.go.set()
        finally:
            hung.go.set()
        waiting.result()
    assert answered.token_ids == wanted.token_ids
    assert [use.tier for use in answered.usage.chunks] == ["disk"]
