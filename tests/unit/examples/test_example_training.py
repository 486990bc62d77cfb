"""Unit tests of the example's training and scoring: gradient, each sample once, complete checkpoints."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

STAGES = Path(__file__).parents[3] / "dags/examples/text_classifier"
FEATURES, HIDDEN, LABELS = 128, 5, 3


@pytest.fixture
def stage(monkeypatch):
    """Import a script of the example's folder; nothing of it remains."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(STAGES))
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(STAGES) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def corpus(stage):
    """Fifty documents whose label is one of three words, and ten to validate."""

    def made(count, seed):
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, LABELS, count)
        words = [" ".join(rng.choice(["ma", "mi", "mo", "mu"], 6)) for _ in range(count)]
        texts = [
            f"{text} {['red', 'green', 'blue'][label]}" for text, label in zip(words, labels, strict=True)
        ]
        return stage("text").Hasher(FEATURES).rows(texts), labels

    return made(50, 1), made(10, 2)


@pytest.fixture
def training(stage, corpus):
    """Make a small training of the corpus, always the same."""

    def made(epochs=4):
        model, parallel = stage("model"), stage("parallel")
        steps = epochs * 4
        recipe = parallel.Recipe(
            batch=16, rate=0.05, decay=0.1, dropout=0.2, total_steps=steps, seed=3
        )  # 4 steps an epoch: 16 + 16 + 16 + 2
        team = parallel.Team(model.Shape(FEATURES, HIDDEN, LABELS), recipe, *corpus)
        return stage("train").Training(team, epochs=epochs)

    return made


def _run(training, steps=10**6):
    """Train to the end, or for some steps; returns the indexes used."""
    used = []
    while steps and not training.is_done:
        begin = training.place.position
        size, _ = training.step()
        used.extend(training.team.order[begin : begin + size].tolist())
        if training.place.position == training.count:
            training.end_epoch()
        steps -= 1
    return used


def test_the_gradient_is_that_of_the_loss(stage, corpus):
    """Against central differences, in the embedding and in the head."""
    model = stage("model")
    shape, (rows, labels) = model.Shape(FEATURES, HIDDEN, LABELS), corpus[0]
    vector = shape.initial(1)
    found = model.gradient(shape, vector, rows, labels)
    dense = np.zeros((FEATURES, HIDDEN))
    dense[found.columns] = found.embedding
    whole = np.concatenate([dense.ravel(), found.head])

    def loss(at):
        return model.gradient(shape, at, rows, labels).loss

    for place in (
        int(found.columns[0]) * HIDDEN,
        shape.embedding_size,
        shape.size - LABELS - 1,
        shape.size - 1,
    ):
        nudge = np.zeros(shape.size)
        nudge[place] = 1e-6
        slope = (loss(vector + nudge) - loss(vector - nudge)) / 2e-6
        assert whole[place] == pytest.approx(slope, abs=1e-5)


def test_taking_rows_keeps_their_entries(stage, corpus):
    """Two rows in another order, one of them twice."""
    rows = corpus[0][0]

    taken = rows.take(np.array([7, 0, 7]))

    columns, dense = rows.dense()
    again, picked = taken.dense()
    full = np.zeros((len(rows), FEATURES))
    full[:, columns] = dense
    expected = full[[7, 0, 7]]
    assert np.array_equal(picked, expected[:, again])


def test_adam_moves_only_the_rows_that_have_a_gradient(stage):
    """The first step is the learning rate in the direction against the gradient."""
    model = stage("model")
    shape = model.Shape(4, 2, 2)
    vector = np.ones(shape.size)
    adam = model.Adam(np.zeros(shape.size), np.zeros(shape.size), decay=0.0)

    adam.update_rows(shape, vector, np.array([2]), np.array([[3.0, -3.0]]), 0.1, 1)

    assert np.allclose(shape.embedding(vector)[2], [0.9, 1.1])
    assert (np.delete(shape.embedding(vector), 2, axis=0) == 1).all()


def test_learns_what_decides_the_label(training):
    """The text contains the colour, so every document of the validation set is right."""
    done = training(epochs=40)

    _run(done)

    assert done.place.history[-1]["accuracy"] == 1
    assert done.place.history[-1]["loss"] < done.place.history[0]["loss"] / 2


def test_every_epoch_uses_every_sample_once_and_in_another_order(training):
    """Four epochs of fifty, the last batch of each smaller."""
    done = training()

    used = np.array(_run(done)).reshape(4, 50)

    assert (np.sort(used, axis=1) == np.arange(50)).all()
    assert len({tuple(row) for row in used.tolist()}) == 4
    assert (done.place.samples, done.place.step) == (200, 16)
    assert (done.place.repeated, done.place.dropped) == (0, 0)


@pytest.mark.parametrize("at", [1, 4, 6, 15])
def test_a_checkpoint_carries_everything(training, tmp_path, at):
    """Cut off within an epoch, at its end, before the last step: equal to the bit."""
    whole, first, second = training(), training(), training()
    whole_used = _run(whole)
    first_used = _run(first, steps=at)
    first.save(tmp_path)

    second.load(tmp_path)
    second_used = _run(second)

    assert first_used + second_used == whole_used
    assert np.array_equal(second.team.vector, whole.team.vector)
    assert second.place == whole.place


def test_a_sample_that_is_used_again_is_counted(training):
    """Going back by one batch repeats 16 samples; skipping one drops 16."""
    again, skipped = training(epochs=1), training(epochs=1)
    _run(again, steps=2)
    _run(skipped, steps=1)

    again.place.position -= 16
    skipped.place.position += 16
    _run(again)
    _run(skipped)

    assert (again.place.repeated, again.place.dropped) == (16, 0)
    assert (skipped.place.repeated, skipped.place.dropped) == (0, 16)


def test_refuses_the_checkpoint_of_another_training(training, tmp_path):
    """Other epochs mean another learning rate at each step."""
    training(epochs=4).save(tmp_path)

    with pytest.raises(ValueError, match=r"'epochs': 4.*'epochs': 5"):
        training(epochs=5).load(tmp_path)


def test_shards_cover_a_batch_whatever_the_number_of_processes(training):
    """Three processes share four shards of ten samples: two, one and one."""
    team = training().team
    found = []
    for rank in range(3):
        team._rank, team._processes = rank, 3
        found.append(team._shards(0, 10))

    assert [len(shards) for shards in found] == [2, 1, 1]
    assert sorted(shard for shards in found for shard in shards) == [
        (0, 0, 2),
        (1, 2, 5),
        (2, 5, 7),
        (3, 7, 10),
    ]


def test_the_rate_falls_from_its_peak_to_nothing(stage):
    """Half a cosine over ten steps: full at the first, half in the middle."""
    rate = stage("model").learning_rate

    assert rate(0.4, 1, 10) == 0.4
    assert rate(0.4, 6, 10) == pytest.approx(0.2)
    assert rate(0.4, 11, 10) == pytest.approx(0)


@pytest.fixture
def scored(stage, training, tmp_path):
    """Score three held-out documents with a trained model; returns exit code and folder."""

    def run(labels, margin="0.3"):
        done = training(epochs=40)
        _run(done)
        facts = {"labels": ["red", "green", "blue"], "features": FEATURES, "ignored_words": []}
        stage("train").write(done, facts, tmp_path / "model")
        lines = [
            json.dumps({"id": str(index), "label": label, "text": f"ma mi mo mu {label}"})
            for index, label in enumerate(labels)
        ]
        (tmp_path / "heldout.jsonl").write_text("\n".join(lines) + "\n")
        arguments = ["--model", tmp_path / "model", "--data", tmp_path, "--output", tmp_path / "out"]
        code = stage("score").main([str(part) for part in [*arguments, "--batch", 2, "--margin", margin]])
        return code, tmp_path / "out"

    return run


def test_scores_every_document_in_order(scored):
    """Batches of two over three documents; all right, so well above one third."""
    code, folder = scored(["blue", "red", "green"])

    rows = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    assert code == 0
    assert [row["id"] for row in rows] == ["0", "1", "2"]
    assert [row["predicted"] for row in rows] == ["blue", "red", "green"]
    summary = json.loads((folder / "scores.json").read_text())
    assert (summary["accuracy"], summary["majority"]) == (1, pytest.approx(1 / 3))


def test_refuses_a_model_that_is_no_better_than_the_most_frequent_label(scored, capsys):
    """All documents have one label: a constant answer is as good."""
    code, _ = scored(["red", "red", "red"])

    assert code == 1
    assert "below 1.3000: not a model to use" in capsys.readouterr().err
