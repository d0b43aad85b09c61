"""The banner that a server prints when it listens."""

from types import SimpleNamespace

from mpic.config import Config
from mpic.server.auto import Auto
from mpic.server.run import welcome


def lines_of(details):
    info = SimpleNamespace(name="tiny", dtype="float32", device="cpu", attention="reference", details=details)
    state = SimpleNamespace(
        engine=SimpleNamespace(info=info),
        config=Config(),
        auto=Auto(),
        keys=SimpleNamespace(exist=lambda: False),
    )
    return welcome(state, "http://127.0.0.1:8000", 10).splitlines()


def test_the_banner_says_when_the_self_test_has_passed():
    made = [line for line in lines_of({"self_test": "passed at this start"}) if "checks" in line]
    assert [line.split() for line in made] == [["checks", "self-test", "passed", "at", "this", "start"]]
    assert not [line for line in lines_of({}) if "checks" in line]


def test_the_first_lines_name_the_page_and_the_documentation():
    first, page, docs, *_ = lines_of({})
    assert "http://127.0.0.1:8000" in first and "this machine only" in first
    assert page.split() == ["page", "http://127.0.0.1:8000/ui"]
    assert docs.split() == ["docs", "http://127.0.0.1:8000/docs"]


def test_the_banner_names_a_dtype_in_which_the_processor_is_faster():
    noted = [line for line in lines_of({"dtype_note": "bfloat16 is faster here"}) if "note" in line]
    assert [line.split() for line in noted] == [["note", "bfloat16", "is", "faster", "here"]]
    assert not [line for line in lines_of({"dtype_note": ""}) if "note" in line]
