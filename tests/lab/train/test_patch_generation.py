"""The second generation: data of full size, image tokens of their own patch only, a sink for every chunk alone."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from train_tools import hidden_states
from transformers import AutoProcessor

from mpic_lab.generator import Document, Generator, Image, messages
from mpic_lab.generator.images import BACKGROUNDS, LARGE, draw_scene, render_large
from mpic_lab.generator.words import NUMBERS
from mpic_lab.generator.worlds import SECOND as WORLD
from mpic_lab.train import vision_patches
from mpic_lab.train.batch import collate, collate_branches, embed_rows, shared_tokens
from mpic_lab.train.curriculum import PATCH_STEPS, draw_group, encoded, grid
from mpic_lab.train.generations import SECOND, generation_at
from mpic_lab.train.model import build_model, load_model, save_model
from mpic_lab.train.sink_weights import FLAGS, SINK

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    model = build_model(tokenizer, design=SECOND.design)
    SECOND.init(model, tokenizer, 0)
    return model.eval()


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return SECOND.encoder(tokenizer)


def _chunks(task, count, seeds):
    return [c for s in seeds for c in Generator(s, "eval", world=WORLD).task(task, count).turns[0].user[:-1]]


def test_images_have_576_tokens_and_documents_300_to_1000(encoder):
    example = encoder(Generator(1, "eval", world=WORLD).task("image", 2))
    assert [end - start for start, end in example.chunks] == [576, 576]
    lengths = [
        len(encoder.ids(d.text)) for t in ("card", "needle", "biography") for d in _chunks(t, 2, range(4))
    ]
    assert min(lengths) >= 280 and max(lengths) <= 1050


def test_facts_stand_anywhere_in_a_document():
    places = []
    for document in _chunks("card", 1, range(40)):
        assert isinstance(document, Document)
        sentences = [sentence.split() for sentence in document.text.split(". ")]
        facts = [i for i, s in enumerate(sentences) if s[0] == "The" and s[2] == "of" and s[4] == "is"]
        places += [i / document.text.count(". ") for i in facts]
    assert len(places) >= 100
    assert np.histogram(places, 4, (0, 1.01))[0].min() > len(places) / 8


def test_training_counts_chunks_in_any_order_and_evaluation_as_the_template_does():
    mix = replace(SECOND.steps[-1].mix, kinds=("image",), named=0.0, search=0.0)
    orders = []
    for seed in range(8):
        items = Generator(seed, "train", world=WORLD).context(4, mix)
        names = [item.part.name for item in items]
        assert [item.label for item in items] == [f"image {name}" for name in names]
        assert len({*names}) == 4 and {*names} <= {*NUMBERS[:10]}
        orders.append([NUMBERS.index(name) for name in names])
    assert any(order != sorted(order) for order in orders)
    for one in (Generator(0, "eval", world=WORLD), Generator(0, "train")):
        assert [item.label for item in one.context(3, mix)] == ["image one", "image two", "image three"]


def test_large_images_of_a_prompt_have_backgrounds_of_their_own():
    for seed in range(4):
        corners = [tuple((image.pixels[0, 0] + 12) // 32) for image in _chunks("image", 8, [seed])]
        assert len({*corners}) == len(corners) == 8


def test_a_question_finds_the_image_behind_its_label_before_any_training(model, encoder):
    """In layer 1 the last token of a question rests on the image that is asked about, of which only the first tokens
    stand near its label."""
    generator = _Described(1, "eval", world=SECOND.small(8))
    rests = []
    for named in (False, True):
        for conversation in generator.branches("image named" if named else "image", 4, 4):
            (example,) = encoded(encoder, [conversation], 8, 5)
            features = torch.cat([generator.features(model, encoder, pixels) for pixels in example.pixels])
            batch = collate([example])
            model.set_attn_implementation({"text_config": "eager"})
            with torch.no_grad():
                attention = model.model.language_model(
                    inputs_embeds=embed_rows(model, batch, features)[None],
                    position_ids=batch.position[None],
                    output_attentions=True,
                    use_cache=False,
                ).attentions[1]
            model.set_attn_implementation({"text_config": "sdpa"})
            asked = conversation.turns[0].user[-1]
            number = next(
                i
                for i, image in enumerate(conversation.turns[0].user[:-1])
                if (image.name or NUMBERS[i]) in asked.strip("?.,").replace(",", " ").split()
            )
            start, _ = example.chunks[number]
            rests.append(float(attention[0, 4, example.answers[0][0] - 1, start : start + 24].sum()))
    assert np.mean(rests) > 0.5 and np.median(rests) > 0.6, rests


class _Described(Generator):
    """Remembers what its images show, so that they need no vision tower."""

    def image(self, scene, name=None):
        part = super().image(scene, name)
        self.shown = {**getattr(self, "shown", {}), id(part.pixels): (part.pixels, scene)}
        return part

    def features(self, model, encoder, pixels):
        """Returns [576, hidden]: what the vision stage teaches the tokens of an image."""
        _, scene = self.shown[id(pixels)]
        number = int(np.argmin([np.abs(pixels[0, 0] - np.array(b)).sum() for b in BACKGROUNDS]))
        cover = (np.abs(pixels.astype(int) - pixels[0, 0]).max(-1) > 20).astype(np.float32)
        words = torch.from_numpy(vision_patches.Targets(encoder)(scene, cover))[None]
        shown = words[..., 0] != encoder.word("nothing")
        return vision_patches.wanted(model, words, shown, torch.arange(576)[None], torch.tensor([number]))[0]


def test_a_label_reaches_a_dozen_tokens_and_none_later_in_the_longest_prompt(model):
    config = model.config.text_config
    frequency = config.rope_parameters["rope_theta"] ** (-torch.arange(32) / 32)
    distance = torch.arange(config.max_position_embeddings)[:, None] * frequency
    attention = model.model.language_model.layers[0].self_attn
    query, key = (p.weight[4 * 64 : 4 * 64 + 32] for p in (attention.q_proj, attention.k_proj))
    constant, label = 2.5, 2.5  # about what normalised words have
    score = (distance.cos() * query[:, 0] * constant * key[:, 1 + FLAGS.index("label")] * label).sum(1) / 8
    assert score[:15].min() > 10 and (score[2:13] < score[:11] - 0.5).all()
    assert score[64:].max() < 0.1  # labels of other images, thousands of tokens before


def test_a_patch_is_taught_what_it_shows_itself(encoder):
    rng, targets = random.Random(3), vision_patches.Targets(encoder)
    scene = draw_scene(rng, 2)
    pixels, cover = render_large(scene, rng, "train")
    words = targets(scene, cover).reshape(24, 24, 4)
    covered = cover.reshape(24, 14, 24, 14).mean((1, 3))
    assert ((words[..., 0] != encoder.word("nothing")) == (covered > vision_patches.COVERED)).all()
    assert pixels.shape == (LARGE, LARGE, 3) and 30 < (covered > vision_patches.COVERED).sum() < 300


def test_a_grid_is_regular_and_within_the_image():
    for side in (8, 12, 16, 24):
        shown = grid(random.Random(side), side, 24)
        rows, columns = (sorted({i // 24 for i in shown}), sorted({i % 24 for i in shown}))
        assert len(shown) == len(set(shown)) == side * side and set(shown) <= set(range(576))
        for line in (rows, columns):
            assert len(line) == side and np.ptp(np.diff(line)) <= 1
    assert grid(random.Random(0), 24, 24) == list(range(576))


@pytest.mark.parametrize("progress", [0.0, 0.1, 0.3, 0.7, 0.95])
def test_conversations_stay_within_the_limit_of_their_step(encoder, progress):
    step = next(s for s in PATCH_STEPS if progress < s.until)
    groups = [draw_group(Generator(s, world=WORLD), encoder, progress, PATCH_STEPS) for s in range(6)]
    assert max(group.rows for group in groups) <= step.limit <= SECOND.design.context
    assert [collate_branches([group.examples], [None]).tokens for group in groups] == [g.rows for g in groups]


def test_most_questions_are_asked_one_by_one_over_chunks_that_are_computed_once(encoder):
    groups = [draw_group(Generator(s, world=WORLD), encoder, 0.5, PATCH_STEPS) for s in range(12)]
    apart = [group.examples for group in groups if len(group.examples) > 1]
    assert 5 <= len(apart) < 12
    for examples in apart:
        assert {len(e.answers) for e in examples} <= {1, 2}  # a search is a call and an answer
        assert len({tuple(e.ids) for e in examples}) == len(examples)
        assert shared_tokens(examples) >= max(
            end for e in examples for _, end in e.chunks[: len(e.pixels)][:1]
        )


def test_questions_asked_one_by_one_are_those_of_a_conversation_without_what_was_said_before(encoder):
    mix = PATCH_STEPS[-1].mix
    branches = Generator(3, world=WORLD).training_branches(3, 12, mix)
    assert len(branches) > 4 and all(len(c.turns) == 1 for c in branches)
    first, *others = branches
    for other in others:  # the very same chunks
        assert [p for p in other.turns[0].user[:-1]] == [p for p in first.turns[0].user[:-1]]
    assert len({c.turns[0].user[-1] for c in branches}) == len(branches)


def test_questions_over_a_grid_of_an_image_share_their_context(model, encoder):
    asked = Generator(2, "eval", world=WORLD).branches("image", 2, 3)
    group = encoded(encoder, asked, 8, 9)
    together = collate_branches([group], [16])
    assert together.pixels is not None and len(together.pixels) == 2
    with torch.no_grad():
        for row, example in enumerate(group):
            alone = hidden_states(model, collate([example], [16]))[0, -4:]
            shared = hidden_states(model, together)[row, len(example.ids) - 4 : len(example.ids)]
            torch.testing.assert_close(alone, shared, atol=5e-3, rtol=1e-3)


def _sinks(model, embeds):
    with torch.no_grad():
        out = model.model.language_model(
            inputs_embeds=embeds[None], output_hidden_states=True, use_cache=False
        )
    return out.hidden_states[2][0, :, SINK]


def test_the_first_token_of_a_prompt_and_of_a_document_alone_is_a_sink_and_no_other(model, encoder):
    embed = model.model.language_model.embed_tokens
    for seed in range(3):
        example = encoder(Generator(seed, "eval", world=WORLD).task("card", 2))
        start, end = example.chunks[1]
        for ids in (example.ids[:1200], example.ids[start:end]):
            sinks = _sinks(model, embed(torch.tensor(ids)))
            assert sinks[0] > 40 and sinks[2:].max() < sinks[0] / 4


def test_a_chunk_behind_four_begin_tokens_has_no_sink_of_its_own(model, encoder, tokenizer):
    example = encoder(Generator(3, "eval", world=WORLD).task("card", 1))
    (start, end), embed = example.chunks[0], model.model.language_model.embed_tokens
    sinks = _sinks(model, embed(torch.tensor([tokenizer.bos_token_id] * 4 + example.ids[start:end])))
    assert sinks[:4].min() > 40 and sinks[4:].max() < 10


def test_the_first_token_of_an_image_alone_is_a_sink_and_no_other(model, encoder):
    (image,) = _chunks("image", 1, [4])
    assert isinstance(image, Image)
    scene, rng = replace(draw_scene(random.Random(1)), background=5), random.Random(2)
    words = torch.from_numpy(vision_patches.Targets(encoder)(scene, render_large(scene, rng, "eval")[1]))
    shown = words[..., 0] != encoder.word("nothing")
    patches, background = torch.arange(576)[None], torch.tensor([5])
    sinks = _sinks(model, vision_patches.wanted(model, words[None], shown[None], patches, background)[0])
    assert sinks[0] > 40 and sinks[2:].max() < sinks[0] / 4


def test_a_quadrant_is_seen_at_its_own_place(model, encoder):
    targets = vision_patches.Targets(encoder)
    drawn = vision_patches.draw_batch(targets, random.Random(4), 2, "train", progress=0.0)
    pixels, words, shown, patches, _ = drawn
    assert len(pixels) == 4 and pixels.shape[1:3] == (LARGE // 2, LARGE // 2) and shown.any(1).all()
    for told, own in zip(words, patches, strict=True):
        vertical = "bottom" if own[0] >= 288 else "top"
        horizontal = "right" if own[0] % 24 >= 12 else "left"
        assert (told[:, 2] == encoder.word(vertical)).all() and (told[:, 3] == encoder.word(horizontal)).all()
    with torch.no_grad():
        assert vision_patches.features_of(model, pixels, patches).shape == (4, 144, SECOND.design.hidden)


def test_a_saved_model_has_a_processor_whose_ids_and_features_are_those_of_training(
    model, encoder, tokenizer, tmp_path
):
    save_model(model, tokenizer, tmp_path, WORLD.labels)
    assert generation_at(tmp_path) is SECOND and (tmp_path / "model.safetensors").stat().st_size < 50e6
    loaded, processor = load_model(tmp_path)[0], AutoProcessor.from_pretrained(tmp_path)
    conversation = Generator(4, "eval", world=WORLD).task("image", 2)
    text = processor.apply_chat_template(messages(conversation)[:-1], add_generation_prompt=True)
    images = [p.pixels for p in conversation.turns[0].user if isinstance(p, Image)]
    inputs = processor(text=text, images=images, return_tensors="pt", add_special_tokens=False)
    example = encoder(conversation)
    assert inputs["input_ids"][0].tolist() == example.ids[: example.answers[0][0]]
    with torch.no_grad():
        theirs = loaded.model(**{k: inputs[k] for k in ("input_ids", "pixel_values")}).last_hidden_state
        ours = hidden_states(loaded, collate([example]))[:, : theirs.shape[1]]
    torch.testing.assert_close(theirs, ours, atol=2e-2, rtol=1e-2)


def test_workers_take_batches_of_about_the_same_size_at_the_same_time(encoder):
    sizes = []
    for seed in (3, 4):
        batches = SECOND.batches(encoder, seed, 9, 2048, 0.5)
        batches.progress = 0.9
        drawn = list(itertools.islice(iter(batches), 20))
        sizes.append(
            [(collate_branches(groups, [None] * len(groups)).tokens, heads[0]) for groups, heads in drawn]
        )
    tokens, masked = (
        np.array([[size for size, _ in mine] for mine in sizes]),
        [[head is not None for _, head in mine] for mine in sizes],
    )
    assert masked[0] == masked[1] and 3 < sum(masked[0]) < 17
    assert (tokens[0] != tokens[1]).mean() > 0.9, "they do not draw the same conversations"
    waiting = 1 - tokens.mean() / tokens.max(0).mean()
    drawn_apart = 1 - tokens.mean() / np.maximum(tokens[0], np.roll(tokens[1], 7)).mean()
    assert waiting < 0.1 < drawn_apart
