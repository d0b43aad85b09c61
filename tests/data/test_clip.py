"""The bundled CLIP: loads as any open_clip folder does, and finds what its card says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import mpic.data
from mpic.data.bundled import REFERENCES
from mpic_lab.generator.references import ReferenceSet, load
from mpic_lab.generator.worlds import WORLDS

BUNDLED = Path(mpic.data.__file__).parent / "models" / "clip"


@pytest.fixture(scope="module")
def embed():
    """Embed a list of images or of texts; vectors of length one."""
    name = f"local-dir:{BUNDLED}"
    model, _, preprocess = open_clip.create_model_and_transforms(name)
    tokenize = open_clip.get_tokenizer(name)
    model.eval()

    def vectors(items):
        with torch.inference_mode():
            if isinstance(items[0], str):
                return F.normalize(model.encode_text(tokenize(items)), dim=1)
            return F.normalize(model.encode_image(torch.stack([preprocess(item) for item in items])), dim=1)

    return vectors


def recall(asked, entries, truth):
    return float(((asked @ entries.T).argmax(1) == torch.tensor(truth)).float().mean())


def test_open_clip_loads_the_folder_alone_without_a_network():
    code = (
        f"import open_clip; name = 'local-dir:{BUNDLED}'; m, _, p = open_clip.create_model_and_transforms(name); "
        "t = open_clip.get_tokenizer(name); print(m.encode_text(t(['a red circle top left'])).shape[1])"
    )
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HTTPS_PROXY": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | offline, capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "128"


@pytest.mark.parametrize("generation", WORLDS)
def test_a_search_for_one_object_finds_its_picture_in_libraries_the_model_was_not_chosen_on(
    embed, generation
):
    found = []
    for seed in range(78_000, 78_003):
        library = ReferenceSet(seed, generation)
        shown = [e for e in library.entries if e["kind"] == "image"]
        texts = [e for e in library.entries if e["kind"] == "text"]
        images = embed([Image.fromarray(library.pixels[e["path"]]) for e in shown])
        entries = torch.cat([images, embed([e["text"] for e in texts])])
        where = {entry["id"]: i for i, entry in enumerate((*shown, *texts))}
        asked = [q for q in library.queries if (q["task"], q["form"]) == ("text->image", "search")]
        found.append(recall(embed([q["text"] for q in asked]), entries, [where[q["truth"]] for q in asked]))
    assert sum(found) / len(found) > 0.9


@pytest.mark.parametrize("generation", WORLDS)
def test_captions_find_their_pictures_in_the_reference_set_as_often_as_the_card_says(embed, generation):
    kept = json.loads((BUNDLED / "scores.json").read_text())
    name = "reference set" if generation == 1 else f"reference set, generation {generation}"
    promised = kept[name]["text->image (caption)"]["recall@1 of its kind"]
    entries, queries = load(REFERENCES[generation])
    shown = [entry for entry in entries if "path" in entry]
    where = {entry["id"]: i for i, entry in enumerate(shown)}
    images = embed([Image.open(entry["path"]).convert("RGB") for entry in shown])
    asked = [q for q in queries if (q["task"], q["form"]) == ("text->image", "caption")]
    found = recall(embed([q["text"] for q in asked]), images, [where[q["truth"]] for q in asked])
    assert abs(found - promised) < 0.04
