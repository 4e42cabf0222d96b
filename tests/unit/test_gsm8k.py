"""GSM8K prompts and scoring against the real data, where it lies beside the checkout."""

import json
from decimal import Decimal
from pathlib import Path

import pytest

from collectors.gsm8k.questions import Gsm8kError, Question, find, find_folder, load, prompts, read_questions
from collectors.gsm8k.scoring import marked_answer, parse_number, score

CHECKOUT = Path(__file__).parents[2]
DATA = find_folder(None, CHECKOUT)
needs_data = pytest.mark.skipif(DATA is None, reason="GSM8K is not on this machine (set GSM8K_DIR)")


@needs_data
def test_scoring_agrees_with_the_labels_of_every_parsable_real_solution() -> None:
    assert DATA is not None
    path = DATA / "example_model_solutions.jsonl"
    if not path.is_file():
        pytest.skip("the labelled model solutions are not part of this copy of GSM8K")
    agreed, disagreed, unparsed = 0, [], 0
    for line in path.read_text().splitlines():
        row = json.loads(line)
        for model in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
            solution, label = row[model]["solution"], row[model]["is_correct"]
            result = score(solution, row["ground_truth"])
            if not result.parsed:
                unparsed += 1
                assert not label, "an unfinished solution was labelled correct"
            elif result.strict == label:
                agreed += 1
            else:
                disagreed.append((model, solution[-80:], row["ground_truth"][-30:]))
    assert not disagreed
    assert (agreed, unparsed) == (5265, 11)  # eleven solutions were cut off before their answer


@needs_data
def test_every_reference_solution_scores_itself() -> None:
    assert DATA is not None
    test = read_questions(DATA / "test.jsonl")
    assert len(test) == 1319
    assert all(score(q.answer, q.answer) == score(q.answer + "\n\nQuestion: 1 + 1?", q.answer) for q in test)
    assert all(score(q.answer, q.answer).strict and score(q.answer, q.answer).flexible for q in test)


@needs_data
def test_five_shot_prompt_has_five_solved_examples_and_an_open_question() -> None:
    place = find(None, CHECKOUT)
    assert place is not None
    test, train = load(place)
    built = prompts(test, train, shots=5, limit=3)
    assert len(built) == 3
    assert built[0].count("Question: ") == 6
    assert built[0].count("####") == 5
    assert built[0].endswith(f"Question: {test[0].question}\nAnswer:")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("$1,234.50.", "1234.50"), ("it is -3 apples", "-3"), (".5", "0.5"), ("1 then 2", "2"), ("18.", "18")],
)
def test_parse_number(text: str, expected: str) -> None:
    assert parse_number(text) == Decimal(expected)


def test_wrong_missing_and_late_answers_do_not_score() -> None:
    reference = "2 + 2 = 4\n#### 4"
    assert not score("so #### 5", reference).strict
    assert score("so 4", reference) == score("the answer is 4.", reference)
    assert not score("so 4", reference).parsed
    assert score("so 4", reference).flexible
    assert not score("#### 5\n\nQuestion: and 2 + 2?\nAnswer: #### 4", reference).strict
    assert marked_answer("no mark here, 4") is None
    with pytest.raises(ValueError, match="no marked answer"):
        score("4", "four")


def test_broken_lines_name_file_line_and_remedy(tmp_path: Path) -> None:
    good = json.dumps({"question": "1+1?", "answer": "#### 2"})
    for bad in ('{"question": "cut', '{"question": "no answer"}', '{"question": "x", "answer": "2"}', "[1]"):
        path = tmp_path / "test.jsonl"
        path.write_text(f"{good}\n{bad}\n")
        with pytest.raises(Gsm8kError, match=r"test\.jsonl:2 .*Restore the file"):
            read_questions(path)


def test_a_configured_folder_without_the_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Gsm8kError, match=r"collect\.gsm8k\.path=.* holds no test\.jsonl and no train\.jsonl"):
        find_folder(str(tmp_path), CHECKOUT)


def test_no_questions_anywhere_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GSM8K_DIR", raising=False)
    assert find_folder(None, tmp_path / "checkout") is None


def test_prompts_are_the_same_examples_for_all(tmp_path: Path) -> None:
    train = [Question(f"q{i}", f"a #### {i}") for i in range(3)]
    one, two = prompts([Question("x", "#### 1"), Question("y", "#### 2")], train, shots=2, limit=None)
    assert one.split("Question: x")[0] == two.split("Question: y")[0]
