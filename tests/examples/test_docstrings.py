"""Functions and summaries mined from packages: what is left out, and the splits by package."""

from __future__ import annotations

import contextlib
import math
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from examples import docstrings
from examples.docstrings import SUFFIX, Package, Pair
from examples.summaries import chrf, retrieval
from tests.examples.conftest import of_split

BODY = "    total = first_value + second_value\n    return total * total\n"


def never(counts: Counter[str]) -> bool:
    return False


def package(folder: Path, name: str, **modules: str) -> Package:
    (folder / name).mkdir()
    files = []
    for module, text in modules.items():
        file = folder / name / f"{module}.py"
        file.write_text(textwrap.dedent(text), encoding="utf-8")
        files.append((f"{name}==1.0 {name}/{module}.py", file))
    return Package(name, files)


def function(name: str, docstring: str, marker: str = "") -> str:
    return f'def {name}(first_value, second_value):\n    """{docstring}"""\n    label = "{marker}"\n{BODY}\n'


def mine(*packages: Package, max_chars: int = 500) -> list[Pair]:
    return docstrings.mine(packages, max_chars, never)


def test_code_is_parsed_and_never_run(tmp_path: Path) -> None:
    booby_trap = 'raise SystemExit("imported")\n' + function("area", "Compute the square of a sum.")
    (pair,) = mine(package(tmp_path, "trap", module=booby_trap))
    assert pair.source == "trap==1.0 trap/module.py:area"
    assert pair.summary == "Compute the square of a sum."
    assert pair.prompt == f'def area(first_value, second_value):\n    label = ""\n{BODY.rstrip()}\n# Summary:'


def test_functions_without_content_are_left_out(tmp_path: Path) -> None:
    text = '''
        def no_docstring(first_value, second_value):
            return first_value + second_value, "long enough to be a prompt by itself"

        def only_passes(first_value, second_value, third_value, fourth_value, fifth_value):
            """Compute nothing with many arguments."""
            pass

        def abstract(first_value, second_value, third_value, fourth_value, fifth_value):
            """Compute something in a subclass."""
            raise NotImplementedError

        def __init__(self, first_value, second_value, third_value, fourth_value, fifth_value):
            """Remember all the values given."""
            self.first_value, self.second_value = first_value, second_value
    '''
    assert mine(package(tmp_path, "a", m=text)) == []


@pytest.mark.parametrize(
    ("docstring", "name", "summary"),
    [
        ("Parse the header of a file.\n\nMore.", "f", "Parse the header of a file."),
        ("Parse the header\n    of a file", "f", "Parse the header of a file."),
        ("Parse version 1.2 of the file. Then stop.", "f", "Parse version 1.2 of the file."),
        ("Parse the :class:`~email.message.Message` given.", "f", "Parse the `Message` given."),
        ("return ``None`` if it is closed", "f", "Return `None` if it is closed."),
        ("Get the user name.", "get_user_name", None),
        ("Gets user names.", "userName", None),
        ("Too short.", "f", None),
        ("Deprecated alias of the parser.", "f", None),
        ("TODO: write the docs here.", "f", None),
        ("Parse what https://example.org gives.", "f", None),
        ("Parse the naïve header of files.", "f", None),
        (">>> parse(the, header) or None", "f", None),
        (" ".join(["word"] * 21), "f", None),
        ("", "f", None),
    ],
)
def test_a_summary_is_one_plain_sentence_with_more_than_the_name(
    docstring: str, name: str, summary: str | None
) -> None:
    assert docstrings.clean_summary(docstring, name) == summary


def pairs_of(**sizes: int) -> list[Pair]:
    return [
        Pair(name, f"{name}:{i}", f"def {name}_{i}", f"Summary {i} of {name}.")
        for name, size in sizes.items()
        for i in range(size)
    ]


def test_no_package_is_in_two_splits_and_none_dominates_a_held_out_split() -> None:
    pairs = pairs_of(giant=500, **{f"p{i}": 10 for i in range(40)})
    parts = docstrings.split_by_package(pairs, 1, {"test": 80, "validation": 45})
    packages = {split: {pair.package for pair in held} for split, held in parts.items()}
    assert packages["train"].isdisjoint(packages["test"] | packages["validation"])
    assert packages["test"].isdisjoint(packages["validation"])
    assert (len(parts["validation"]), len(parts["test"])) == (45, 80)
    assert len(packages["test"]) == 8
    assert "giant" in packages["train"]
    assert len(parts["train"]) == 500 + 400 - 80 - 50


def test_too_few_packages_for_the_splits_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"data.num_test=80, but .* of 8 to 20 pairs, .* give only 20"):
        docstrings.split_by_package(pairs_of(a=10, b=10, giant=500), 1, {"test": 80, "validation": 4})


@pytest.mark.parametrize(("count", "fits"), [(49, False), (50, True), (125, True), (126, False)])
def test_a_held_out_package_has_a_tenth_to_a_quarter_of_its_split(count: int, fits: bool) -> None:
    """The 480 pairs of the others do not fill a test split of 500."""
    pairs = pairs_of(probe=count, **{f"p{i}": 60 for i in range(8)}, **{f"small{i}": 4 for i in range(10)})
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="give only 480"):
        parts = docstrings.split_by_package(pairs, 1, {"test": 500, "validation": 20})
        assert "probe" in {pair.package for pair in parts["test"]}


def test_train_prompts_are_not_demonstrations_and_held_out_functions_are_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = pairs_of(**{f"p{i}": 5 for i in range(40)})
    monkeypatch.setattr(docstrings, "installed_packages", lambda seed: [])
    monkeypatch.setattr(docstrings, "mine", lambda packages, budget, enough: pairs)
    tables = docstrings.docstrings(1, 20, 20, max_prompt_tokens=50, max_pairs=100)
    prompts = {role: {row["prompt"] for row in of_split(rows, "train")} for role, rows in tables.items()}
    assert (len(prompts["sft"]), len(prompts["prompts"])) == (60, 40)
    assert not prompts["sft"] & prompts["prompts"]
    for split in ("validation", "test"):
        demonstrated, asked = (of_split(rows, split) for rows in tables.values())
        assert [row["prompt"] for row in demonstrated] == [row["prompt"] for row in asked]
    assert all(row["reference"] == f" {row['summary']}" for row in tables["prompts"])


def test_the_standard_library_is_found_with_its_modules_as_packages() -> None:
    found = {package.name: package for package in docstrings.installed_packages(1)}
    assert [shown for shown, _ in found["textwrap"].files] == ["textwrap.py"]
    assert {shown for shown, _ in found["json"].files} >= {"json/decoder.py", "json/encoder.py"}
    assert any(shown.startswith("pydantic==") for shown, _ in found["pydantic"].files)
    assert not {"rlhf_tasks", "flows", "test"} & set(found)
    summaries = {pair.source: pair.summary for pair in mine(found["textwrap"])}
    assert (
        summaries["textwrap.py:dedent"] == "Remove any common leading whitespace from every line in `text`."
    )


# -------------------------------------------------------------------------- The scorers of preset docstrings


SUMMARIES = {"sort_rows": "Give all rows sorted.", "read_file": "Open a byte stream."}
SUMMARIES |= {"send_mail": "Deliver a message to its server.", "draw_line": "Stroke with a color."}
PROMPTS = [f"def {name}(table, path):\n    return table[path]{SUFFIX}" for name in SUMMARIES]
SENTENCES = list(SUMMARIES.values())


def test_a_response_is_scored_by_the_rank_of_its_function_in_its_package() -> None:
    responses = ["Gives it sorted.", "Opens a stream.", "The color.", "A message in color, in color."]
    scores = retrieval(PROMPTS, responses, ["a"] * 4, SENTENCES)
    assert scores[:2] == [1, 1]
    assert scores[2] == pytest.approx(1 / 3), "another function is first, and three share what follows"
    assert scores[3] == 1, "more of it is about the right function than about another"


def test_the_authors_sentence_finds_its_function() -> None:
    assert retrieval(PROMPTS, SENTENCES, ["a"] * 4, SENTENCES) == [1] * 4


def test_no_function_is_found_where_there_is_nothing_to_choose_from() -> None:
    responses = ["Sorted.", "Stream."]
    assert all(math.isnan(x) for x in retrieval(PROMPTS[:2], responses, ["a", "b"], SENTENCES[:2]))
    assert all(math.isnan(x) for x in retrieval(PROMPTS[:2], responses, ["a", "a"], ["1 + 1", "¿?"]))


@pytest.mark.parametrize(
    "response", ["Sort rows of table and path.", "SortRows", "sorted(rows)", "return", "x_sorted", "", "¿?"]
)
def test_names_code_and_an_empty_response_find_nothing(response: str) -> None:
    assert retrieval(PROMPTS, [response, *["x"] * 3], ["a"] * 4, SENTENCES)[0] == pytest.approx(1 / 2.5)


def test_a_score_depends_on_the_prompts_and_not_on_their_order_or_number_of_responses() -> None:
    responses = ["Gives it sorted.", "Opens a canvas.", "Delivers it.", "Strokes a stream."]
    straight = retrieval(PROMPTS, responses, ["a"] * 4, SENTENCES)
    assert retrieval(PROMPTS[::-1], responses[::-1], ["a"] * 4, SENTENCES[::-1])[::-1] == straight
    assert retrieval(PROMPTS * 2, responses * 2, ["a"] * 8, SENTENCES * 2) == straight * 2


def test_fifty_functions_are_searched_and_each_in_as_many_searches() -> None:
    """119 responses are about the one of 120 functions that has another sentence."""
    prompts = [f"def f{i}():\n    return {i}{SUFFIX}" for i in range(120)]
    scores = retrieval(prompts, ["About omega."] * 120, ["a"] * 120, ["The alpha."] * 119 + ["The omega."])
    assert scores[-1] == 1
    below, without = 1 / (2 + 48 / 2), 1 / (1 + 49 / 2)
    assert sorted(scores[:-1]) == pytest.approx([below] * 49 + [without] * 70)


def test_chrf_is_that_of_its_definition() -> None:
    """Of "ab" against "abc", precisions of one and two characters are 1 and 1, recalls 2/3 and 1/2.

    Of "abcd" against "abcf" both are 3/4, 2/3, 1/2 and 0, of one to four characters.
    """
    found = chrf(["p"] * 4, ["Sort the rows.", "xyz", "ab", "abcd"], ["Sort the rows.", "abc", "abc", "abcf"])
    recall = (2 / 3 + 1 / 2) / 2
    assert found == pytest.approx(
        [100, 0, 100 * 2 * recall / (1 + recall), 100 * (3 / 4 + 2 / 3 + 1 / 2) / 4]
    )
