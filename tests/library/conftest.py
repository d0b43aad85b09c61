import pytest
from library_tools import Clock, fill

from mpic.library import Library, Limits


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def open_library(tmp_path, clock):
    """Open the library of this test; libraries that are still open at its end are checked and closed."""
    opened = []

    def open_one(check=True, filesystem=None, **limits):
        library = Library.open(tmp_path / "library", Limits(**limits), filesystem=filesystem, clock=clock)
        library.files.tokenize = library.references.tokenize = lambda text: tuple(text.encode())
        opened.append((library, check))
        return library

    yield open_one
    for library, check in opened:
        if library._open:
            if check:
                library.check()
                assert library.store.stats()["bytes"] <= library.store.stats()["budget"]
            library.close()


@pytest.fixture
def library(open_library):
    return open_library()


@pytest.fixture
def root(tmp_path, clock):
    """The folder of a closed library with some content."""
    with Library.open(tmp_path / "library", clock=clock) as library:
        fill(library)
    return tmp_path / "library"
