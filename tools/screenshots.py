"""Makes docs/screenshots from the running interface, with a server on the demo model, a real browser and the bundled
samples.

    make screenshots
    python tools/screenshots.py chat searching    # only these

Needs Chromium (tools/get_chromium.sh). The pictures show the answers and measurements of this run.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from PIL import Image

from mpic.data.bundled import DEFAULT, samples_folder
from mpic_lab.demo import running_server

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "screenshots"
REFERENCES = Path(str(files("mpic.data"))) / "references-large" / "images"
SAMPLES = samples_folder(DEFAULT)
COMMON = 144  # how many of the picture's 256 colours are its most frequent ones
DESKTOP = {"viewport": {"width": 1280, "height": 1000}}
PHONE = {
    "viewport": {"width": 390, "height": 844},
    "is_mobile": True,
    "has_touch": True,
    "device_scale_factor": 1.5,
}


def main(wanted: list[str]) -> int:
    sys.path.insert(0, str(ROOT / "tests"))
    from browsing import find_browser, open_browser

    if find_browser() is None:
        print("no chromium: run tools/get_chromium.sh as root, or install the package chromium")
        return 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as data,
        running_server(Path(data)) as (url, _),
        open_browser() as browser,
    ):

        def shoot(name: str, act: Callable, **options) -> None:
            if wanted and name not in wanted:
                return
            context = browser.new_context(**{**DESKTOP, **options})
            context.set_default_timeout(60_000)
            page = context.new_page()
            page.goto(f"{url}/ui/")
            page.wait_for_selector("body[data-ready]")
            act(page)
            page.mouse.move(0, 0)
            page.wait_for_timeout(700)  # wait for transitions, pictures and the next refresh of the figures
            _save(name, page.screenshot())
            context.close()

        shoot("start", lambda page: None)
        shoot("chat", compare)
        shoot("chat-dark", compare, color_scheme="dark")
        shoot("pieces", pieces)
        shoot("completion", complete)
        shoot("differs", differ)
        shoot("references", references)
        shoot("savings", savings)
        shoot("policies", lambda page: open_tab(page, "Policies"))
        shoot("phone", compare, **PHONE)
        shoot("phone-library", library, **PHONE, color_scheme="dark")
        shoot("searching", searching)
    return 0


def open_tab(page, name: str) -> None:
    page.get_by_role("tab", name=name).click()
    page.wait_for_timeout(1000)


def sample(page, id: str) -> None:
    page.click(f'[data-do=sample][data-id="{id}"]')
    page.wait_for_selector(".mpic-facts")


def compare_last(page) -> None:
    page.locator("[data-do=compare]").last.click()
    page.wait_for_selector(".mpic-verdict")
    page.wait_for_timeout(500)  # the chat scrolls to its end
    page.locator(".mpic-verdict").last.evaluate("e => e.scrollIntoView()")


def compare(page) -> None:
    sample(page, "eight-images")
    page.click(".mpic-facts summary")
    compare_last(page)


def ask(page, text: str, number: int = 0) -> None:
    page.fill("#box textarea", text)
    page.press("#box textarea", "Enter")
    page.locator(".mpic-facts").nth(number).wait_for()


def pieces(page) -> None:
    sample(page, "eight")
    page.click(".mpic-facts summary")


def upload(page, *names: str) -> None:
    """Upload samples, each under the name of its file."""
    page.set_input_files("#box input[type=file]", [SAMPLES / f"{name.lower()}.png" for name in names])
    for name in names:
        page.wait_for_selector(f'#library [data-handle="IMAGE#{name}"][data-state=ready]')
    page.fill("#box textarea", "")


def complete(page) -> None:
    page.focus("#box textarea")
    page.keyboard.type("What do you see in IMAGE#SHAPES4 and in IMAGE#SHA", delay=5)
    page.wait_for_selector("#mpic-handles:visible")


def differ(page) -> None:
    upload(page, "MAP7", "CAT9", "BEACH")
    page.fill("#policy input", "reuse")
    page.keyboard.press("Enter")
    ask(page, "IMAGE#MAP7 IMAGE#CAT9 IMAGE#BEACH In image BEACH, what do you see?")
    compare_last(page)


def searching(page) -> None:
    facts = [json.loads(line) for line in (REFERENCES.parent / "references.jsonl").read_text().splitlines()]
    for fact in facts[-16:]:
        fields = {"id": f"ref_{fact['id']}", "title": fact["title"]}
        file = {"name": "fact.txt", "mimeType": "text/plain", "buffer": fact["text"].encode()}
        page.request.post(
            page.url.partition("/ui/")[0] + "/v1/references", multipart={**fields, "file": file}
        )
    page.click("#retrieval input")
    page.get_by_role("option", name="Search when needed").click()
    for number, question in enumerate(("What is the pet of Tina Field?", "What code does the door have?")):
        ask(page, question, number)
    page.locator(".mpic-facts summary").last.click()


def references(page) -> None:
    for number in range(1, 10):
        picture = REFERENCES / f"picture-{number:03d}.png"
        file = {"name": picture.name, "mimeType": "image/png", "buffer": picture.read_bytes()}
        form = {"title": f"Picture {number}", "file": file}
        page.request.post(page.url.partition("/ui/")[0] + "/v1/references", multipart=form)
    open_tab(page, "References")
    page.wait_for_timeout(3000)
    page.fill("#query textarea", "a star and a triangle")
    page.keyboard.press("Enter")
    page.wait_for_selector("#references :text('similarity')")


def savings(page) -> None:
    open_tab(page, "Savings")
    page.wait_for_selector(".mpic-tiles")
    page.fill("#price input", "2.5")
    page.wait_for_timeout(1500)


def library(page) -> None:
    page.click(".sidebar .toggle-button")


def _save(name: str, png: bytes) -> None:
    """Save a palette image, which takes a third of the bytes: the most frequent colours are exact, the others
    approximate."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    often = [colour for _, colour in sorted(image.getcolors(1 << 24) or [], reverse=True)[:COMMON]]
    rest = image.quantize(256 - COMMON, method=Image.Quantize.MAXCOVERAGE).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette([value for colour in often for value in colour] + rest[: 3 * (256 - COMMON)])
    path = FOLDER / f"{name}.png"
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}  {image.width} x {image.height}, {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
