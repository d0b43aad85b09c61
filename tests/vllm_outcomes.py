"""The verdicts of the tests of ``make parity`` on whole families, for the column of ``docs/models.md``."""

from __future__ import annotations

from collections.abc import Iterable

from mpic_lab.models.check import Row

FILES = ("test_models.py", "test_links.py")
"""Their tests together say that a family is right: as transformers, and as the oracle."""


class Outcomes:
    """Follows tests by their ids, ``tests/vllm/test_links.py::test_something[llama-mpic-4]``.

    Args:
        kinds: of the families that are followed, by name (``mpic_lab.models.instances.MAPPINGS``).
    """

    def __init__(self, kinds: dict[str, str]) -> None:
        self._kinds = kinds
        self._passed: dict[str, set[str]] = {}  # the files of which tests passed
        self._failed: dict[str, str] = {}
        self._incomplete: set[str] = set()

    def family(self, test: str) -> str | None:
        """Return the family that a test is of, if its outcome says something of all of it."""
        path, _, name = test.partition("::")
        of = name.partition("[")[2].rstrip("]")
        named = [family for family in self._kinds if of == family or of.startswith(f"{family}-")]
        return named[0] if named and path.endswith(FILES) else None

    def leave_out(self, test: str) -> None:
        """Note that a test will not run, so that nothing good can be said of its family."""
        if (family := self.family(test)) is not None:
            self._incomplete.add(family)

    def add(self, test: str, outcome: str) -> None:
        """Note how a part of a test ended: ``passed``, ``failed`` or ``skipped``."""
        family = self.family(test)
        if family is None:
            return
        if outcome == "failed":
            self._failed.setdefault(family, test.partition("::")[2])
        elif outcome == "skipped":
            self._incomplete.add(family)
        else:
            self._passed.setdefault(family, set()).add(test.partition("::")[0].rpartition("/")[2])

    def rows(self) -> Iterable[Row]:
        """Return the rows of families of which a test failed, or of which all tests ran and passed."""
        for family, kind in self._kinds.items():
            if family in self._failed:
                yield Row(family, kind, "failed", self._failed[family])
            elif family not in self._incomplete and self._passed.get(family, set()) == set(FILES):
                yield Row(family, kind, "verified", "tests/vllm")
