"""Real ranks are bit-identical to virtual ones, and their memory does not grow.

All features of the runtime, on two ranks and on four, compared with the same run on virtual ranks in this process.
Results travel as digests: equal digests mean equal bits.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.rank_functions import eventually, listeners
from tests.helpers.scripts import ROOT, SOURCES, TORCHRUN, Scripts, paths
from torch import Tensor, nn

import weft
from weft.runtime.comm.links import ReceiveLink, SendLink
from weft.runtime.comm.process_transport import ProcessTransport

WIDTH, WORDS, ROWS, STEPS = 16, 16, 8, 6
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "pipedream", "2bw", "wpipe"]
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and ::1, as /proc/net writes them


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and how it is trained."""

    schedule: str
    model: str = "tied"
    microbatches: int = 4
    options: dict[str, Any] = field(default_factory=dict)
    nan_at: int = -1  # the mini-batch with a bad target

    def __str__(self) -> str:
        return "-".join([self.schedule, self.model, *(f"{name}={value}" for name, value in self.options.items())])


CASES = [
    *(Case(schedule=name) for name in SCHEDULES),
    *(Case(schedule=name, model="normed", options={"recompute": True}) for name in ("1f1b", "wpipe")),
    *(Case(schedule=name, options={"clip_norm": 0.05}) for name in ("1f1b", "2bw", "wpipe")),
    *(Case(schedule=name, options={"replicas": 2}) for name in ("1f1b", "2bw", "wpipe", "zb-h1")),
    Case(schedule="2bw", options={"replicas": 2, "clip_norm": 0.05, "recompute": True}),
    *(Case(schedule=name, model="normed", options={"precision": "bf16"}) for name in ("1f1b", "wpipe")),
    *(Case(schedule=name, model="normed", options={"nan": "skip"}, nan_at=3) for name in ("gpipe", "2bw", "wpipe")),
    Case(schedule="2bw", options={"nan": "skip", "replicas": 2, "clip_norm": 0.05}, nan_at=2),
    Case(schedule="wpipe", model="tree", options={"seed": 7}),
    *(Case(schedule=name, model="thrice") for name in ("1f1b", "2bw", "wpipe")),
]
FEW = (
    "wpipe-tied-clip_norm=0.05",
    "2bw-tied-replicas=2-clip_norm=0.05-recompute=True",
    "wpipe-tree-seed=7",
    "1f1b-thrice",
    "2bw-thrice",
    "wpipe-thrice",
)
IN_MAKE_TEST = {  # every schedule; every option and model with one of them
    2: {
        *(f"{name}-tied" for name in SCHEDULES),
        "wpipe-normed-recompute=True",
        "wpipe-tied-clip_norm=0.05",
        "zb-h1-tied-replicas=2",
        "2bw-tied-replicas=2-clip_norm=0.05-recompute=True",
        "1f1b-normed-precision=bf16",
        "wpipe-normed-nan=skip",
        "2bw-tied-nan=skip-replicas=2-clip_norm=0.05",
        "wpipe-tree-seed=7",
        "wpipe-thrice",
    },
    4: {
        "interleaved-tied",
        "2bw-tied",
        "wpipe-tied",
        "1f1b-thrice",
        "2bw-tied-replicas=2-clip_norm=0.05-recompute=True",
    },
}


# Models


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.heads(x, x, x, need_weights=False)[0]
        return x + mixed


class Fork(nn.Module):
    """Returns a tree: a tensor, numbers without gradient, and a skip connection."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": x, "skip": (x, x.argmax(-1)), "scale": 2, "mask": x > 0}


class Pass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skip: Any, scale: int, mask: Tensor) -> dict[str, Any]:
        return {"x": torch.tanh(self.layer(x)) * mask, "skip": skip, "scale": scale, "mask": mask}


class Join(nn.Module):
    def forward(self, x: Tensor, skip: Any, scale: int, mask: Tensor) -> Tensor:
        joined: Tensor = x * scale + skip[0] + nn.functional.one_hot(skip[1], WIDTH)
        return joined


def tied() -> nn.Sequential:
    """With dropout, and one parameter at both ends."""
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDTH),
        nn.LayerNorm(WIDTH),
        Attention(),
        nn.Linear(WIDTH, WIDTH),
        nn.Dropout(0.2),
        nn.GELU(),
        nn.Linear(WIDTH, WIDTH),
        nn.Linear(WIDTH, WORDS, bias=False),
    )
    model[7].weight = model[0].weight
    return model


def normed() -> nn.Sequential:
    """With running statistics and dropout."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.Linear(WIDTH, WIDTH),
    )


def tree() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Fork(), Pass(), Pass(), Pass(), Pass(), Join(), nn.Linear(WIDTH, WIDTH)
    )


def thrice() -> nn.Sequential:
    """One parameter in three layers, far apart."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    model[3].weight = model[7].weight = model[0].weight
    return model


MODELS: dict[str, Callable[[], nn.Sequential]] = {"tied": tied, "normed": normed, "tree": tree, "thrice": thrice}


def loss_of_words(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2).float(), target.flatten())


def loss_of_rows(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


@cache
def batches(model: str, count: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(5)
    if model == "tied":
        return [tuple(torch.randint(WORDS, (rows, 6), generator=made) for _ in "xy") for _ in range(count)]  # type: ignore[misc]
    return [tuple(torch.randn(rows, WIDTH, generator=made) for _ in "xy") for _ in range(count)]  # type: ignore[misc]


def build(case: Case, *, ranks: int | None) -> weft.Pipeline:
    """On the ranks of the process group, or on this number of virtual ranks."""
    torch.manual_seed(1)
    replicas = case.options.get("replicas", 1)
    return weft.Pipeline(
        MODELS[case.model](),
        loss_fn=loss_of_words if case.model == "tied" else loss_of_rows,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5),
        schedule=case.schedule,
        microbatches=case.microbatches,
        stages=None if ranks is None else ranks // replicas,
        **case.options,
    )


def digest(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return (
        f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest()}"
    )


# Functions of a rank


def train(case: Case, *, ranks: int | None = None) -> dict[str, Any]:
    """A run with all features: steps, an evaluation in the middle, a state that is reloaded, a flush."""
    pipe = build(case, ranks=ranks)
    results = []
    rows = ROWS * pipe.replicas
    data = batches(case.model, STEPS, rows)
    loader = [
        *batches(case.model, 2, rows),
        *batches(case.model, 1, 7),
        *batches(case.model, 1, 3),
    ]  # some micro-batches are empty
    evaluated = []
    for t, (inputs, targets) in enumerate(data):
        if t == case.nan_at:  # the mean over no words, or over a row of NaN
            targets = torch.full_like(targets, float("nan") if targets.is_floating_point() else -100)
        results.append(pipe.step(inputs, targets))
        if t == STEPS // 2:
            evaluated.append(pipe.evaluate(loader))
            pipe.load_state_dict(pipe.state_dict())
    results.append(pipe.flush())
    evaluated.append(pipe.evaluate(loader))
    state = pipe.state_dict()
    MODELS[case.model]().load_state_dict(state, strict=True)
    counts = [[row["rank"], row["actions"], row["messages"]] for row in pipe.report().ranks]
    remains = left(pipe)
    copies = [
        [name, digest(built.tensor(name))]
        for built in pipe._assembly.chunks.values()
        for name in built.state
        if name in state and name.removesuffix(".weight") in ("0", "3", "7")
    ]
    pipe.close()
    return {
        "state": {name: digest(tensor) for name, tensor in state.items()},
        "results": [repr(result) for result in results],  # as text: NaN is not equal to itself
        "evaluated": evaluated,
        "left": remains,
        "counts": counts,
        "copies": copies,
        "sums": {name: tensor.double().abs().sum().item() for name, tensor in state.items()},
        "done": [results[-1].minibatch, results[-1].skipped, results[-1].norm is not None],
    }


def left(pipe: weft.Pipeline) -> dict[str, int]:
    """The sizes of all queues by mini-batch or micro-batch: 0 after a flush."""
    found: dict[str, int] = {}
    for worker in pipe._driver.workers:
        queues: dict[str, Any] = {
            "inbox": worker.inbox,
            "inputs": worker.inputs,
            "targets": worker.targets,
            "losses": worker._losses,
            "unread": worker.completions._unread,
            "unreported": worker.completions.unreported,
            "updated": worker.completions._updated,
            "finished": worker.completions._finished,
            "pending": [update for parameters in worker._sets for update in parameters.pending],
            "in flight": [index for chunk in worker.chunks.values() for index in chunk.in_flight],
            "sums": worker._gradient_sync.sums._parts,
            "futures": worker._gradient_sync.sums._futures,
        }
        for name, queue in queues.items():
            found[name] = found.get(name, 0) + len(queue)
        grads = sum(parameter_set.gradient_bytes for chunk in worker.chunks.values() for parameter_set in chunk.sets)
        found["gradients"] = found.get("gradients", 0) + grads
        found["activations"] = found.get("activations", 0) + worker.meter.held["activations"]
    return found


def long_run(schedule: str, **options: Any) -> list[dict[str, int]]:
    """Sizes after 100 and after 200 tiny mini-batches that alternate between two sizes, and after a flush."""
    pipe = build(Case(schedule=schedule, model="normed", microbatches=2, options=options), ranks=None)
    data = [batches("normed", 1, rows)[0] for rows in (4, 8)]
    noted = []
    for t in range(200):
        pipe.step(*data[t % 2])
        if t in (99, 199):
            noted.append(sizes(pipe))
    pipe.flush()
    remains = left(pipe)
    pipe.close()
    return [*noted, remains]


def sizes(pipe: weft.Pipeline) -> dict[str, int]:
    transport = pipe._assembly.transport
    assert isinstance(transport, ProcessTransport)
    (worker,) = pipe._driver.workers
    links: list[SendLink | ReceiveLink] = [*transport._outgoing.values(), *transport._incoming.values()]
    gc.collect()
    return left(pipe) | {
        "buffers": sum(link._pool.nbytes for link in links),
        "descriptions": sum(len(link._descriptions) for link in links),
        "cycles": len(worker.meter.cycles),
        "blocks": sum(map(len, worker.meter.cycles)),
        "versions": sum(
            parameter_set.versions.extra_bytes for chunk in worker.chunks.values() for parameter_set in chunk.sets
        ),
        "shapes": sum(len(chunk._known) for chunk in worker.chunks.values()),
        "objects": len(gc.get_objects()),
    }


LONG_RUNS: list[tuple[str, dict[str, Any]]] = [
    ("1f1b", {}),
    ("2bw", {"clip_norm": 0.05}),
    ("wpipe", {}),
]


def open_after_each(cases: list[Case]) -> list[list[int]]:
    """Descriptors and threads after each of several pipelines was built, run and closed."""
    counts = []
    for case in cases:
        with build(case, ranks=None) as pipe:
            pipe.step(*batches(case.model, 1, ROWS * pipe.replicas)[0])
        counts.append(descriptors_and_threads())
    return counts


def descriptors_and_threads() -> list[int]:
    gc.collect()
    return [len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("fd", "task")]


def listeners_while_open(case: Case) -> list[str]:
    with build(case, ranks=None) as pipe:
        pipe.step(*batches(case.model, 1, ROWS)[0])
        return listeners()


def cases_for(ranks: int) -> list[Case]:
    """All cases on two ranks; on four, all schedules, whose links form a longer chain or ring, and a few more."""
    few = [case for case in CASES[7:] if str(case) in FEW]
    return CASES if ranks == 2 else [*CASES[:7], *few]


def parameters() -> list[Any]:
    return [
        pytest.param(
            ranks, case, id=f"{ranks}-ranks-{case}", marks=[] if str(case) in IN_MAKE_TEST[ranks] else pytest.mark.slow
        )
        for ranks in (2, 4)
        for case in cases_for(ranks)
    ]


def test_the_cases_of_make_test_exist() -> None:
    for ranks, names in IN_MAKE_TEST.items():
        assert names <= {str(case) for case in cases_for(ranks)}


@pytest.mark.parametrize(("ranks", "case"), parameters())
def test_real_ranks_equal_virtual_ones(launch: Callable[..., list[Any]], ranks: int, case: Case) -> None:
    """On every rank: weights, statistics, losses, norms, evaluations, and the number of messages. After the last flush
    no message, gradient, activation or sum is pending."""
    expected = train(case, ranks=ranks)
    assert set(expected["left"].values()) == {0}, expected["left"]
    results = launch(train, case, ranks=ranks)
    for rank, ran in enumerate(results):
        assert set(ran["left"].values()) == {0}, ran["left"]
        assert all(ran["state"][name] == copy for name, copy in ran["copies"])  # copies of tied weights are equal
        if case.model == "thrice":  # processes sum the parts of three chunks in another order
            assert ran["state"] == results[0]["state"]
            assert ran["sums"] == pytest.approx(expected["sums"], rel=1e-6)
            continue
        assert ran["state"] == expected["state"]
        assert ran["results"][-1] == expected["results"][-1]
        if rank == 0:  # which reports each step on virtual ranks too
            assert ran["results"] == expected["results"]
        assert ran["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-12)  # replicas sum in another order
        assert ran["counts"] == expected["counts"]
        assert ran["done"] == [STEPS - 1, int(case.nan_at >= 0), bool({"clip_norm", "nan"} & case.options.keys())]


@pytest.mark.parametrize(("schedule", "options"), LONG_RUNS, ids=[name for name, _ in LONG_RUNS])
def test_nothing_grows_in_a_long_run(launch: Callable[..., list[Any]], schedule: str, options: dict[str, Any]) -> None:
    """After 200 mini-batches, everything is as large as after 100: buffers, queues, meters, versions, and the number of
    Python objects. A sender has as many buffers as messages were in flight at once, which may peak late."""
    for before, after, left_over in launch(partial(long_run, **options), schedule, ranks=2):
        assert set(left_over.values()) == {0}, left_over
        for name in before:
            if name == "buffers":
                assert after[name] <= 2 * before[name]
            elif name == "objects":
                assert after[name] <= before[name] + 500
            elif name in ("inbox", "pending", "sums", "futures"):  # arrivals differ from run to run
                assert after[name] <= before[name] + 16
            else:
                assert after[name] == before[name], name


@pytest.mark.parametrize("ranks", [2, 4])
def test_closed_pipelines_leave_nothing_open(launch: Callable[..., list[Any]], ranks: int) -> None:
    """A process may build one pipeline after another: closing ends their connections and threads. The first one also
    makes what torch keeps."""
    for first, *_, last in launch(open_after_each, CASES, ranks=ranks):
        assert all(now <= then + 2 for now, then in zip(last, first, strict=True)), (first, last)


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_port_is_open_beyond_loopback(launch: Callable[..., list[Any]], ranks: int) -> None:
    for addresses in launch(listeners_while_open, CASES[0], ranks=ranks):
        assert addresses
        assert set(addresses) <= LOOPBACK


SCRIPT = """
import json, os
import weft
from tests.runtime.comm.test_process_transport import SCRIPT_CASES, run_script

if __name__ == "__main__":
    results = weft.launch(run_script, ranks=2)
    for rank, result in zip([os.environ["RANK"]] if "RANK" in os.environ else [0, 1], results, strict=True):
        with open(f"result.{rank}", "w") as file:
            json.dump(result, file)
"""
SCRIPT_CASES = [0, 6, 9, 13]


def run_script() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [train(CASES[number]) for number in SCRIPT_CASES]


@pytest.mark.slow
def test_the_same_under_torchrun(new_interpreters: Scripts) -> None:
    """One script, two ways to start it: each rank under torchrun equals virtual ranks."""
    script = new_interpreters.start(SCRIPT, under=TORCHRUN, environment={"PYTHONPATH": paths(ROOT, SOURCES)})
    assert script.wait() == 0, (new_interpreters.folder / "err").read_text()
    eventually(lambda: not new_interpreters.alive())
    for rank in range(2):
        found = json.loads((new_interpreters.folder / f"result.{rank}").read_text())
        for number, ran in zip(SCRIPT_CASES, found, strict=True):
            expected = train(CASES[number], ranks=2)
            assert ran["state"] == expected["state"]
            assert ran["results"][-1] == expected["results"][-1]
            assert set(ran["left"].values()) == {0}
