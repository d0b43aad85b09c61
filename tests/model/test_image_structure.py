"""The tokens of an image are those that the model's own processor puts into a prompt for it."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import pytest
import transformers as tf
from chat_models import processor as processor_like
from families import make_family, random_image
from server_helpers import gemma3_processor

from mpic.errors import ModelRefused, UnsupportedModality
from mpic.imaging.processing import changed_settings
from mpic.kv.chunk import digest
from mpic.model import image_selftest, image_structure, vision
from mpic.model.bidirectional import Scope
from mpic.model.identity import preprocessing_digest
from mpic.model.image_selftest import image_self_test
from mpic.model.image_structure import gradient, layout_note, refuse_structure, sizes_to_encode
from mpic.model.load import load_model
from mpic.model.loaded import LoadedModel
from mpic.prompt.markers import image_markers
from mpic_lab.models.instances import build
from mpic_lab.models.on_vllm_images import images_of

TILED = ["internvl", "qianfan_ocr"]
"""Families whose image processors cut no tiles by themselves: their processors tell them to."""
BROKEN = ["cohere2_vision", "mistral3"]
"""Families whose processors put other tokens between those of an image."""
VOCABULARY = 300


@functools.cache
def model_of(family: str) -> LoadedModel:
    """A tiny model with a whole processor of its family, that is, with a tokenizer in it."""
    model = build(family, "image-text-to-text")
    return LoadedModel(model, images_of(family, model, VOCABULARY).processor, family)


def fresh(family: str) -> LoadedModel:
    """The same as a test may change it."""
    return model_of.__wrapped__(family)


def ids_in_a_prompt(loaded: LoadedModel, image) -> list[int]:
    """Return the ids of a prompt of one image by the stock processor, from the image's first to its last."""
    processor = loaded.processor
    ids = processor(text=[processor.image_token], images=[image], return_tensors="pt")["input_ids"][0]
    places = (ids == loaded.image_token_id).nonzero()
    return ids[places[0] : places[-1] + 1].tolist()


def without_settings(processor, images):
    return processor.image_processor(images=images, return_tensors="pt"), []


@pytest.mark.parametrize("family", [*TILED, *BROKEN])
@pytest.mark.parametrize("size", [(64, 64), (96, 32), (40, 150)], ids=str)
def test_an_image_has_the_tokens_that_the_stock_processor_gives_it(family, size):
    loaded = model_of(family)
    image = random_image(1, *size)
    assert loaded.image_inputs(image).token_ids.tolist() == ids_in_a_prompt(loaded, image)


@pytest.mark.parametrize("family", TILED)
def test_an_oblong_image_is_cut_into_tiles_as_its_processor_says(family):
    loaded = model_of(family)
    wide, square = (len(loaded.image_inputs(random_image(1, *size))) for size in ((96, 32), (32, 32)))
    assert wide == 4 * square  # three tiles and the whole image


@pytest.mark.parametrize("family", BROKEN)
def test_the_tokens_between_those_of_an_image_are_in_its_chunk(family):
    loaded = model_of(family)
    ids = loaded.image_inputs(random_image(1, 48, 96)).token_ids
    others = ids[ids != loaded.image_token_id]
    assert len(others) and loaded.image_token_id == ids[0] == ids[-1]


@pytest.mark.parametrize("family", [*TILED, *BROKEN])
def test_the_self_test_passes_with_the_tiles_and_breaks_of_real_processors(family):
    assert image_self_test(model_of(family)) < 2e-5


@pytest.mark.parametrize("family", TILED)
def test_the_self_test_refuses_images_that_are_made_without_the_processor_s_own_settings(family, monkeypatch):
    for module in (vision, image_selftest, image_structure):
        monkeypatch.setattr(module, "process_images", without_settings)
    with pytest.raises(ModelRefused, match=r"has \d+ tokens, and its processor gives the image \d+"):
        image_self_test(model_of(family))


@pytest.mark.parametrize("family", BROKEN)
def test_a_chunk_without_the_tokens_between_would_be_refused(family, monkeypatch):
    monkeypatch.setattr(image_structure, "process_images", without_settings)
    with pytest.raises(ModelRefused, match="than a chunk would hold"):
        refuse_structure(model_of(family))


def test_text_around_an_image_that_changes_with_the_number_of_its_tiles_is_refused(monkeypatch):
    loaded = fresh("internvl")
    plain = loaded.processor.replace_image_token

    def labelled(image_inputs, image_idx, **options):
        label = "<17>" if image_inputs["num_patches"][image_idx] > 5 else "<18>"
        return label + plain(image_inputs, image_idx, **options)

    monkeypatch.setattr(loaded.processor, "replace_image_token", labelled)
    with pytest.raises(ModelRefused, match="depends on the image's size"):
        image_self_test(loaded)


def test_tokens_between_those_of_an_image_that_attends_in_both_directions_are_refused():
    loaded = fresh("cohere2_vision")
    loaded.scope = Scope.IMAGE
    with pytest.raises(UnsupportedModality, match="in both directions"):
        loaded.image_inputs(random_image(1, 96, 48))


def test_an_image_whose_encoder_gives_other_tokens_than_its_processor_is_refused():
    loaded = fresh("internvl")
    loaded.processor.image_seq_length += 1
    with pytest.raises(ModelRefused, match=r"its processor gives the image \d+ tokens, its encoder \d+"):
        image_self_test(loaded)


def test_a_processor_that_does_not_say_what_stands_for_an_image_is_refused():
    processor = fresh("internvl").processor
    processor.replace_image_token = super(type(processor), processor).replace_image_token
    with pytest.raises(ModelRefused, match="does not say what it puts into a prompt"):
        image_markers(processor)


def old_digest(processor) -> str:
    """The digest of releases that knew nothing of a processor's own settings."""
    images = processor.image_processor
    settings = json.dumps(images.to_dict(), sort_keys=True, default=str)
    return digest(processor.tokenizer.backend_tokenizer.to_str(), type(images).__name__, settings)


@pytest.mark.parametrize("family", TILED)
def test_chunks_of_images_that_were_not_cut_are_not_found_again(family):
    processor = model_of(family).processor
    assert changed_settings(processor) == {"crop_to_patches": True}
    assert preprocessing_digest(processor) != old_digest(processor)


def test_chunks_without_the_breaks_between_tiles_are_not_found_again():
    processor = model_of("cohere2_vision").processor
    assert changed_settings(processor) == {}
    assert preprocessing_digest(processor) != old_digest(processor)


def test_the_self_test_encodes_an_image_that_is_cut_where_breaks_stand_between_tiles():
    processor = fresh("cohere2_vision").processor
    processor.image_processor = tf.Cohere2VisionImageProcessor()  # with the tiles of real models: 512 x 512
    token = processor.tokenizer.image_token_id
    loaded = SimpleNamespace(processor=processor, tokenizer=processor.tokenizer, image_token_id=token)
    _, second = sizes_to_encode(loaded)
    ids = processor(text=[processor.image_token], images=[gradient(second)])["input_ids"][0]
    assert ids.count(processor.tokenizer.img_line_break_token_id) == 3
    assert max(map(max, sizes_to_encode(model_of("cohere2_vision")))) < 100


@pytest.mark.parametrize("family", ["gemma3", "llava-1.5", "llava-next", "qwen2-vl"])
def test_chunks_of_models_whose_processors_change_nothing_stay_valid(family):
    processor = gemma3_processor() if family == "gemma3" else processor_like(family)
    assert changed_settings(processor) == {}
    assert preprocessing_digest(processor) == old_digest(processor)


def test_the_layout_that_images_have_beside_others_is_told_where_transformers_has_two():
    note = layout_note(model_of("llava_onevision"))
    assert note is not None and "an image has the tokens that it has alone" in note


def test_a_loaded_model_says_that_it_gives_images_the_tokens_that_they_have_alone(tmp_path, caplog):
    loaded = fresh("llava_onevision")
    loaded.processor.image_processor.image_grid_pinpoints = loaded.config.image_grid_pinpoints
    loaded.model.save_pretrained(tmp_path)
    loaded.processor.save_pretrained(tmp_path)
    note = load_model(str(tmp_path), device="cpu", dtype="float32").info.details["image_layout_note"]
    assert "transformers gives two of one conversation" in note and note in caplog.text


@pytest.mark.parametrize("family", ["internvl", "llava"])
def test_nothing_is_told_of_models_with_one_layout(family):
    assert layout_note(model_of(family)) is None


def test_nothing_is_asked_of_an_image_processor_without_a_tokenizer():
    loaded = make_family("llava").loaded
    refuse_structure(loaded)
    assert layout_note(loaded) is None
    assert image_markers(SimpleNamespace()) == ("", "")
