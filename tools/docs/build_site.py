"""Builds the documentation site (``make docs``, or ``python tools/docs/build_site.py OUT``).

The pages that ``docs/nav.toml`` names, and every page and file that they link to, become plain HTML under OUT, which
any web server can serve and a browser can open directly. Reference pages are made from the code while the site is
built. Nothing is fetched. A link to a page, a heading or a file that does not exist fails the build.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

sys.path.insert(0, str(Path(__file__).resolve().parent))

from nav import HERE, ROOT, asset_path, llms, navigation, site_path
from reference import pages

EXTERNAL = re.compile(r"(https?|mailto):")


@dataclass
class Page:
    """A page. ``source`` is its path in the repository, ``to`` its path in the site."""

    source: str
    to: str
    title: str
    html: str
    headings: dict[str, str] = field(default_factory=dict)
    links: list[tuple[str, str]] = field(default_factory=list)
    text: str = ""


class SiteError(Exception):
    """The site cannot be built; each line names a page and its problem."""


def slug(title: str, taken: dict[str, str]) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    base = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    number = sum(1 for one in taken if re.fullmatch(re.escape(base) + r"(-\d+)?", one))
    return f"{base}-{number}" if number else base


def coloured(code: str, language: str, _attributes: str = "") -> str:
    try:
        lexer = get_lexer_by_name(language or "text", stripnl=False)
    except ClassNotFound:
        return escape(code)
    return highlight(code, lexer, HtmlFormatter(nowrap=True))


class Site:
    """A site that is being built. ``generated`` holds pages made from the code: path -> Markdown."""

    def __init__(self, generated: dict[str, str]) -> None:
        self.generated = generated
        self.sections = navigation()
        self.pages: dict[str, Page] = {}
        self.assets: dict[str, str] = {}
        self.problems: list[str] = []
        self._markdown = MarkdownIt("commonmark", {"highlight": coloured}).enable(["table", "strikethrough"])
        self._waiting = [page["path"] for section in self.sections for page in section["page"]]
        while self._waiting:
            self._add(self._waiting.pop(0))
        self._check_anchors()
        if self.problems:
            raise SiteError("\n".join(self.problems))

    def _read(self, source: str) -> str | None:
        path = ROOT / source
        if source in self.generated:
            return self.generated[source]
        if path.is_dir():
            names = sorted(one.name for one in path.iterdir() if one.is_file())
            return f"# {source}\n\n" + "\n".join(f"- [{name}]({path.name}/{name})" for name in names)
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def _add(self, source: str) -> None:
        if source in self.pages:
            return
        text = self._read(source)
        if text is None:
            self.problems.append(f"docs/nav.toml: {source} does not exist")
            return
        page = Page(source, site_path(source if source.endswith(".md") else f"{source}.md"), source, "")
        self.pages[source] = page
        tokens = self._markdown.parse(text)
        for number, token in enumerate(tokens):
            if token.type == "heading_open":
                self._heading(page, token, tokens[number + 1])
            for child in token.children or ():
                self._link(page, child)
            if token.type in ("inline", "fence", "code_block"):
                page.text += f" {token.content}"
        page.html = self._markdown.renderer.render(tokens, self._markdown.options, {})

    def _heading(self, page: Page, token: Token, inline: Token) -> None:
        title = "".join(
            child.content for child in inline.children or () if child.type in ("text", "code_inline")
        )
        anchor = slug(title, page.headings)
        if token.tag == "h1" and page.title == page.source:
            page.title = title
        page.headings[anchor] = title
        token.attrSet("id", anchor)

    def _link(self, page: Page, token: Token) -> None:
        name = {"link_open": "href", "image": "src"}.get(token.type)
        if name is None or EXTERNAL.match(target := str(token.attrGet(name))):
            return
        path, _, anchor = target.partition("#")
        source = os.path.normpath(Path(page.source).parent / path) if path else page.source
        if source.startswith("..") or not (source in self.generated or (ROOT / source).exists()):
            self.problems.append(f"{page.source}: {target} does not exist")
            return
        if source.endswith(".md") or (ROOT / source).is_dir():
            self._waiting.append(source)
            to = site_path(source if source.endswith(".md") else f"{source}.md")
            page.links.append((source, anchor))
        else:
            to = self.assets[source] = asset_path(source)
        token.attrSet(name, os.path.relpath(to, Path(page.to).parent) + (f"#{anchor}" if anchor else ""))

    def _check_anchors(self) -> None:
        for page in self.pages.values():
            for source, anchor in page.links:
                if anchor and anchor not in self.pages[source].headings:
                    self.problems.append(f"{page.source}: {source} has no heading #{anchor}")

    def write(self, out: Path) -> None:
        """Write the site to a folder, which is emptied first if an earlier build made it."""
        marker = out / ".mpic-docs"
        if out.exists() and any(out.iterdir()) and not marker.exists():
            raise SiteError(f"{out} holds other files; name an empty folder")
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        marker.touch()
        template = (HERE / "page.html").read_text(encoding="utf-8")
        for page in self.pages.values():
            target = out / page.to
            target.parent.mkdir(parents=True, exist_ok=True)
            up = os.path.relpath(".", Path(page.to).parent)
            slots = {"title": escape(page.title), "up": up, "nav": self._nav(page), "body": page.html}
            parts = re.split(r"\{\{(\w+)\}\}", template)  # text, name of a slot, text, ...
            parts[1::2] = [slots[name] for name in parts[1::2]]
            target.write_text("".join(parts), encoding="utf-8")
            if page.source.endswith(".md"):  # for programs that read llms.txt
                target.with_suffix(".md").write_text(self._read(page.source) or "", encoding="utf-8")
        for source, to in self.assets.items():
            (out / to).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / source, out / to)
        colours = HtmlFormatter(style="friendly").get_style_defs(".light pre")
        dark = HtmlFormatter(style="github-dark").get_style_defs(".dark pre")
        css = (HERE / "site.css").read_text(encoding="utf-8")
        (out / "site.css").write_text(f"{css}\n{colours}\n{dark}\n", encoding="utf-8")
        entries = [[page.to, page.title, page.headings, page.text.lower()] for page in self.pages.values()]
        script = (HERE / "search.js").read_text(encoding="utf-8")
        (out / "search.js").write_text(f"const PAGES = {json.dumps(entries)};\n{script}", encoding="utf-8")
        (out / "llms.txt").write_text(llms(site_path), encoding="utf-8")

    def _nav(self, here: Page) -> str:
        parts = []
        for section in self.sections:
            parts.append(f"<h2>{escape(section['title'])}</h2><ul>")
            for entry in section["page"]:
                page = self.pages[entry["path"]]
                current = ' aria-current="page"' if page is here else ""
                href = os.path.relpath(page.to, Path(here.to).parent)
                parts.append(f'<li><a href="{href}"{current}>{escape(entry["title"])}</a></li>')
            parts.append("</ul>")
        return "".join(parts)


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "var/site")
    try:
        site = Site(pages())
        site.write(out)
    except SiteError as error:
        sys.exit(str(error))
    print(f"{len(site.pages)} pages: {out / 'index.html'}")


if __name__ == "__main__":
    main()
