"""The wording check tests/wording.py finds each kind of fault in sample texts.

`make lint` runs the check itself over the repository.
"""

import pytest

from tests import wording


def openers(source: str) -> list[str]:
    texts = [*wording.docstrings(source), *wording.hash_comments(source)]
    return [word for text in texts if (word := wording.bad_opener(text))]


@pytest.mark.parametrize("word", wording.OPENERS)
def test_a_banned_opener_is_found(word):
    assert openers(f'"""{word} a file."""\n') == [word]
    assert openers(f"x = 1  # {word.lower()} a file\n") == [word.lower()]
    assert openers(f"# A comment.\n# {word} it is.\n") == [word]
    assert openers(f'class A:\n    """A class."""\n\n    x = 1\n    """{word} of x."""\n') == [word]


def test_a_good_opener_is_not_found():
    assert (
        openers('"""Return a file.\n\nWhat follows is free.\n"""\n# Whole words only: Ofcourse.\nx = 1  # thereby\n')
        == []
    )


def test_comments_of_cuda_are_read_outside_of_strings():
    source = 'int x;  // of a block\nconst char* s = "// of a string";\n/* What\n it is */\n// A run\n// Of lines\n'
    assert [wording.bad_opener(text) for text in wording.slash_comments(source)] == ["of", "What", "Of"]


def test_a_private_word_is_found_with_its_term():
    assert list(wording.private_words("The copy engine and each multiprocessor.")) == [
        ("copy engine", "TMA"),
        ("multiprocessor", "SM"),
    ]
    assert not list(wording.private_words("The SM's TMA unit."))


def test_sentences_of_a_page_leave_out_code_tables_and_headings():
    text = "# A heading\n\nOne two three. Four `f(x)`\nfive [six](a.md).\n\n- An item. Another one.\n"
    page = f"{text}\n| a table. | x |\n\n```\nCode here. No.\n```\n"
    assert [len(sentence.split()) for sentence in wording.sentences(page)] == [3, 4, 2, 2]
