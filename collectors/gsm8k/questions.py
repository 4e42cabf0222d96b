"""Finds and reads the GSM8K questions."""

import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HOW_TO_GET = (
    "Get test.jsonl and train.jsonl of GSM8K (github.com/openai/grade-school-math, MIT licence), put them in one "
    "folder and name it with collect.gsm8k.path=FOLDER or the environment variable GSM8K_DIR."
)

HUB = "hub:openai/gsm8k"


class Gsm8kError(ValueError):
    """The questions are not there, or a file of them is broken."""


@dataclass(frozen=True)
class Question:
    """One problem with its worked solution, which ends in `#### <number>`."""

    question: str
    answer: str


def find_folder(configured: str | None, checkout: Path) -> Path | None:
    """Folder that holds test.jsonl and train.jsonl: the configured one, $GSM8K_DIR, or data/gsm8k in or
    shared/data/gsm8k beside the checkout. None where there is none.

    Raises Gsm8kError when a configured folder lacks the files: a wrong path must not fall back silently.
    """
    named = configured or os.environ.get("GSM8K_DIR")
    if named:
        folder = Path(named)
        missing = [name for name in ("test.jsonl", "train.jsonl") if not (folder / name).is_file()]
        if missing:
            raise Gsm8kError(f"collect.gsm8k.path={named} holds no {' and no '.join(missing)}. {HOW_TO_GET}")
        return folder
    nearby = (checkout / "data" / "gsm8k", checkout.parent / "shared" / "data" / "gsm8k")
    return next((folder for folder in nearby if (folder / "test.jsonl").is_file()), None)


def read_questions(path: Path) -> list[Question]:
    """All questions of one JSONL file. Raises Gsm8kError naming file and line for anything broken."""
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            question = Question(str(row["question"]), str(row["answer"]))
        except (json.JSONDecodeError, KeyError, TypeError) as problem:
            raise Gsm8kError(
                f"{path}:{number} is not a GSM8K line ({problem!r}): it must be a JSON object with `question` and "
                "`answer`. Restore the file or point collect.gsm8k.path at a whole copy."
            ) from problem
        if "####" not in question.answer:
            raise Gsm8kError(
                f"{path}:{number} has an answer without `#### <number>`, so it cannot be scored. Restore the file."
            )
        questions.append(question)
    if not questions:
        raise Gsm8kError(f"{path} holds no questions. {HOW_TO_GET}")
    return questions


def _from_hub() -> tuple[list[Question], list[Question]]:
    """(test, train) through the `datasets` package, from its cache or the hub itself."""
    import datasets  # type: ignore[import-not-found, unused-ignore]  # optional, heavy

    try:
        loaded = datasets.load_dataset("openai/gsm8k", "main")
    except (OSError, ValueError) as problem:  # unreachable hub, or nothing in the cache when offline
        raise Gsm8kError(f"The hub copy of GSM8K could not be read: {problem}. {HOW_TO_GET}") from problem
    test, train = (
        [Question(row["question"], row["answer"]) for row in loaded[split]] for split in ("test", "train")
    )
    return test, train


def find(configured: str | None, checkout: Path) -> str | None:
    """Where the questions are: a folder, HUB, or None where they are nowhere: the check is then NOT_RUN.

    Raises Gsm8kError when a configured folder lacks them.
    """
    folder = find_folder(configured, checkout)
    if folder is not None:
        return str(folder.resolve())
    return HUB if importlib.util.find_spec("datasets") is not None else None


def load(place: str) -> tuple[list[Question], list[Question]]:
    """(test, train) questions of a place that `find` named. Raises Gsm8kError when they cannot be read."""
    if place == HUB:
        return _from_hub()
    return read_questions(Path(place) / "test.jsonl"), read_questions(Path(place) / "train.jsonl")


def prompts(test: Sequence[Question], train: Sequence[Question], shots: int, limit: int | None) -> list[str]:
    """Few-shot prompts in the field's standard form: worked examples first, then the bare question.

    The examples are the first `shots` of the training set, for every question the same.
    """
    examples = "".join(f"Question: {q.question}\nAnswer: {q.answer}\n\n" for q in train[:shots])
    return [f"{examples}Question: {q.question}\nAnswer:" for q in test[:limit]]
