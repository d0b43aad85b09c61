"""Fixtures for the scripts of ``tools/docs``, which are not a package, and the site that they build."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/docs"))


@pytest.fixture(scope="session")
def site():
    """The site as ``make docs`` builds it, in memory."""
    from build_site import Site
    from reference import pages

    return Site(pages())


@pytest.fixture(scope="session")
def built(site, tmp_path_factory):
    """The folder of the written site."""
    out = tmp_path_factory.mktemp("site") / "out"
    site.write(out)
    return out
