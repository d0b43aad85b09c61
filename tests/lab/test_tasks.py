"""Every task reads the example of its format; files that are not in the format are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from PIL import Image
from server_helpers import chat_template

from mpic_lab.eval.resolve import counter_of, fitter_of, splitter_of
from mpic_lab.eval.tasks import GRIDS, TASKS, Options, TaskError, find
from mpic_lab.eval.tasks.longbench import subsets

PASSAGES = "Passage 1:\nAnna\nAnna lives in Rome.\n\nPassage 2:\nBob\nBob lives in Oslo."
LONGBENCH = {"input": "Where does Bob live?", "context": PASSAGES, "answers": ["Oslo"]}
LONGBENCH |= {"dataset": "hotpotqa", "_id": "a1"}
SAMSUM = {
    "input": "Dialogue: C: hi\nSummary: ",
    "context": "Dialogue: A: hi\nSummary: A says hi.\nDialogue: B: bye\nSummary: B leaves.\n",
    "answers": ["C says hi."],
    "dataset": "samsum",
}
PARAGRAPHS = [
    {
        "context": f"City {name} has a river called {name}o.",
        "qas": [
            {"id": f"{name}1", "question": f"River of {name}?", "answers": [{"text": f"{name}o"}]},
            {"id": f"{name}2", "question": "Why?", "answers": [], "is_impossible": True},
        ],
    }
    for name in ("Aa", "Bb", "Cc")
]
SQUAD = {"data": [{"title": "Rome", "paragraphs": PARAGRAPHS}]}
STORY = {"storyId": "./stories/1", "text": "The mayor of Delft resigned.", "type": "dev"}
STORY["questions"] = [
    {"q": "Who resigned?", "consensus": {"s": 0, "e": 18}, "answers": []},
    {"q": "Why?", "consensus": {"noAnswer": True}, "answers": []},
]
NEWSQA = {"version": "1", "data": [STORY]}
HAY = "hay hay\nThe magic number of fox is 512.\nhay\nWhat is the magic number of fox?"
RULER = {"index": 7, "input": HAY, "outputs": ["512"], "length": 30}
TURNS = ["Compare <ImageHere> with <ImageHere>.", "One is red.", "Why?", "Paint."]
TOLD = [{"from": who, "value": text} for who, text in zip(("user", "assistant") * 2, TURNS)]
MMDU = {"0": {"id": 3, "image": ["a.png", "b.png"], "conversations": TOLD}}
_HERE = "<Img><ImageHere></Img>"
ASKED = {"role": "user", "content": f"Link IMAGE#1{_HERE} to IMAGE#2{_HERE}?"}
ASKED["images"] = [{"image_id": 1, "caption": "a cat"}, {"image_id": 2, "caption": "a dog"}]
ANSWERED = {"role": "assistant", "content": "Both are red.", "images": []}
SPARKLES = [{"evaluation_id": 5, "dialogue": [ASKED, ANSWERED]}]


@pytest.fixture
def folder(tmp_path):
    for name in ("a.png", "b.png", "1.jpg", "2.jpg"):
        Image.new("RGB", (8, 8), "red").save(tmp_path / name)
    return tmp_path


def load(folder, name, content, **options):
    path = folder / ("data.jsonl" if name.startswith(("longbench", "ruler")) else "data.json")
    path.write_text(json.dumps(content) + "\n")
    return list(find(name).load(Options(path=path, images=folder, **options)))


def kinds(sample):
    return [
        [p["type"] for p in m["content"]] if isinstance(m["content"], list) else m["content"]
        for m in sample.messages
    ]


def test_longbench_passages_become_documents_and_nothing_of_the_context_is_lost(folder):
    (sample,) = load(folder, "longbench-qa", LONGBENCH)
    assert kinds(sample) == [["text", "document", "document", "text"]]
    assert "".join(p["text"] for p in sample.messages[0]["content"][1:3]) == PASSAGES
    assert (sample.id, sample.expected) == ("a1", ("Oslo",))
    assert "Where does Bob live?" in sample.messages[0]["content"][-1]["text"]


def text_of(sample):
    return "".join(part["text"] for part in sample.messages[0]["content"])


@pytest.mark.parametrize("name", subsets())
def test_longbench_asks_in_its_own_words_and_gives_its_own_room(folder, name):
    subset = subsets()[name]
    entry = LONGBENCH | {"dataset": name}
    (sample,) = load(folder, subset.task, entry)
    assert load(folder, f"longbench-{name}", entry)[0] == sample
    assert text_of(sample) == subset.prompt.replace("{context}", PASSAGES).replace(
        "{input}", LONGBENCH["input"]
    )
    assert sample.max_tokens == subset.tokens in (32, 64, 128, 512)


def test_a_subset_that_a_task_does_not_read_is_named(folder):
    with pytest.raises(TaskError, match="'samsum'; it reads hotpotqa"):
        load(folder, "longbench-hotpotqa", SAMSUM)


def test_a_context_that_is_too_long_loses_its_middle(folder):
    template = chat_template()  # one token per byte
    context = "".join(f"{number:04}" for number in range(500))
    entry = LONGBENCH | {"context": context}
    before, after = subsets()["hotpotqa"].prompt.replace("{input}", LONGBENCH["input"]).split("{context}")
    asked = len(before) + len(after)
    (sample,) = load(folder, "longbench-qa", entry, fit=fitter_of(template, 9999, asked + 400))
    whole, half = before + context + after, (asked + 400) // 2
    assert text_of(sample) == whole[:half] + whole[len(whole) - half :]
    (sample,) = load(folder, "longbench-qa", entry, fit=fitter_of(template, 9999, None))
    assert sample.messages[0]["content"][1]["text"] == context
    (sample,) = load(folder, "longbench-qa", entry, fit=fitter_of(template, 2000, None))
    assert len(text_of(sample)) == 2000 - 32 - 500
    (sample,) = load(folder, "longbench-qa", entry, fit=fitter_of(template, 9999, len(after) + 40))
    assert len(text_of(sample)) == max(asked, len(after) + 40)


def test_samsum_is_cut_as_asked_and_scored_by_its_first_line(folder):
    def pieces(**options):
        (sample,) = load(folder, "longbench-samsum", SAMSUM, **options)
        return [part["text"] for part in sample.messages[0]["content"] if part["type"] == "document"]

    assert len(pieces()) == 2 and pieces(split="none") == ["".join(pieces())] == [SAMSUM["context"]]
    fixed = pieces(split="fixed", tokens=20, splitter=splitter_of(chat_template()))
    assert "".join(fixed) == SAMSUM["context"] and {len(piece) for piece in fixed[:-1]} == {20}
    (sample,) = load(folder, "longbench-samsum", SAMSUM)
    assert sample.scored("\nC says hi.\nDialogue: D: more") == "C says hi."
    (other,) = load(folder, "longbench-qa", LONGBENCH)
    assert other.scored("Oslo\nBob") == "Oslo\nBob"


def test_needles_lie_at_their_depth_in_haystacks_of_their_length():
    count = counter_of(chat_template())
    options = Options(count=count, lengths=(600, 1200), depths=(0, 50, 100), questions=2, split="none")
    samples = list(find("niah").load(options))
    assert len({sample.id for sample in samples}) == len(samples) == 12
    for sample in samples:
        length, depth = map(int, sample.id.partition("#")[0].split("@"))
        before, haystack, question = (part["text"] for part in sample.messages[0]["content"])
        lines = haystack.splitlines()
        (place,) = (n for n, line in enumerate(lines) if sample.expected[0] in line)
        assert length - 100 < count(haystack) <= length
        assert place == round((len(lines) - 1) * depth / 100)
        key = lines[place].split(" for ")[1].split(" is")[0]
        assert key in question and sample.expected[0] not in before + question
    assert samples == list(find("niah").load(options))
    with pytest.raises(TaskError, match="no room"):
        list(find("niah").load(Options(count=count, lengths=(50,))))


def test_a_code_lies_at_its_depth_in_documents_of_the_generated_world():
    count, split = counter_of(chat_template()), splitter_of(chat_template())
    options = Options(count=count, splitter=split, lengths=(600, 1200), depths=(0, 50, 100), tokens=300)
    samples = list(find("world-niah").load(replace(options, questions=2)))
    assert len({sample.id for sample in samples}) == len(samples) == 12
    for sample in samples:
        length, depth = map(int, sample.id.partition("#")[0].split("@"))
        *documents, question = (part["text"] for part in sample.messages[0]["content"])
        text, (code,) = "".join(documents), sample.expected
        sentences = [one.strip() for one in text.split(".") if one.strip()]
        (place,) = (n for n, one in enumerate(sentences) if one.endswith(f" is {code}"))
        assert length - 100 < count(text) <= length and all(count(one) <= 300 for one in documents)
        assert place == round((len(sentences) - 1) * depth / 100)
        assert sentences[place].removeprefix("The code of the ").partition(" is")[0] in question
    assert samples == list(find("world-niah").load(replace(options, questions=2)))
    with pytest.raises(TaskError, match="no room"):
        list(find("world-niah").load(replace(options, lengths=(10,))))


def test_emrqa_is_read_as_squad_is(folder):
    assert load(folder, "emrqa", SQUAD, chunks=2) == load(folder, "squad", SQUAD, chunks=2)


def test_samsum_examples_become_documents(folder):
    (sample,) = load(folder, "longbench-samsum", SAMSUM)
    assert kinds(sample) == [["text", "document", "document", "text"]]
    assert sample.messages[0]["content"][-1]["text"].endswith(SAMSUM["input"])


def test_emrqa_as_it_is_published_has_lines_and_wordings_in_lists(folder):
    qa = {
        "id": [["1", "2"]],
        "question": ["Any pain?", "Is there pain?"],
        "answers": [{"text": "chest pain"}, {"text": ""}],
    }
    note = {"note_id": "7", "context": ["Record date: 2067\n", "Has chest pain.\n"], "qas": [qa, qa]}
    samples = load(folder, "emrqa", {"data": [{"title": "medication", "paragraphs": [note]}]}, chunks=1)
    assert sorted(sample.id for sample in samples) == ["0", "1"]
    for sample in samples:
        said = json.dumps(sample.messages)
        assert sample.expected == ("chest pain",) and "Any pain?" in said and "Is there pain?" not in said
        assert "Record date: 2067\\nHas chest pain." in said


def test_rulers_newer_lines_have_context_and_question_apart(folder):
    entry = {"context": "hay\nThe number of fox is 512.\nhay", "question": "What is the number of fox?"}
    entry |= {"answer_prefix": " The number is", "answer": ["512"]}
    (new,) = load(folder, "ruler-niah", entry, split="none")
    older = {
        "input": f"{entry['context']}\n{entry['question']}",
        "outputs": ["512"],
        "answer_prefix": " The number is",
    }
    assert [new] == load(folder, "ruler-niah", older, split="none") and new.expected == ("512",)
    assert load(folder, "ruler-niah", entry | {"answer": "512"}, split="none") == [new]


def test_squad_asks_what_can_be_answered_over_its_own_text_and_others(folder):
    samples = load(folder, "squad", SQUAD, chunks=2)
    assert {s.id for s in samples} == {"Aa1", "Bb1", "Cc1"}
    for sample in samples:
        documents = [p["text"] for p in sample.messages[0]["content"] if p["type"] == "document"]
        assert len(documents) == 2 and any(sample.expected[0] in text for text in documents)
    assert samples == load(folder, "squad", SQUAD, chunks=2)


def test_more_questions_leave_the_others_as_they_were(folder):
    all_nine = load(folder, "squad", SQUAD, chunks=2, questions=9)
    for n in (1, 2, 3):
        assert load(folder, "squad", SQUAD, chunks=2, questions=n) == all_nine[:n]


def test_newsqa_answers_are_the_agreed_spans(folder):
    (sample,) = load(folder, "newsqa", NEWSQA)
    assert sample.expected == ("The mayor of Delft",)


def test_narrativeqa_reads_its_folder(tmp_path):
    (tmp_path / "third_party" / "wikipedia").mkdir(parents=True)
    (tmp_path / "third_party" / "wikipedia" / "summaries.csv").write_text(
        'document_id,set,summary,summary_tokenized\nd1,test,"A knight, lost.",x\n'
    )
    (tmp_path / "qaps.csv").write_text(
        "document_id,set,question,answer1,answer2,question_tokenized,answer1_tokenized,answer2_tokenized\n"
        "d1,test,Who is lost?,a knight,the knight,x,x,x\n"
    )
    (sample,) = find("narrativeqa").load(Options(path=tmp_path))
    assert sample.expected == ("a knight", "the knight")


def test_a_biography_is_asked_for_one_of_its_facts(tmp_path):
    facts = ("birth_date", "birth_place", "current_location", "university", "major", "company")
    told, asked = [], []
    for name in ("Ana", "Bob", "Zoe"):
        told.append({fact: [f"{name}, {fact}: {name}{fact}."] for fact in facts})
        asked.append(
            {fact: [f"{name}, {fact}: "] for fact in facts} | {"labels": {f: f"{name}{f}" for f in facts}}
        )
    told[1]["major"] = []
    for split, rows in (("train", told), ("test", asked)):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = list(find("biographies").load(Options(path=tmp_path, chunks=2)))
    assert {sample.id for sample in samples} == {"0", "2"}  # Bob lacks a fact
    for sample in samples:
        *texts, question = (part["text"] for part in sample.messages[0]["content"])
        name = {"0": "Ana", "2": "Zoe"}[sample.id]
        assert len(texts) == 2 and all(text.count(".") == 6 for text in texts)
        assert f"{name}, " in question and sample.expected[0] not in question
        assert any(sample.expected[0] in text for text in texts) and sample.expected[0].startswith(name)
    assert samples == list(find("biographies").load(Options(path=tmp_path, chunks=2)))
    (tmp_path / "test.jsonl").unlink()
    with pytest.raises(TaskError, match=r"test\.jsonl"):
        list(find("biographies").load(Options(path=tmp_path)))


def test_rulers_last_line_asks_and_the_rest_is_the_haystack(folder):
    (sample,) = load(folder, "ruler-niah", RULER, split="none")
    haystack, question = sample.messages[0]["content"]
    assert "512" in haystack["text"] and question["text"] == "What is the magic number of fox?"


def test_mmdu_turns_carry_the_reference_answers_before_them(folder):
    first, second = load(folder, "mmdu", MMDU)
    assert kinds(first) == [["text", "image", "text", "image", "text"]]
    assert [m["role"] for m in second.messages] == ["user", "assistant", "user"]
    assert second.expected == ("Paint.",)


def test_dialogues_are_grouped_by_their_images_and_their_answers_have_room(folder):
    more = MMDU["0"]["conversations"] + [
        {"from": "user", "value": "And <ImageHere>?"},
        {"from": "assistant", "value": "Blue."},
    ]
    samples = load(
        folder, "mmdu", {"0": MMDU["0"] | {"image": ["a.png", "b.png", "a.png"], "conversations": more}}
    )
    assert [sample.chunks for sample in samples] == [2, 2, 3]
    assert load(folder, "sparkles", SPARKLES)[0].chunks == 2
    assert all(sample.max_tokens > 500 for sample in samples)


def test_sparkles_images_stand_inside_the_sentence(folder):
    (sample,) = load(folder, "sparkles", SPARKLES)
    assert kinds(sample) == [["text", "image", "text", "image", "text"]]
    assert sample.messages[0]["content"][0]["text"] == "Link image 1"
    assert sample.captions == ("1: a cat", "2: a dog")


@pytest.mark.parametrize("name", [n for n in TASKS if n.startswith("world-") and n not in GRIDS])
def test_world_tasks_are_the_same_every_time_and_end_with_a_question(name):
    first, again = (list(find(name).load(Options(chunks=2, questions=2, seed=3))) for _ in range(2))
    assert first == again
    assert first[0].messages[-1]["role"] == "user" and first[0].expected[0]


@pytest.mark.parametrize(
    "name, content",
    [
        ("longbench-qa", {"input": "?"}),
        ("squad", {"data": [{}]}),
        ("ruler-niah", {"input": "one line", "outputs": []}),
    ],
)
def test_files_in_another_format_are_refused_by_what_is_missing(folder, name, content):
    with pytest.raises(TaskError, match=r"data\.json"):
        load(folder, name, content)
    with pytest.raises(TaskError, match="local file"):
        list(find(name).load(Options(path=folder / "nothing")))


def test_missing_images_and_unknown_tasks_are_named(folder):
    (folder / "a.png").unlink()
    with pytest.raises(TaskError, match=r"a\.png"):
        load(folder, "mmdu", MMDU)
    with pytest.raises(TaskError, match="world-two-hop"):
        find("nothing")


def test_a_long_text_is_cut_by_the_splitter_and_nothing_of_it_is_lost():
    def texts(**options):
        (sample,) = find("world-long-text").load(Options(chunks=3, questions=1, **options))
        return [part["text"] for part in sample.messages[0]["content"]]

    whole, question = texts(split="none")
    pieces = texts(split="fixed", splitter=lambda text, *_: [text[:9], text[9:]])
    assert whole.count("About ") == 3 and whole.count("\n\n") == 2
    assert pieces == [whole[:9], whole[9:], question]
