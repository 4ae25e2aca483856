"""The weights that a pipeline starts with: made where they are held, decided by one rank, freed everywhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import weft
from weft.errors import WeftError

WIDTH, TOKENS = 8, 12


class Output(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight  # a parameter

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight)


class Positions(nn.Module):
    """Adds a buffer that its constructor computes; it is not in the state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: Tensor
        self.register_buffer("positions", torch.arange(5.0) / 5, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.positions[:, None]


def build() -> nn.Sequential:
    """An embedding that is tied to the output, seven layers in all."""
    embedding = nn.Embedding(TOKENS, WIDTH)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(4)]
    return nn.Sequential(embedding, Positions(), *blocks, Output(embedding.weight))


def meta_model() -> nn.Sequential:
    with weft.on_meta():
        return build()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def pipeline(model: nn.Module, **options: Any) -> weft.Pipeline:
    options = dict[str, Any](schedule="wpipe", microbatches=2, seed=5, balance=[2, 2, 2, 1]) | options
    return weft.Pipeline(model, loss_fn=loss_fn, optimizer=lambda params: torch.optim.Adam(params, lr=0.05), **options)


def train(pipe: weft.Pipeline) -> dict[str, list[float]]:
    """The state after some updates, as plain data."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        batch = torch.randint(0, TOKENS, (8, 5), generator=generator)
        pipe.step(batch, batch)
    return plain(pipe.state_dict())


def plain(state: dict[str, Tensor]) -> dict[str, list[float]]:
    return {name: tensor.double().flatten().tolist() for name, tensor in state.items()}


def virtual(model: nn.Module, **options: Any) -> dict[str, list[float]]:
    return train(pipeline(model, stages=2, **options))


def test_a_pipeline_starts_as_a_model_in_one_piece() -> None:
    expected = plain(weft.materialize(meta_model(), seed=5).state_dict())
    assert plain(pipeline(meta_model(), stages=2).state_dict()) == expected
    assert plain(pipeline(meta_model(), stages=2, seed=6).state_dict()) != expected


# On real ranks


def on_ranks(case: str, replicas: int, folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    options: dict[str, Any] = {"weights": folder} if case == "file" else {}
    model = build() if case == "differ" else meta_model()
    pipe = pipeline(model, replicas=replicas, **options)
    start = plain(pipe.state_dict())
    held = sorted({name for name, parameter in model.named_parameters() if not parameter.is_meta})
    found = {"start": start, "held": held, "end": train(pipe)}
    pipe.close()
    return found


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """The weights of another seed, in two files with an index; the tied one once."""
    folder = tmp_path_factory.mktemp("weights")
    state = dict(weft.materialize(meta_model(), seed=9).state_dict())
    state.pop("6.weight")
    names = sorted(state)
    files = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: state[name].contiguous() for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder, state


HELD = {0: ["0.weight", "4.0.bias"], 1: ["2.0.weight", "6.weight"]}  # some of each rank's chunks: 0 and 2, 1 and 3


@pytest.mark.parametrize("replicas", [1, 2])
def test_ranks_make_their_own_weights(launch: Callable[..., list[Any]], replicas: int) -> None:
    expected = virtual(meta_model(), replicas=replicas)
    start = plain(weft.materialize(meta_model(), seed=5).state_dict())
    for rank, found in enumerate(launch(on_ranks, "meta", replicas, "", ranks=2 * replicas)):
        assert found["start"] == start
        assert found["end"] == expected
        assert set(HELD[rank % 2]) <= set(found["held"])
        assert not set(HELD[1 - rank % 2]) - {"0.weight", "6.weight"} & set(found["held"])


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_holder_of_a_chunk_decides(launch: Callable[..., list[Any]], replicas: int) -> None:
    """Ranks build different weights: the first replica's count, and of a tied one those of its first chunk."""
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(build())
    whole = build()
    with torch.no_grad():
        for name, tensor in whole.state_dict(keep_vars=True).items():
            rank = {"0": 0, "6": 0}.get(name[0], (int(name[0]) // 2) % 2)
            tensor.copy_(models[rank].state_dict()[name])
    start = plain(whole.state_dict())
    expected = virtual(whole, replicas=replicas)
    for found in launch(on_ranks, "differ", replicas, "", ranks=2 * replicas):
        assert found["start"] == start
        assert found["end"] == expected


def test_weights_come_from_files(launch: Callable[..., list[Any]], stored: tuple[Path, dict[str, Tensor]]) -> None:
    folder, state = stored
    start = plain(state | {"6.weight": state["0.weight"]})
    expected = virtual(meta_model(), weights=folder)
    for found in launch(on_ranks, "file", 1, str(folder), ranks=2):
        assert found["start"] == start
        assert found["end"] == expected


def test_real_models_take_weights_from_files(stored: tuple[Path, dict[str, Tensor]]) -> None:
    folder, state = stored
    pipe = pipeline(build(), stages=2, weights=folder)
    assert plain(pipe.state_dict())["4.0.bias"] == plain(state)["4.0.bias"]


def test_weights_come_from_a_checkpoint(tmp_path: Path) -> None:
    pipe = pipeline(meta_model(), stages=2)
    state = train(pipe)
    pipe.save(tmp_path / "saved")
    assert plain(weft.materialize(meta_model(), weights=tmp_path / "saved").state_dict()) == state
    assert plain(pipeline(meta_model(), stages=1, balance=[5, 2], weights=tmp_path / "saved").state_dict()) == state


def test_a_meta_model_resumes_exactly(tmp_path: Path) -> None:
    first = pipeline(meta_model(), stages=2)
    train(first)
    first.save(tmp_path / "saved")
    expected = train(first)
    second = pipeline(meta_model(), stages=2, seed=5)
    second.load(tmp_path / "saved")
    assert train(second) == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("3.0.weight"), r"has no 3\.0\.weight \(missing: 1\)"),
        (
            lambda state: state.update({"3.0.bias": torch.ones(8, dtype=torch.int8)}),
            r"3\.0\.bias is torch\.float32 in the model and torch\.int8 in",
        ),
        (
            lambda state: state.update({"3.0.bias": torch.zeros(3)}),
            r"3\.0\.bias has another shape in .*\(model: \(8,\), there: \(3,\)\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tmp_path: Path, stored: tuple[Path, dict[str, Tensor]], change: Callable[[dict[str, Tensor]], object], words: str
) -> None:
    state = dict(stored[1])
    change(state)
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(WeftError, match=words):
        pipeline(meta_model(), stages=2, weights=tmp_path / "other.safetensors")


# Models that are cut


class Tiny(nn.Module):
    """Its forward makes tensors on the device of its input, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.output.weight = self.embedding.weight
        self.positions: Tensor
        self.register_buffer("positions", torch.arange(9), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        hidden = self.embedding(tokens) + self.positions[:length, None] * torch.tensor(0.1)
        hidden = hidden + torch.arange(length, device=tokens.device)[:, None] / length
        return self.output(self.norm(self.inner(hidden).relu()))  # type: ignore[no-any-return]


@pytest.mark.parametrize("balance", [[1, 1], "time"])
def test_a_cut_model_is_made_where_it_is_held(balance: object) -> None:
    options = {"cut": ["norm"], "example": torch.zeros(4, 5, dtype=torch.int64), "balance": balance}
    with weft.on_meta():
        model, plain_model = Tiny(), Tiny()
    weft.materialize(plain_model, seed=5)
    made = virtual(model, schedule="1f1b", **options)
    assert made == virtual(plain_model, schedule="1f1b", **options)
    assert not any(parameter.is_meta for parameter in model.parameters())


class Marked(Tiny):
    """It has no buffer, and is cut at a mark."""

    def __init__(self, *, constant: bool = False) -> None:
        super().__init__()
        self.constant = constant

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + torch.arange(tokens.shape[1], device=tokens.device)[:, None] / 5
        if self.constant:
            hidden = hidden * torch.tensor([2.0], device=tokens.device)
        hidden = weft.cut(self.inner(hidden).relu())
        return self.output(self.norm(hidden))  # type: ignore[no-any-return]


def exported(*, constant: bool = False) -> Any:
    """A program that was exported on the meta device."""
    with torch.device("meta"):
        return torch.export.export(Marked(constant=constant), (torch.zeros(4, 5, dtype=torch.int64),))


def test_a_program_that_was_exported_on_the_meta_device_takes_weights(tmp_path: Path) -> None:
    with weft.on_meta():
        real = weft.materialize(Marked(), seed=5)
    state = {name: tensor for name, tensor in real.state_dict().items() if name != "output.weight"}
    save_file(state, tmp_path / "model.safetensors")
    options = {"schedule": "1f1b", "balance": [1, 1]}
    made = virtual(exported(), weights=tmp_path, **options)
    expected = virtual(real, cut=["norm"], example=torch.zeros(4, 5, dtype=torch.int64), **options)
    assert made == {name: expected[name] for name in made}


def test_constants_that_are_lost_are_refused() -> None:
    with pytest.raises(WeftError, match="exported on the meta device has lost the value of its constant"):
        pipeline(exported(constant=True), stages=2)
