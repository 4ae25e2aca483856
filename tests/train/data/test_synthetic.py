"""Synthetic data follows its rule, and depends on its seed only."""

import numpy as np
import pytest
import torch

from weft.errors import WeftError
from weft.train.data import entropy, open_data
from weft.train.data.options import Synthetic


def inputs_and_targets(options: Synthetic, samples: int) -> tuple[object, torch.Tensor]:
    train = open_data(options, seed=0).train
    return train.inputs(np.arange(samples), None), train.targets(np.arange(samples), None)


def test_a_token_has_one_successor_except_for_noise() -> None:
    for noise, least, most in ((0.0, 1.0, 1.0), (0.3, 0.65, 0.78)):
        inputs, targets = inputs_and_targets(Synthetic(samples=200, context=20, vocabulary=11, noise=noise), 200)
        assert isinstance(inputs, torch.Tensor)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        table = torch.zeros(11, 11)
        table.index_put_((inputs.flatten(), targets.flatten()), torch.ones(inputs.numel()), accumulate=True)
        assert least <= float(table.max(1).values.sum() / table.sum()) <= most


def test_the_brightest_patch_is_the_class() -> None:
    inputs, targets = inputs_and_targets(Synthetic(form="images", samples=90, classes=9, size=12, channels=2), 90)
    assert isinstance(inputs, torch.Tensor)
    cells = inputs.reshape(90, 2, 3, 4, 3, 4).mean((1, 3, 5)).flatten(1)
    assert torch.equal(cells.argmax(1), targets)
    assert set(targets.tolist()) == set(range(9))


def test_pairs_name_their_class_in_the_second_sentence() -> None:
    options = Synthetic(form="pairs", samples=50, classes=3, vocabulary=20, context=16, noise=0.0)
    inputs, targets = inputs_and_targets(options, 50)
    assert isinstance(inputs, dict)
    second = inputs["input_ids"] * inputs["token_type_ids"]
    assert [next(word - 4 for word in row if 4 <= word < 7) for row in second.tolist()] == targets.tolist()
    assert (inputs["input_ids"][:, 0] == 2).all()


def test_values_follow_a_linear_rule_that_validation_shares() -> None:
    for task in ("regression", "classification"):
        options = Synthetic(form="values", task=task, samples=400, features=6, classes=3, noise=0.0)
        data = open_data(options, seed=0)
        train = data.train.inputs(np.arange(400), None)
        goal = data.train.targets(np.arange(400), None)
        if task == "classification":
            goal = torch.nn.functional.one_hot(goal, 3).float()
        rule = torch.linalg.lstsq(train, goal).solution
        guess = data.validation.inputs(np.arange(256), None) @ rule
        truth = data.validation.targets(np.arange(256), None)
        if task == "regression":
            torch.testing.assert_close(guess, truth, rtol=1e-3, atol=1e-4)
        else:
            assert float((guess.argmax(1) == truth).float().mean()) > 0.8


@pytest.mark.parametrize("form", ["tokens", "pairs", "images", "values"])
def test_content_depends_on_its_seed_only(form: str) -> None:
    prints = [
        open_data(Synthetic(form=form, seed=content), seed=training).train.fingerprint
        for content, training in ((0, 0), (0, 1), (1, 0))
    ]
    assert prints[0] == prints[1] != prints[2]
    data = open_data(Synthetic(form=form), seed=0)
    assert data.train.fingerprint != data.validation.fingerprint


def test_entropy_needs_classes() -> None:
    with pytest.raises(WeftError, match="regression"):
        entropy(open_data(Synthetic(form="values", task="regression"), seed=0).train)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "pairs", "vocabulary": 14}, "data.vocabulary: 14, data.classes: 10"),
        ({"form": "images", "size": 3}, "data.size: 3, data.classes: 10"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(WeftError, match=message):
        Synthetic(**options).check()  # type: ignore[arg-type]
