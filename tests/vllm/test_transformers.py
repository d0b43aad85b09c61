"""The bundled model answers in vLLM as it does in transformers, with nothing linked."""

from __future__ import annotations

import torch
from PIL import Image as PILImage
from small_models import SMALL
from transformers import AutoProcessor, LlavaForConditionalGeneration

from mpic.data.generator import EVAL_TASKS, Generator, Image, messages
from mpic.data.generator.client import messages_of

QUESTIONS = 50
TOKENS = 24


def test_fifty_held_out_questions_get_the_same_greedy_answers(bench):
    processor = AutoProcessor.from_pretrained(SMALL)
    model = LlavaForConditionalGeneration.from_pretrained(SMALL, dtype=torch.float32).eval()
    generator, tasks = Generator(1234, "eval"), sorted(EVAL_TASKS)
    right = 0
    for number in range(QUESTIONS):
        conversation = generator.task(tasks[number % len(tasks)], 1 + number % 5)
        asked = messages(conversation)[:-1]
        text = processor.apply_chat_template(asked, add_generation_prompt=True)
        parts = [part for turn in conversation.turns for part in turn.user]
        images = [PILImage.fromarray(part.pixels) for part in parts if isinstance(part, Image)]
        inputs = processor(text=text, images=images or None, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            generated = model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS)
        expected = tuple(generated[0, inputs.input_ids.shape[1] :].tolist())
        answer = bench.ask(bench.prompt(messages_of(conversation)), "full", tokens=TOKENS)
        assert answer.usage.prompt_tokens == inputs.input_ids.shape[1]
        assert answer.token_ids == expected, (conversation.task, answer.text)
        right += answer.text.strip() == conversation.turns[-1].answer
    assert right > QUESTIONS / 2  # they are questions that it can answer, not noise that happens to agree
