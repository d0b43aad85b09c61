"""Stand-ins of the papers' data sets: ``mpic eval run --stand-in`` writes files in the formats in which these are
published and runs the configuration on them, so that all of it runs where the data sets are not.

The texts are sentences of the language reference that Python ships with and a code in each (``prose-codes``); the
pictures are drawn (``mpic_lab.generator.scenes``). Scores over them say which policy loses what on such data; they are
not the papers' figures.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from mpic.errors import BadRequest
from mpic.model.load import choose_device
from mpic_lab.eval.config import EvalConfig, TaskEntry
from mpic_lab.eval.linking import parse_linking
from mpic_lab.eval.tasks import Options, find
from mpic_lab.eval.tasks.prose import Codes, draw_codes
from mpic_lab.eval.tasks.reading import FACTS
from mpic_lab.generator.scenes import describe, draw_picture, render

FOLDER = "stand-in"
WORDS = 180
"""Words of a document, at most."""
PICTURES = 4
"""Pictures of a dialogue: 1 to this number."""


class Drawn(NamedTuple):
    """The contents of one entry of a data set.

    Attributes:
        codes: documents with a code in each.
        name: the project whose code is asked.
    """

    codes: Codes
    name: str

    @property
    def question(self) -> str:
        return f"What is the access code of project {self.name}?"

    @property
    def answer(self) -> str:
        return self.codes.codes[self.name]

    @property
    def own(self) -> str:
        """Return the document with the answer."""
        return self.codes.texts[list(self.codes.codes).index(self.name)]


def with_stand_ins(
    config: EvalConfig, out: Path, paper_model: str, words: int = WORDS
) -> tuple[EvalConfig, list[str]]:
    """Write the files that a configuration reads below ``out``, and return the configuration that reads them, with a
    sentence for each thing in which the run differs from the file's.

    Args:
        paper_model: the model that the file names.
        words: maximum number of words of a document.

    Raises:
        BadRequest: there is no stand-in for a task, or none of the policies runs without an adapter.
    """
    folder = (out / FOLDER).absolute()
    entries = tuple(_entry(entry, config, folder, words) for entry in config.tasks)
    notes = [
        f"The data is generated, in the data sets' formats: documents of at most {words} words, pictures of a few "
        "drawn objects. The scores are not the paper's."
    ]
    if config.model != paper_model:
        notes.append(f"The model is {Path(config.model).name} in place of {paper_model}.")
    dtype = config.dtype
    if dtype == "float16" and choose_device(config.device).type == "cpu":
        dtype = "float32"
        notes.append("The dtype is float32 in place of float16, for which a CPU has no kernels.")
    policies, packet = config.policies, config.packet
    if packet and not Path(packet).is_file():
        left_out = [name for name in policies if parse_linking(name).policy.wrapping.packet]
        policies, packet = tuple(name for name in policies if name not in left_out), ""
        notes.append(
            f"Left out, because there is no adapter for this model (--packet): {', '.join(left_out)}."
        )
        if set(policies) <= {"full"}:
            raise BadRequest(f"every policy needs an adapter: give --packet; {notes[-1]}")
    return dataclasses.replace(config, tasks=entries, dtype=dtype, policies=policies, packet=packet), notes


def _entry(entry: TaskEntry, config: EvalConfig, folder: Path, words: int) -> TaskEntry:
    if not find(entry.name).reads_file:
        return entry
    known = "longbench" if entry.name.startswith("longbench-") else entry.name
    if known not in WRITERS:
        raise BadRequest(f"there is no stand-in for {entry.name}; there are: {', '.join(sorted(WRITERS))}")
    count = entry.questions or config.questions
    place = folder / f"{entry.name}-{count}" / Path(entry.path or "data.jsonl").name
    options = Options(chunks=6, questions=count, seed=config.seed, tokens=words)
    drawn = [Drawn(codes, codes.rng.choice(list(codes.codes))) for codes in draw_codes(options)]
    place.parent.mkdir(parents=True, exist_ok=True)
    WRITERS[known](
        place, entry.name.removeprefix("longbench-"), drawn
    )  # the same again when a run is resumed
    images = str(place.parent) if entry.images else None
    return dataclasses.replace(entry, path=str(place), images=images)


def _lines(path: Path, entries: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries), encoding="utf-8")


def _longbench(path: Path, subset: str, drawn: list[Drawn]) -> None:
    """Write LongBench's lines: SAMSum's dialogues with summaries, MultiNews' passages, or passages with a question."""
    found = []
    for number, one in enumerate(drawn):
        passages = "".join(f"Passage {n}:\n{text}\n" for n, text in enumerate(one.codes.texts, 1))
        asked, context, answer = one.question, passages, one.answer
        if subset == "samsum":
            *told, (last, answer) = [_dialogue(name, code) for name, code in one.codes.codes.items()]
            context = "".join(f"{dialogue}Summary: {summary}\n" for dialogue, summary in told)
            asked = f"{last}Summary: "
        elif subset == "multi_news":
            asked, answer = "", " ".join(lines[0] for lines in one.codes.lines)
        found.append(
            {"input": asked, "context": context, "answers": [answer], "dataset": subset, "_id": str(number)}
        )
    _lines(path, found)


def _dialogue(name: str, code: str) -> tuple[str, str]:
    """Return a dialogue and its summary."""
    said = f"Dialogue: Ana: Do you know the access code of project {name}?\nBob: Yes, it is {code}.\nAna: Thanks!\n"
    return said, f"Bob tells Ana that the access code of project {name} is {code}."


def _ruler(path: Path, _: str, drawn: list[Drawn]) -> None:
    _lines(
        path,
        (
            {"index": n, "input": f"{''.join(one.codes.texts)}{one.question}", "outputs": [one.answer]}
            for n, one in enumerate(drawn)
        ),
    )


def _squad(path: Path, _: str, drawn: list[Drawn]) -> None:
    def asked(n: int, one: Drawn) -> dict[str, Any]:
        return {"id": str(n), "question": one.question, "answers": [{"text": one.answer}]}

    paragraphs = [{"context": one.own, "qas": [asked(n, one)]} for n, one in enumerate(drawn)]
    path.write_text(json.dumps({"data": [{"title": "codes", "paragraphs": paragraphs}]}), encoding="utf-8")


def _emrqa(path: Path, _: str, drawn: list[Drawn]) -> None:
    """Write emrQA's form of SQuAD: notes are lists of lines, questions lists of wordings."""

    def note(n: int, one: Drawn) -> dict[str, Any]:
        wordings = [one.question, f"Which access code does project {one.name} have?"]
        asked = {"id": [[f"{n}a", f"{n}b"]], "question": wordings, "answers": [{"text": one.answer}]}
        lines = [f"{sentence}\n" for sentence in one.codes.lines[list(one.codes.codes).index(one.name)]]
        return {"note_id": str(n), "context": lines, "qas": [asked]}

    notes = [note(n, one) for n, one in enumerate(drawn)]
    path.write_text(json.dumps({"data": [{"title": "codes", "paragraphs": notes}]}), encoding="utf-8")


def _newsqa(path: Path, _: str, drawn: list[Drawn]) -> None:
    """Write NewsQA's stories; an answer is a span of characters."""

    def story(n: int, one: Drawn) -> dict[str, Any]:
        start = one.own.index(one.answer)
        span = {"s": start, "e": start + len(one.answer)}
        return {"storyId": str(n), "text": one.own, "questions": [{"q": one.question, "consensus": span}]}

    path.write_text(json.dumps({"data": [story(n, one) for n, one in enumerate(drawn)]}), encoding="utf-8")


def _narrativeqa(path: Path, _: str, drawn: list[Drawn]) -> None:
    """Write NarrativeQA's folder: summaries, and questions with two answers."""
    tables = {
        "third_party/wikipedia/summaries.csv": [("document_id", "summary")]
        + [(str(n), one.own) for n, one in enumerate(drawn)],
        "qaps.csv": [("document_id", "question", "answer1", "answer2")]
        + [(str(n), one.question, one.answer, f"It is {one.answer}.") for n, one in enumerate(drawn)],
    }
    for name, rows in tables.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        with (path / name).open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(rows)


def _biographies(path: Path, _: str, drawn: list[Drawn]) -> None:
    """Write the two splits: people's sentences, and the same sentences' beginnings with their ends."""
    told, asked = [], []
    for n, one in enumerate(drawn):
        person = f"{one.name} Reed-{n}"
        ends = {
            fact: f"{fact.replace('_', ' ').title()} {code}"
            for fact, code in zip(FACTS, one.codes.codes.values())
        }
        heads = {fact: [f"{person}'s {fact.replace('_', ' ')} is"] for fact in FACTS}
        told.append({"name": person} | {fact: [f"{heads[fact][0]} {ends[fact]}."] for fact in FACTS})
        asked.append({"name": person, "labels": ends} | heads)
    path.mkdir(exist_ok=True)
    _lines(path / "train.jsonl", told)
    _lines(path / "test.jsonl", asked)


def _pictures(folder: Path, number: int) -> tuple[list[str], list[str]]:
    """Draw the pictures of a dialogue, and return the names of their files and their descriptions."""
    names, told = [], []
    for n in range(1 + number % PICTURES):
        rng = random.Random(f"{number} {n}")
        picture = draw_picture(rng)
        names.append(f"{1 + number}{n}.jpg")
        Image.fromarray(render(picture, rng)).save(folder / names[-1])
        told.append(describe(picture, rng).answer)
    return names, told


def _mmdu(path: Path, _: str, drawn: list[Drawn]) -> None:
    """Write dialogues of two turns: all pictures are described, then the first alone."""
    found = []
    for number in range(len(drawn)):
        names, told = _pictures(path.parent, number)
        turns = [
            ("user", f"Describe each picture: {' '.join('<ImageHere>' for _ in names)}"),
            ("assistant", " ".join(told)),
            ("user", "Describe the first picture again."),
            ("assistant", told[0]),
        ]
        said = [{"from": who, "value": text} for who, text in turns]
        found.append({"id": number, "image": names, "conversations": said})
    path.write_text(json.dumps(found), encoding="utf-8")


def _sparkles(path: Path, _: str, drawn: list[Drawn]) -> None:
    """Write dialogues of one turn whose pictures stand inside the sentence."""
    found = []
    for number in range(len(drawn)):
        names, told = _pictures(path.parent, number)
        images = [{"image_id": int(Path(name).stem), "caption": text} for name, text in zip(names, told)]
        here = " and ".join(f"IMAGE#{image['image_id']}<Img><ImageHere></Img>" for image in images)
        turns = [
            {"role": "user", "content": f"What do you see in {here}?", "images": images},
            {"role": "assistant", "content": " ".join(told), "images": []},
        ]
        found.append({"evaluation_id": number, "dialogue": turns})
    path.write_text(json.dumps(found), encoding="utf-8")


WRITERS: dict[str, Callable[[Path, str, list[Drawn]], None]] = {
    "longbench": _longbench,
    "ruler-niah": _ruler,
    "squad": _squad,
    "emrqa": _emrqa,
    "newsqa": _newsqa,
    "narrativeqa": _narrativeqa,
    "biographies": _biographies,
    "mmdu": _mmdu,
    "sparkles": _sparkles,
}
"""Writers by data set; each is given the path, the subset of LongBench, and the contents."""
