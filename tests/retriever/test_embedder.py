"""The bundled CLIP through the embedder."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from mpic.config import bundled_embedder
from mpic.retriever import Embedder
from mpic.retriever.embedder import TOKEN_CHARS, beginning
from mpic_lab.generator import references


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder(bundled_embedder())


def test_the_name_says_architecture_weights_and_dimension(embedder):
    assert embedder.name.architecture == "clip" and embedder.name.dimension == 128
    assert len(embedder.name.weights) == 64 and embedder.name == Embedder(bundled_embedder()).name


def test_images_and_texts_are_unit_vectors_of_one_space_and_batching_changes_nothing(embedder):
    entries, _ = references.load(references.REFERENCES[1])
    pictures = [e for e in entries if e["kind"] == "image"][:70]
    images = embedder.images([Image.open(e["path"]).convert("RGB") for e in pictures])
    assert images.shape == (70, 128) and np.allclose(np.linalg.norm(images, axis=1), 1, atol=1e-5)
    alone = embedder.images([Image.open(pictures[69]["path"]).convert("RGB")])
    assert np.abs(alone[0] - images[69]).max() < 1e-5
    texts = embedder.texts(["picture with a " + ", a ".join(e["metadata"]["objects"]) for e in pictures])
    scores = texts @ images.T
    assert np.diag(scores).mean() > scores.mean() + 0.3


def test_an_empty_batch_gives_no_rows(embedder):
    assert embedder.texts([]).shape == (0, 128)


def test_only_the_beginning_of_a_long_text_is_tokenized(embedder, monkeypatch):
    book = "a red square and a blue circle " * 40_000
    expected = embedder.texts([book[:2_000]])
    model, preprocess, tokenize, name = embedder._loaded()
    sizes = []

    class Tokenize:
        context_length = tokenize.context_length

        def __call__(self, texts):
            sizes.extend(map(len, texts))
            return tokenize(texts)

    monkeypatch.setattr(embedder, "_parts", (model, preprocess, Tokenize(), name))
    assert np.array_equal(embedder.texts([book]), expected)
    assert np.array_equal(embedder.texts([" " * 500_000 + book]), expected)
    assert max(sizes) == TOKEN_CHARS * tokenize.context_length


def test_a_text_that_is_not_long_is_tokenized_as_it_is():
    assert beginning("  a  b ", 7) == "  a  b " and beginning(" a  b  c", 4) == "a b "
