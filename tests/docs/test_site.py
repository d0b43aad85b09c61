"""The documentation site: it builds, its links lead somewhere, its code parses, its generated pages are up to date."""

import ast
import json
import re
import subprocess
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from build_site import Site, SiteError
from generate import files
from nav import navigation

ROOT = Path(__file__).resolve().parents[2]
PAGES = [page["path"] for section in navigation() for page in section["page"]]
WRITTEN = [page for page in PAGES if (ROOT / page).exists()]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Links(HTMLParser):
    """Returns the links of a page, and the anchors in it."""

    def __init__(self, html):
        super().__init__()
        self.targets, self.ids, self.title = [], set(), ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.targets += [values[name] for name in ("href", "src") if name in values]
        self.ids |= {values["id"]} if "id" in values else set()


def test_every_link_of_the_written_site_leads_to_a_file_and_a_heading(built):
    pages = {path: Links(path.read_text()) for path in built.rglob("*.html")}
    assert len(pages) >= len(PAGES)
    broken = []
    for path, page in pages.items():
        for target in page.targets:
            if re.match("https?:", target):
                continue
            file, _, anchor = unquote(target).partition("#")
            leads_to = (path.parent / file).resolve() if file else path
            if not leads_to.is_file() or (anchor and anchor not in pages[leads_to].ids):
                broken.append(f"{path.relative_to(built)}: {target}")
    assert broken == []


def test_every_page_is_in_the_navigation_and_every_page_of_the_navigation_exists(site):
    assert len(PAGES) == len(set(PAGES)) and set(PAGES) <= set(site.pages)
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= set(PAGES)


def test_pages_of_the_repository_link_only_to_what_is_in_it():
    """They are read without the site, too, where the reference pages do not exist."""
    for page in [*WRITTEN, "README.md"]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", FENCE.sub("", (ROOT / page).read_text())):
            assert re.match("https?:", target) or (ROOT / page).parent.joinpath(target).exists(), (
                f"{page}: {target}"
            )


def test_a_broken_link_heading_or_page_fails_the_build(site):
    generated = {
        **site.generated,
        "docs/reference/cli.md": "# A\n\n[b](nowhere.md) [c](../api.md#nowhere) [d](#gone)",
    }
    del generated["docs/reference/errors.md"]
    with pytest.raises(SiteError) as refused:
        Site(generated)
    said = str(refused.value)
    assert "cli.md: nowhere.md does not exist" in said and "docs/api.md has no heading #nowhere" in said
    assert "cli.md has no heading #gone" in said and "docs/reference/errors.md does not exist" in said


def test_a_folder_that_holds_other_files_is_not_emptied(site, built, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(SiteError, match="holds other files"):
        site.write(tmp_path)
    assert (tmp_path / "thesis.txt").exists()
    before = sorted(built.rglob("*"))
    site.write(built)  # its own, again
    assert sorted(built.rglob("*")) == before


@pytest.mark.parametrize("page", [*WRITTEN, "README.md"])
def test_code_blocks_parse(page):
    for language, code in FENCE.findall((ROOT / page).read_text()):
        try:
            check(language, code)
        except Exception as error:
            raise AssertionError(f"{page}: {error}\n{code}") from error


def check(language, code):
    if language == "python":
        ast.parse(code)
    elif language == "json":
        json.loads(code)
    elif language == "toml":
        tomllib.loads(code)
    elif language in ("yaml", "yml"):
        yaml.safe_load(code)
    elif language == "sh":
        ran = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("path", files())
def test_generated_files_are_up_to_date(path):
    assert (ROOT / path).read_text() == files()[path], "run .venv/bin/python tools/docs/generate.py"


def test_programs_find_every_page_through_llms_txt(built):
    assert len(re.findall(r"^- \[", (built / "llms.txt").read_text(), re.MULTILINE)) == len(PAGES)
    for folder in (built, ROOT):
        for link in re.findall(r"^- \[[^]]+\]\(([^)]+)\)", (folder / "llms.txt").read_text(), re.MULTILINE):
            assert (folder / link).read_text().startswith("# ")


def test_the_search_knows_every_page(site, built):
    line = (built / "search.js").read_text().splitlines()[0]
    entries = json.loads(line.removeprefix("const PAGES = ").removesuffix(";"))
    assert {entry[0] for entry in entries} == {page.to for page in site.pages.values()}
    found = [to for to, _, _, text in entries if "usage.mpic.ms" in text]
    assert "no-reuse.html" in found


def test_the_map_is_a_page_with_one_row_for_an_idea():
    text = (ROOT / "STRUCTURE.md").read_text()
    words = re.findall(r"^\| ([^|]+) \|", text.partition("## Words")[2].partition("\n## ")[0], re.MULTILINE)[
        1:
    ]
    names = [name for row in words for name in row.split(", ")]
    assert len(text.splitlines()) <= 120 and 10 < len(words) <= 20 and len(set(names)) == len(names)


def test_every_file_that_the_map_names_by_its_path_is_there():
    text = FENCE.sub("", (ROOT / "STRUCTURE.md").read_text())
    named = set(re.findall(r"`((?:mpic|kernels|lab|tests|tools|docs|deploy|webui)/[\w./-]+)", text))
    assert len(named) > 30
    assert [path for path in sorted(named) if "NAME" not in path and not (ROOT / path).exists()] == []
