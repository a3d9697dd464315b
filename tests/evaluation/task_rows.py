"""A few rows for each zero-shot task, with the fields of the public data sets; and what a model is asked about them.

The questions are written from the harness's published prompts, in plain Python, to be held against its own machinery.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


def _choices(*texts):
    return {"text": list(texts), "label": ["A", "B", "C", "D"][: len(texts)]}


ROWS: dict[str, list[dict]] = {
    "piqa": [
        {"goal": "Read a file", "sol1": "open it and call read", "sol2": "close", "label": 0},
        {"goal": "Sort a list", "sol1": "the", "sol2": "call the sort method of the list", "label": 1},
        {"goal": "Stop a loop", "sol1": "break", "sol2": "import a module that has no name at all", "label": 0},
    ],
    "hellaswag": [
        {"ind": 4, "activity_label": "Cooking", "ctx_a": "A man [title] cuts an onion.", "ctx_b": "he", "label": "2",
         "endings": ["is a string.", "sings  a [step] song to the onion.", "cries.", "returns the value of the key."]},
        {"ind": 7, "activity_label": "Modules", "ctx_a": "The module is imported.", "ctx_b": "", "label": "0",
         "endings": ["It is then executed.", "No.", "A very long dog barks at the moon.", "True"]},
    ],
    "arc_easy": [
        {"id": "a", "question": "Which is a number?",
         "choices": _choices("the string", "an integer", "x"), "answerKey": "B"},
        {"id": "b", "question": "What is returned?",
         "choices": _choices("a", "the first item of the list", "None", "fire"), "answerKey": "A"},
    ],
    "arc_challenge": [
        {"id": "c", "question": "What holds keys and values?",
         "choices": _choices("a dictionary", "rain", "wood", "0"), "answerKey": "A"},
        {"id": "d", "question": "What does a function take?",
         "choices": _choices("sun", "a number of arguments", "it"), "answerKey": "C"},
    ],
    "winogrande": [
        {"sentence": "The list is in the set because _ is large.",
         "option1": "the list", "option2": "the set", "answer": "2"},
        {"sentence": "The method calls the function since _ returns a value.",
         "option1": "method", "option2": "function", "answer": "1"},
        {"sentence": "A class has a name but _ has none.", "option1": "an object", "option2": "name", "answer": "1"},
    ],
    "rte": [
        {"sentence1": "The file was closed.", "sentence2": "The file is open.", "label": 1, "idx": 0},
        {"sentence1": "All strings are objects.", "sentence2": "A string is an object.", "label": 0, "idx": 1},
        {"sentence1": "It rained.", "sentence2": "The value is None.", "label": 1, "idx": 2},
    ],
    "openbookqa": [
        {"id": "e", "question_stem": "A module is made of",
         "choices": _choices("a file", "stone and old iron", "s", "sea"), "answerKey": "A"},
        {"id": "f", "question_stem": "When a loop ends",
         "choices": _choices("it", "the next statement is executed", "no"), "answerKey": " B"},
    ],
    "boolq": [
        {"question": "is a list mutable", "passage": "Lists are mutable sequences.", "idx": 0, "label": 1},
        {"question": "can a tuple change", "passage": "Tuples are immutable.", "idx": 1, "label": 0},
    ],
}  # fmt: skip

HELLASWAG_TEXTS = [
    ("Cooking: A man. cuts an onion. He",
     ["is a string.", "sings a song to the onion.", "cries.", "returns the value of the key."]),
    ("Modules: The module is imported. ",
     ["It is then executed.", "No.", "A very long dog barks at the moon.", "True"]),
]  # fmt: skip


@dataclass(frozen=True)
class Question:
    """pairs: (context, continuation) of each choice. lengths: of the choices, in characters. gold: the right one."""

    pairs: list[tuple[str, str]]
    lengths: list[int]
    gold: int


def _ask(context: str, choices: list[str], gold: int) -> Question:
    return Question([(context, " " + choice) for choice in choices], list(map(len, choices)), gold)


def questions(task: str) -> list[Question]:
    """What the rows of a task become."""
    return [_question(task, row, number) for number, row in enumerate(ROWS[task])]


def _question(task: str, row: dict, number: int) -> Question:
    if task == "piqa":
        return _ask(f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], row["label"])
    if task == "hellaswag":
        context, endings = HELLASWAG_TEXTS[number]
        return _ask(context, endings, int(row["label"]))
    if task.startswith("arc"):
        gold = "ABCD".index(row["answerKey"])
        return _ask(f"Question: {row['question']}\nAnswer:", row["choices"]["text"], gold)
    if task == "winogrande":
        before, after = row["sentence"].split("_")
        pairs = [(before + row[option], " " + after.strip()) for option in ("option1", "option2")]
        return Question(pairs, [1, 1], int(row["answer"]) - 1)
    if task == "rte":
        context = f"{row['sentence1']}\nQuestion: {row['sentence2']} True or False?\nAnswer:"
        return _ask(context, ["True", "False"], row["label"])
    if task == "openbookqa":
        return _ask(row["question_stem"], row["choices"]["text"], "ABCD".index(row["answerKey"].strip()))
    assert task == "boolq"
    return _ask(f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:", ["no", "yes"], row["label"])


def write_rows(folder: Path, rows: dict[str, list[dict]] = ROWS) -> Path:
    """The rows as FOLDER/<task>.jsonl."""
    folder.mkdir(exist_ok=True)
    for task, lines in rows.items():
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
