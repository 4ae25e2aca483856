"""Steps and their results: learning rates, evaluation, losses, NaN, norms, replicas; with custom schedules and models.
Compared with plain training (`plain.py`)."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.devices import losses_behind, place_of_loss
from tests.helpers.models import ASYNCHRONOUS, SYNCHRONOUS
from tests.helpers.oracle import Oracle, delays
from tests.helpers.pairwise import parametrize_product
from tests.helpers.plain import (
    ROWS,
    WIDTH,
    Batch,
    Counted,
    batches,
    cut,
    differing,
    dropped,
    law,
    linear,
    numbers,
    pipeline,
    plain,
    results_of,
    seeded,
    sgd,
    still,
    train,
)
from torch import Tensor, nn
from torch.nn import functional

import weft
from weft.errors import Diverged, WeftError
from weft.runtime.partition.cut import cut_layers

# Learning rates


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + update))


@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_learning_rates_step_with_updates(name: str) -> None:
    model, data = linear(), batches(4)
    pipe = pipeline(model, schedule=name, lr_scheduler=falling)
    state = train(pipe, data)
    if name in SYNCHRONOUS:
        expected = plain(model, data, lr_scheduler=falling)[0]
    else:
        expected = law(model, data, pipe, lr_scheduler=falling)
    assert differing(state, expected) == []
    for built in pipe._assembly.chunks.values():
        for parameter_set in built.chunk.sets:
            assert parameter_set.optimizer is not None
            assert parameter_set.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 5)


# Evaluation


def mean_loss(model: nn.Module, data: Iterable[Batch]) -> float:
    """The mean loss over samples, each batch in one piece."""
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        parts = [(functional.mse_loss(model(x), y).item() * len(x), len(x)) for x, y in data]
    return sum(total for total, _ in parts) / sum(samples for _, samples in parts)


class Noisy(nn.Module):
    """Has dropout, and statistics that an evaluation must read and not write."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.dropout(self.norm(self.linear(x))))


def noisy() -> nn.Sequential:
    model = seeded(*[Noisy] * 8)
    model.get_submodule("3.norm").eval()  # a choice of the user, which has to survive
    return model


def check_evaluation(pipe: weft.Pipeline, model: nn.Module) -> None:
    """The evaluation is that of the saved model, and has no side effects."""
    for batch in batches(3):
        pipe.step(*batch)
    held_out = [(numbers(rows, WIDTH, seed=rows), numbers(rows, WIDTH, seed=9)) for rows in (16, 7, 3, 1, 5)]
    loss = pipe.evaluate(iter(held_out))
    model.load_state_dict(pipe.state_dict())
    assert loss == pytest.approx(mean_loss(model, held_out), rel=1e-5)
    assert loss == pipe.evaluate(held_out)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_evaluation_is_the_mean_over_samples(name: str, recompute: bool) -> None:
    """Batches of any size, even with fewer samples than micro-batches, are weighted by their samples."""
    check_evaluation(pipeline(noisy(), schedule=name, recompute=recompute), noisy())


@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_replicas_evaluate_together(name: str) -> None:
    check_evaluation(pipeline(dropped(), schedule=name, microbatches=2, replicas=2), dropped())


def test_replicas_evaluate_with_the_statistics_of_the_first() -> None:
    """Only these are saved with the model."""
    check_evaluation(pipeline(noisy(), microbatches=2, replicas=2), noisy())


@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_training_continues_after_an_evaluation_as_after_a_flush(name: str) -> None:
    def run(pause: Callable[[weft.Pipeline], object]) -> dict[str, Tensor]:
        pipe = pipeline(noisy(), schedule=name)
        for t, batch in enumerate(batches(6)):
            if t == 3:
                pause(pipe)
                layers = [layer for built in pipe._assembly.chunks.values() for layer in built.chunk.layers]
                assert [module.training for layer in layers for module in layer.modules()].count(False) == 1
            pipe.step(*batch)
        return pipe.state_dict()

    flushed = run(lambda pipe: pipe.flush())
    assert differing(run(lambda pipe: pipe.evaluate(batches(2, rows=5))), flushed) == []
    if name in SYNCHRONOUS:
        assert differing(run(lambda pipe: None), flushed) == []


def test_modes_are_restored_when_an_evaluation_fails() -> None:
    pipe = pipeline(noisy())
    with pytest.raises(WeftError):
        pipe.evaluate([(torch.zeros(3, WIDTH), None)])
    assert all(layer.training for built in pipe._assembly.chunks.values() for layer in built.chunk.layers)


# Results


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_a_result_has_the_loss_of_the_mini_batch_that_it_names(name: str, stages: int) -> None:
    """With constant weights, a loss identifies its mini-batch."""
    data = batches(8)
    losses = plain(linear(), data, optimizer=still)[1]
    pipe = pipeline(linear(), schedule=name, stages=stages, optimizer=still)
    newest = -1
    for t, batch in enumerate(data):
        result = pipe.step(*batch)
        assert (result.loss is None) == (result.minibatch is None)
        if name in SYNCHRONOUS and t >= losses_behind():
            assert result.minibatch == t - losses_behind()
        if result.minibatch is not None:
            assert newest <= result.minibatch <= t
            newest = result.minibatch
            assert result.loss == pytest.approx(losses[newest], rel=1e-6)
        assert (result.skipped, result.norm) == (0, None)
    assert newest >= 8 - 1 - stages - losses_behind()
    done = pipe.flush()
    assert done.minibatch == 7
    assert done.loss == pytest.approx(losses[7], rel=1e-6)
    pipe.step(*data[0])
    done = pipe.flush()  # mini-batches are still counted
    assert done.minibatch == 8
    assert done.loss == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_a_step_does_not_flush_an_asynchronous_pipeline(name: str) -> None:
    """After every step, micro-batches are in flight whose backward has not run."""
    runs: list[list[int]] = [[] for _ in range(8)]
    pipe = pipeline([Counted(run_log) for run_log in runs], schedule=name, stages=4)
    for t, batch in enumerate(batches(5), start=1):
        result = pipe.step(*batch)
        assert result.minibatch is None or result.minibatch < t - 1
        assert runs[0].count(1) == 4 * t
        assert runs[0].count(-1) < 4 * t
        assert pipe._assembly.chunks[0, 0].chunk.in_flight
    pipe.flush()
    assert {(run_log.count(1), run_log.count(-1)) for run_log in runs} == {(20, 20)}
    assert not any(built.chunk.in_flight for built in pipe._assembly.chunks.values())


# NaN


def with_nan(data: list[Batch], *, at: Sequence[int]) -> list[Batch]:
    """Make one sample of the last micro-batch of some mini-batches NaN."""
    data = copy.deepcopy(data)
    for t in at:
        data[t][0][-1, 0] = math.nan
    return data


@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_nan_stops_by_default(name: str) -> None:
    pipe = pipeline(linear(), schedule=name)
    with pytest.raises(WeftError, match=place_of_loss(2, 3) + ': the loss is nan; .*nan="skip"'):
        train(pipe, with_nan(batches(4), at=[2]))


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1e9}, {"recompute": True}], ids=["", "clip", "recompute"])
@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_nan_skips_the_update_of_its_mini_batch(name: str, options: dict[str, Any]) -> None:
    """The next version equals the last one; the learning rate does not step. With a norm to 1e-6."""
    model, data = linear(), with_nan(batches(6), at=[1, 4])
    pipe = pipeline(model, schedule=name, nan="skip", lr_scheduler=falling, **options)
    results = [pipe.step(*batch) for batch in data] + [pipe.flush()]
    assert [result.skipped for result in results][-1] == 2
    assert sorted(result.skipped for result in results) == [result.skipped for result in results]
    if name in SYNCHRONOUS:
        assert [result.skipped for result in results] == [0, 1, 1, 1, 2, 2, 2]
        is_nan = [math.isnan(result.loss or 0.0) for result in results[losses_behind() :]]
        assert is_nan == [False, True, False, False, True, False, False][: len(is_nan)]
    oracle = Oracle(
        model,
        loss_fn=functional.mse_loss,
        optimizer=sgd,
        microbatches=4,
        balance=list(pipe.balance),
        delay=delays(name, 2, 4),
    )
    scheduler = falling(oracle.optimizer)
    for t, batch in enumerate(data):
        with pytest.MonkeyPatch.context() as patch:
            if t in (1, 4):
                patch.setattr(oracle.optimizer, "step", lambda: None)
            oracle.step(*batch)
        if t not in (1, 4):
            scheduler.step()
    within = 1e-6 if "clip_norm" in options else 0.0
    assert differing(pipe.state_dict(), dict(oracle.model.state_dict()), within=within) == []


@pytest.mark.parametrize("front", [False, True])
def test_nan_in_one_replica_skips_on_all(front: bool) -> None:
    """Also where the first chunk has nothing to update but still counts the skip."""
    model = nn.Sequential(nn.Tanh(), *linear(3)) if front else linear(4)
    data = with_nan(batches(3), at=[1])  # in the second replica
    pipe = pipeline(model, nan="skip", microbatches=2, replicas=2, balance=[1, 3])
    results = [pipe.step(*batch) for batch in data]
    assert [result.skipped for result in results] == [0, 1, 1]
    state = plain(model, [data[0], data[2]])[0]
    assert differing(pipe.state_dict(), state, within=1e-6) == []


@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_skips_in_a_row_end_the_run(name: str) -> None:
    """Mini-batch 3 makes an update, so only the next three skips are too many."""
    pipe = pipeline(linear(), schedule=name, nan="skip", max_skips=3)
    message = (
        r"^rank \d, chunk \d, mini-batch 6, update: 3 mini-batches in a row were skipped, .* \(loss: nan, norm of the "
        r"gradients: nan\); lower the learning rate or look at the data, or raise max_skips=3"
    )
    with pytest.raises(Diverged, match=message):
        train(pipe, with_nan(batches(9), at=[1, 2, 4, 5, 6]))
    assert max(worker.completions.skipped for worker in pipe._driver.workers) == 5


# Norms


@parametrize_product(name=[*SYNCHRONOUS, "2bw"], stages=[1, 2, 4], options=[{}, {"microbatches": 2, "replicas": 2}])
def test_the_norm_is_over_all_chunks_and_counts_tied_weights_once(
    name: str, stages: int, options: dict[str, Any]
) -> None:
    """To 1e-6, since it is summed by chunk. With constant weights, the gradients of 2bw are those of plain training."""
    if stages > options.get("microbatches", 4) and name in ("2bw", "interleaved"):
        pytest.skip("has fewer micro-batches than stages")
    model, data = linear(), batches(4)
    model.get_submodule("7.0").weight = model.get_submodule("0.0").weight
    clipped: dict[str, Any] = {"clip_norm": 0.05, "optimizer": still if name == "2bw" else sgd}
    pipe = pipeline(model, schedule=name, stages=stages, **clipped, **options)
    state, _, norms = plain(model, data, **clipped)
    assert min(norms) > 0.1
    for t, batch in enumerate(data):
        result = pipe.step(*batch)
        if name in SYNCHRONOUS:
            assert (result.minibatch is not None) == (t >= losses_behind())
        if result.minibatch is not None:
            assert result.norm == pytest.approx(norms[result.minibatch], rel=1e-5)
    assert pipe.flush().norm == pytest.approx(norms[-1], rel=1e-5)
    assert differing(pipe.state_dict(), state, within=1e-6) == []


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_wpipe_clips_each_group_and_reports_the_whole_norm(stages: int) -> None:
    """The very first mini-batch reads the weights that it updates, so its gradients are those of plain training."""
    model, (inputs, targets) = linear(), batches(1)[0]
    pipe = pipeline(model, schedule="wpipe", stages=stages, clip_norm=0.01, balance=[4 // stages] * 2 * stages)
    pipe.step(inputs, targets)
    result = pipe.flush()
    copied = copy.deepcopy(model)
    for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
        (functional.mse_loss(copied(x), y) / 4).backward()  # type: ignore[no-untyped-call]
    norms = [torch.nn.utils.clip_grad_norm_(group.parameters(), 0.01).item() for group in (copied[:4], copied[4:])]
    assert min(norms) > 0.02
    sgd(copied.parameters()).step()
    assert differing(pipe.state_dict(), dict(copied.state_dict()), within=1e-6) == []
    assert result.norm == pytest.approx(math.hypot(*norms), rel=1e-5)


# Replicas


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_replicas_are_a_larger_mini_batch(name: str, stages: int) -> None:
    """To 1e-6: each replica sums its micro-batches first. With one stage this is plain data parallelism."""
    model, data = linear(), batches(3)
    pipe = pipeline(model, schedule=name, stages=stages, microbatches=2, replicas=2)
    losses = [result.loss for result in results_of(pipe, data)]
    state, expected, _ = plain(model, data)
    assert differing(pipe.state_dict(), state, within=1e-6) == []
    assert losses == pytest.approx(expected, rel=1e-6)
    for built in pipe._assembly.chunks.values():  # all copies are equal
        for name in built.state:
            assert torch.equal(built.tensor(name).cpu(), pipe.state_dict()[name])


def test_the_loss_is_that_of_all_replicas_where_the_first_chunk_has_nothing_to_update() -> None:
    model, data = nn.Sequential(nn.Tanh(), *linear(3)), batches(3)
    pipe = pipeline(model, microbatches=2, replicas=2, balance=[1, 3])
    losses = [result.loss for result in results_of(pipe, data)]
    assert losses == pytest.approx(plain(model, data)[1], rel=1e-6)


# Custom schedules


def test_a_schedule_from_a_file_trains(tmp_path: Path) -> None:
    """A V of four chunks on two ranks, written as torch's compute-only CSV: no method of weft has it."""
    path = tmp_path / "v.csv"
    path.write_text("0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n")
    schedule = weft.load_csv(path)
    assert schedule.placement == (0, 1, 1, 0)
    model, data = linear(), batches(3)
    state = train(pipeline(model, schedule=schedule, microbatches=2), data)
    assert differing(state, plain(model, data, microbatches=2)[0]) == []


@pytest.mark.parametrize("late", [1, 2])
def test_a_custom_asynchronous_schedule_trains(late: int) -> None:
    """One stage that reads weights some updates old: the engine knows this only from the schedule's data."""
    schedule = weft.Schedule(
        name="late",
        stages=1,
        microbatches=2,
        streams=[" ".join(f"0F{j}" for j in range(2)) + f" 0B{-2 * late} 0B{1 - 2 * late}"],
        weights=weft.Weights(delay=late),
    )
    model, data = linear(), batches(6)
    state = train(pipeline(model, schedule=schedule, stages=1, microbatches=None), data)
    oracle = Oracle(
        model,
        loss_fn=functional.mse_loss,
        optimizer=sgd,
        microbatches=2,
        balance=[8],
        delay=lambda chunk, j: late,
    )
    for batch in data:
        oracle.step(*batch)
    assert differing(state, dict(oracle.model.state_dict())) == []


# Whole models


class Marked(nn.Module):
    """A custom forward, with a skip connection over both marks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.first, self.second, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, words: Tensor, scale: Tensor) -> Tensor:
        start = self.embedding(words)
        h = torch.tanh(self.first(start))
        weft.cut()
        h = torch.tanh(self.second(h) * scale)
        weft.cut()
        return torch.as_tensor(self.head(h + start).mean(1))


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_model_cut_at_marks(name: str) -> None:
    """Unless a schedule needs more chunks than the marks make."""
    if name == "interleaved":
        pytest.skip("wants four chunks of three layers")
    model = seeded(Marked)[0]
    data = [((torch.arange(ROWS * 5).reshape(ROWS, 5) % 50, x[:, None, :1].contiguous()), y) for x, y in batches(3)]
    example = tuple(part[:3] for part in data[0][0])
    state = train(pipeline(model, schedule=name, example=example), data)
    assert differing(state, plain(model, data, forward=lambda model, given: model(*given))[0]) == []


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config)  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=2,
        vocab_size=50,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


HUGGING_FACE = {
    "bert": (bert, ["bert.encoder.layer.0", "bert.encoder.layer.1", "classifier"]),
    "gpt2": (gpt2, ["transformer.h.0", "transformer.h.1", "lm_head"]),
}


def words(name: str) -> list[Batch]:
    """Texts of different lengths in every mini-batch, some of them padded."""
    made = []
    for t, length in enumerate((6, 9, 4)):
        tokens = torch.randint(50, (8, length), generator=torch.Generator().manual_seed(t))
        mask = torch.ones(8, length, dtype=torch.long)
        mask[::3, -1] = 0
        made.append(({"input_ids": tokens, "attention_mask": mask}, tokens if name == "gpt2" else tokens[:, 0] % 2))
    return made


def token_loss(output: Any, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits.flatten(0, -2), target.flatten())


@pytest.mark.parametrize("name", [pytest.param("bert", marks=pytest.mark.slow), "gpt2"])
def test_hugging_face_models_train(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Synchronous schedules agree with plain training to 1e-6 (GPT-2 sums the gradients of its tied embedding by
    chunk), asynchronous ones with the oracle of the law, which has the same layers."""
    make, at = HUGGING_FACE[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make()
    model.train()
    data = words(name)
    example = {key: tensor[:2] for key, tensor in data[0][0].items()}
    options: dict[str, Any] = {"cut": at, "example": example, "loss_fn": token_loss, "microbatches": 4}
    state = train(pipeline(model, schedule="1f1b", **options), data)
    expected = plain(model, data, loss_fn=token_loss, forward=lambda model, given: model(**given))[0]
    assert list(state) == list(model.state_dict())
    assert differing(state, expected, within=1e-6) == []

    layers: list[nn.Module] = []

    def keep(*args: Any, **kwargs: Any) -> list[nn.Module]:
        found = cut_layers(*args, **kwargs)
        layers.extend(copy.deepcopy(found))  # before training
        return found

    monkeypatch.setattr("weft.runtime.partition.layers.cut_layers", keep)
    pipe = pipeline(model, schedule="wpipe", **options)
    state = train(pipe, data)
    oracle = Oracle(
        nn.Sequential(*layers),
        loss_fn=token_loss,
        optimizer=sgd,
        microbatches=4,
        balance=list(pipe.balance),
        delay=delays("wpipe", 2, 4),
    )
    for inputs, targets in data:
        oracle.step(Batched(inputs), targets)  # type: ignore[arg-type]
    by_law = {name.split(".", 1)[1]: tensor for name, tensor in oracle.model.state_dict().items()}
    if name == "gpt2":
        by_law["lm_head.weight"] = by_law["transformer.wte.weight"]
    assert differing(state, {name: by_law[name] for name in state}, within=1e-6) == []
    assert len(differing(state, expected, within=1e-6)) > len(state) / 2


class Batched(dict[str, Tensor]):
    """A dict that can be chunked like a tensor, for the oracle."""

    def chunk(self, parts: int) -> list[dict[str, Tensor]]:
        return cut(dict(self), parts)
