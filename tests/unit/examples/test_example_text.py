"""Unit tests of the example's first stage: real docstrings, no repetition, no leak over the split."""

import importlib
import json
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

STAGES = Path(__file__).parents[3] / "dags/examples/text_classifier"


@pytest.fixture
def stage(monkeypatch):
    """Import a script of the example's folder; nothing of it remains."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(STAGES))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(STAGES) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_texts_that_differ_in_layout_numbers_and_case_are_equal(stage):
    """Only the words count, so that a copy with another indent is found."""
    assert stage("text").normalise("Return 2 *Values*,\n    never 3.") == "return values never"


def test_a_row_counts_words_and_pairs_and_has_length_one(stage):
    """Three words make three words and two pairs; one that is ignored makes none."""
    hasher = stage("text").Hasher(1 << 16, frozenset({"numpy"}))

    buckets, weights = hasher.row("open the numpy file")

    assert len(buckets) == 5
    assert list(buckets) == sorted(buckets)
    assert float(weights @ weights) == pytest.approx(1, abs=1e-6)


def test_an_empty_text_has_no_features(stage):
    """It causes no NaN of 0 / 0."""
    rows = stage("text").Hasher(16).rows(["", "word"])

    assert rows.starts.tolist() == [0, 0, 1]
    assert rows.values.tolist() == [1.0]


def test_refuses_a_number_of_buckets_that_a_mask_cannot_cover(stage):
    """1000 is not a power of two."""
    with pytest.raises(ValueError, match="power of two, got 1000"):
        stage("text").Hasher(1000)


BASE = "the quick brown fox jumps over the lazy dog while seven green birds watch from an old fence today"


def test_a_text_with_one_word_changed_joins_the_group(stage):
    """Near copies share a group, an unrelated text does not."""
    other = "read the rows of a table from the open connection and return them as a list of plain tuples"

    groups = stage("text").near_groups([BASE, other, BASE.replace("today", "again")])

    assert groups.tolist() == [0, 1, 0]


def test_near_copies_are_never_on_both_sides(stage):
    """Two hundred texts, each with a near copy: both of a pair are in one split."""
    rng = np.random.default_rng(5)
    words = [f"w{''.join(chr(97 + digit) for digit in rng.integers(0, 26, 5))}" for _ in range(400)]
    texts = [" ".join(rng.choice(words, 25)) for _ in range(200)]
    copies = [f"{text} {words[0]}" for text in texts]

    places = stage("prepare").split(texts + copies, heldout=0.3, validation=0.1)

    assert places[:200].tolist() == places[200:].tolist()
    assert 0.15 < (places == 2).mean() < 0.45


def test_a_place_does_not_hang_on_what_else_is_there(stage):
    """The same texts among other texts are split the same way."""
    rng = np.random.default_rng(6)
    texts = [" ".join(f"w{number}x" for number in rng.integers(0, 10_000, 20)) for _ in range(60)]
    texts = [text.translate(str.maketrans("0123456789", "abcdefghij")) for text in texts]
    split = stage("prepare").split

    alone = split(texts[:30], heldout=0.3, validation=0.1)
    together = split(texts[30:] + texts[:30], heldout=0.3, validation=0.1)

    assert alone.tolist() == together[30:].tolist()


def _documents(stage, label, texts):
    document = stage("docstrings").Document
    return [document(label, f"{label}.py:{index}", text) for index, text in enumerate(texts)]


def test_a_text_is_kept_once_and_one_of_two_owners_not_at_all(stage):
    """Of six documents: one is a copy, one is in both distributions, one is too short."""
    first, second = ("one two three four five six seven " + word for word in ("red", "blue"))
    third = "a text that both of them have taken from a third one"
    sources = {
        "left": _documents(stage, "left", [first, first.upper(), third, "too short"]),
        "right": _documents(stage, "right", [second, third]),
    }

    corpus = stage("prepare").collect(sources, stage("prepare").Limits(per_label=10, least_per_label=1))

    assert [(document.label, document.text) for document in corpus.documents] == [
        ("left", first),
        ("right", second),
    ]
    assert (corpus.equal, corpus.ambiguous) == (1, 2)


def test_labels_are_bounded_from_both_sides(stage):
    """At most two of each, and a distribution with one is left out."""
    texts = [f"{BASE} {word}" for word in ("one", "two", "three")]
    sources = {
        "many": _documents(stage, "many", texts),
        "few": _documents(stage, "few", ["another " + texts[0]]),
    }

    corpus = stage("prepare").collect(sources, stage("prepare").Limits(per_label=2, least_per_label=2))

    assert corpus.labels == ["many"]
    assert len(corpus.documents) == 2


def test_reads_the_docstrings_of_an_installed_distribution_without_importing_it(stage):
    """Module, class and function docstrings of a file on disk, in the order of their lines."""
    found = list(stage("docstrings").documents("pluggy", metadata.distribution("pluggy")))

    sources = {document.source.split(":")[0] for document in found}
    assert "pluggy/_manager.py" in sources
    assert any(document.text.startswith("Core class which manages registration") for document in found)
    assert {document.label for document in found} == {"pluggy"}


def test_enters_methods_and_branches_but_no_expressions(stage, tmp_path):
    """What a reader of the documentation would see."""
    file = tmp_path / "some.py"
    file.write_text('"""Module."""\nif True:\n    class A:\n        """Class."""\n        def f(self):\n'
                    '            """Method."""\n            return lambda: "no docstring"\n')  # fmt: skip

    found = list(stage("docstrings")._docstrings_of(file))

    assert found == [(1, "Module."), (3, "Class."), (5, "Method.")]


def test_a_file_for_another_python_is_passed_over(stage, tmp_path):
    """Templates and old syntax do not stop the corpus."""
    file = tmp_path / "old.py"
    file.write_text('"""Old."""\nprint "hello"\n')

    assert list(stage("docstrings")._docstrings_of(file)) == []


def test_writes_heldout_as_text_and_the_rest_as_rows(stage, tmp_path):
    """Every document is in exactly one place, and the names of the labels are not features."""
    prepare = stage("prepare")
    texts = [f"{BASE} {chr(97 + index)}{chr(97 + index)}" for index in range(3)]
    corpus = prepare.Corpus(tuple(_documents(stage, "numpy", texts)), tuple(texts), 0, 0)
    names = stage("docstrings").names_of(["numpy"])

    facts = prepare.write(corpus, np.array([0, 1, 2]), stage("text").Hasher(64, names), tmp_path)

    assert facts["documents"] == {"train": 1, "validation": 1, "heldout": 1}
    assert facts["ignored_words"] == ["numpy"]
    line = json.loads((tmp_path / "heldout.jsonl").read_text())
    assert line == {"id": "numpy.py:2", "label": "numpy", "text": texts[2]}
    rows, labels = stage("model").load_rows(tmp_path / "train.npz")
    assert (len(rows), labels.tolist(), rows.features) == (1, [0], 64)


def test_says_how_many_are_missing_when_there_is_too_little_text(stage, monkeypatch, capsys, tmp_path):
    """An environment with one small distribution causes an error with the number."""
    prepare = stage("prepare")
    monkeypatch.setattr(prepare, "installed", lambda: {"pluggy": metadata.distribution("pluggy")})

    code = prepare.main(["--output", str(tmp_path)])

    assert code == 1
    assert "at least 10000 documents of 2 distributions" in capsys.readouterr().err


def test_says_how_many_files_were_read_of_how_many(stage, capsys):
    """A line every five seconds; files that a full label leaves unread count as read (F3)."""
    prepare, now = stage("prepare"), [0.0]
    reading = prepare.Reading(10, lambda: now[0])

    def source(files):
        for _ in range(files):
            now[0] += 3.0
            reading.one()
            yield None

    next(iter(reading.follow(source(6), 6)))  # one of six files is read
    list(reading.follow(source(4), 4))

    assert capsys.readouterr().out.splitlines() == ["read 7 of 10 files", "read 9 of 10 files"]
