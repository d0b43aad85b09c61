"""Reading comprehension from the data sets' own files: SQuAD, emrQA, NewsQA, NarrativeQA (MEPIC, section 4),
biographies (KV Packet, section 4.1).

Each question is asked over its own text and ``chunks - 1`` others of the file, in an order drawn from the seed, so that
there is something to link.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mpic_lab.eval.tasks.base import Options, Sample, TaskError, task
from mpic_lab.eval.tasks.documents import ask, data_file, field_of, json_lines, parts_of, whole_json

FACTS = ("birth_date", "birth_place", "current_location", "university", "major", "company")
"""The facts of a biography, each in several wordings."""
_QUESTION = "Answer from the texts above, in as few words as possible.\nQuestion: {question}\nAnswer:"


class ReadingQuestion(NamedTuple):
    """A question about a text."""

    id: str
    text: str
    question: str
    answers: tuple[str, ...]


@task("squad", "SQuAD 1.1 or 2.0 (its JSON file)", "f1", reads_file=True, counts_chunks=True)
def squad(options: Options) -> Iterator[Sample]:
    """Read SQuAD; unanswerable questions of 2.0 are left out."""
    path = data_file(options, (".json",))
    found = []
    for article in field_of(whole_json(path), "data", path.name):
        for paragraph in field_of(article, "paragraphs", path.name):
            lines = field_of(paragraph, "context", path.name)
            text = lines if isinstance(lines, str) else "\n".join(line.rstrip("\n") for line in lines)
            for qa in field_of(paragraph, "qas", path.name):
                answers = tuple(dict.fromkeys(a["text"] for a in qa.get("answers", ()) if a["text"]))
                question, id = qa["question"], qa["id"]
                if isinstance(question, list):  # emrQA: the same in several wordings, with an id for each
                    question, id = question[0], len(found)
                if answers and not qa.get("is_impossible", False):
                    found.append(ReadingQuestion(str(id), text, question, answers))
    return _ask(found, options)


@task("emrqa", "emrQA in SQuAD's format (its JSON file)", "f1", reads_file=True, counts_chunks=True)
def emrqa(options: Options) -> Iterator[Sample]:
    """Read emrQA (Pampari et al. 2018): SQuAD's format, but a note is a list of lines, and a question one of wordings,
    of which the first is asked."""
    return squad(options)


@task("newsqa", "NewsQA (combined-newsqa-data-v1.json)", "f1", reads_file=True, counts_chunks=True)
def newsqa(options: Options) -> Iterator[Sample]:
    """Read the questions whose readers agree on an answer; it is the span ``[s, e)`` of the story."""
    path = data_file(options, (".json",))
    found = []
    for story in field_of(whole_json(path), "data", path.name):
        text = field_of(story, "text", path.name)
        for number, question in enumerate(field_of(story, "questions", path.name)):
            span = question.get("consensus", {})
            if "s" in span and "e" in span:
                answer = text[span["s"] : span["e"]].strip()
                found.append(ReadingQuestion(f"{story['storyId']}#{number}", text, question["q"], (answer,)))
    return _ask(found, options)


@task(
    "narrativeqa", "NarrativeQA over summaries (its folder)", "rouge-l", reads_file=True, counts_chunks=True
)
def narrativeqa(options: Options) -> Iterator[Sample]:
    """Read ``qaps.csv`` and ``third_party/wikipedia/summaries.csv`` of the repository's folder."""
    folder = options.path
    if folder is None or not (folder / "qaps.csv").is_file():
        raise TaskError(f"this task reads a local folder with qaps.csv; got {folder}")
    texts = {
        row["document_id"]: row["summary"]
        for row in _rows(folder / "third_party" / "wikipedia" / "summaries.csv")
    }
    found = [
        ReadingQuestion(
            str(number), texts[row["document_id"]], row["question"], (row["answer1"], row["answer2"])
        )
        for number, row in enumerate(_rows(folder / "qaps.csv"))
        if row["document_id"] in texts
    ]
    return _ask(found, options)


@task("biographies", "synthetic biographies (its folder)", "f1", reads_file=True, counts_chunks=True)
def biographies(options: Options) -> Iterator[Sample]:
    """Read ``train.jsonl``, the biographies, and ``test.jsonl``, the same people's beginnings of sentences with their
    ends (``labels``): rows of the two splits, written by ``to_json`` of `datasets`. One fact a person is asked, drawn
    from the seed."""
    folder = options.path
    if folder is None or not folder.is_dir():
        raise TaskError(f"this task reads a local folder with train.jsonl and test.jsonl; got {folder}")
    splits = [
        data_file(replace(options, path=folder / f"{name}.jsonl"), (".jsonl",)) for name in ("train", "test")
    ]
    found = []
    for number, (told, asked) in enumerate(zip(*map(json_lines, splits), strict=True)):
        where, rng = f"{folder.name}, person {number}", random.Random(f"{options.seed} {number}")
        sentences = [field_of(told, fact, where) for fact in FACTS]
        if not all(sentences):
            continue  # a few people of the data set lack a fact
        fact = rng.choice(FACTS)
        beginning = rng.choice(field_of(asked, fact, where)).rstrip()
        answer = field_of(field_of(asked, "labels", where), fact, where)
        text = " ".join(rng.choice(wordings) for wordings in sentences)
        found.append(
            ReadingQuestion(str(number), text, f"How does this sentence end? {beginning}", (str(answer),))
        )
    return _ask(found, options)


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise TaskError(f"no such file: {path}")
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def _ask(readings: list[ReadingQuestion], options: Options) -> Iterator[Sample]:
    texts = list(dict.fromkeys(reading.text for reading in readings))
    order = random.Random(options.seed).sample(readings, len(readings))
    for reading in order[: options.questions]:
        # asking for more questions does not change the others
        rng = random.Random(f"{options.seed} {reading.id}")
        others = [text for text in texts if text != reading.text]
        shown = [reading.text, *rng.sample(others, min(options.chunks - 1, len(others)))]
        rng.shuffle(shown)
        documents = [part for text in shown for part in parts_of(text, options)]
        question = _QUESTION.format(question=reading.question)
        yield Sample(reading.id, ask(documents, "", question), reading.answers, 32)
