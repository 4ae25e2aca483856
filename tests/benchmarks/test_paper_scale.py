"""The formulas of the papers' models against models, counters and hand-made sums."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import weft
from benchmarks.harness import ResumeCache
from benchmarks.paper_scale import pages, shapes
from benchmarks.paper_scale.cells import METHODS, Assumptions, Cell, cells_of, microbatches_of, simulate_cell
from benchmarks.paper_scale.devices import Device, ring_seconds
from benchmarks.paper_scale.measure import measure
from benchmarks.paper_scale.sensitivity import compare
from weft.train.data_spec import DataSpec
from weft.train.models import BERT, ResNet, build_model

SEQUENCE = 32


def bert_layer() -> torch.nn.Sequential:
    pairs = DataSpec(task="classification", form="pairs", vocabulary=50, context=SEQUENCE, classes=2)
    model = build_model(BERT(name="bert", layers=1, width=64, heads=4, dropout=0.1), pairs, seed=0).model
    return weft.materialize(torch.nn.Sequential(model.attention0, model.feedforward0))


def hidden(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, SEQUENCE, 64, requires_grad=True), torch.ones(samples, SEQUENCE, dtype=torch.bool)


def images(size: int) -> DataSpec:
    return DataSpec(task="classification", form="images", channels=3, size=size, classes=shapes.CLASSES)


def kept_bytes(model: torch.nn.Module, value: object) -> int:
    """Bytes that autograd saves, without weights, each storage once."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(value)
    del output
    return sum(storage.nbytes() for storage in seen.values())


def test_bert_of_twelve_layers_has_the_published_110_million_parameters() -> None:
    assert sum(layer.parameters for layer in shapes.bert(12)) == pytest.approx(110e6, rel=0.01)


def test_a_layer_of_bert_computes_and_keeps_what_the_model_does() -> None:
    found, model = shapes.bert_layer(width=64, heads=4, sequence=SEQUENCE, mask=1.0), bert_layer()
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    with FlopCounterMode(display=False) as counter:
        model(hidden(3))
    assert 3 * found.flops == counter.get_total_flops()
    assert 3 * 4 * found.kept == pytest.approx(kept_bytes(model, hidden(3)), rel=0.1)


def test_resnext_50_computes_and_holds_what_the_model_does() -> None:
    layers = shapes.resnext(shapes.BLOCKS[50])
    options = ResNet(name="resnext50_32x4d", size="full")
    model = build_model(options, images(shapes.IMAGE), seed=0).model.to("meta")
    assert sum(layer.parameters for layer in layers) == sum(weight.numel() for weight in model.parameters())
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, shapes.IMAGE, shapes.IMAGE, device="meta"))
    assert sum(layer.flops for layer in layers) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_a_bottleneck_keeps_what_the_model_does() -> None:
    model = build_model(ResNet(name="resnext50_32x4d", size="full"), images(32), seed=0).model
    block = weft.materialize(model.get_submodule("stage1_block2"))
    image = torch.randn(2, 256, 8, 8, requires_grad=True).to(memory_format=torch.channels_last)
    found = shapes.bottleneck(256, 128, 256, 8)
    assert 2 * 4 * (found.kept + 256 * 64) == pytest.approx(kept_bytes(block, image), rel=0.1)  # its own output too


def test_chunks_are_cut_evenly_and_hold_all_layers() -> None:
    layers = shapes.layers_of("bert-96")
    for stages, groups in ((8, 1), (8, 2), (2, 2)):
        parts = shapes.cut(layers, stages, groups)
        assert [layer for part in parts for layer in part] == list(layers)
        assert {sum(1 for layer in part if layer.flops) for part in parts} == {96 // stages // groups}


def test_memory_of_2bw_by_hand() -> None:
    cell = Cell(model="bert-96", method="2bw", depth=8, width=1, batch=64, recompute=False)
    found = simulate_cell(cell, Assumptions())
    layer, embedding = shapes.bert_layer(), shapes.layers_of("bert-96")[0]
    parameters = 12 * layer.parameters + embedding.parameters
    states = 4 * parameters * (1 + 1 + 1 + 2)  # weights, the older version, gradients, two states
    activations = 8 * 8 * 4 * (12 * layer.kept + embedding.kept)  # p micro-batches of 8 samples on rank 0
    assert found["total_gb"] == pytest.approx((states + activations) / 1e9, rel=0.02)
    assert found["fits"]


def test_time_of_2bw_by_hand() -> None:
    cell = Cell(model="bert-96", method="2bw", depth=2, width=4, batch=512, recompute=True)
    found, device, layer = simulate_cell(cell, Assumptions()), Device(), shapes.bert_layer()
    compute = 2 * 4 * 48 * layer.flops * (64 + device.half_at) / (0.7 * 15.7e12)  # m x (F + F again + 2 F)
    weights = 4 * 48 * layer.parameters
    update = ring_seconds(weights, 4, bandwidth=20e9, latency=10e-6) + 7 * weights / 700e9
    assert found["throughput"] == pytest.approx(512 / (compute + update), rel=0.01)
    assert ring_seconds(4e9, 4, bandwidth=1e9, latency=0.0) == pytest.approx(6.0)


def test_recompute_halves_what_wpipe_holds_beside_2bw_and_layer_by_layer_does_not() -> None:
    wpipe = Cell(model="bert-96", method="wpipe", depth=2, width=4, batch=256, recompute=True)
    ratios = []
    for assumptions in (Assumptions(), Assumptions(recompute="layer")):
        cells = (dataclasses.replace(wpipe, method=name) for name in ("wpipe", "2bw"))
        gb = [simulate_cell(cell, assumptions)["total_gb"] for cell in cells]
        ratios.append(gb[0] / gb[1])
    assert ratios[0] < 0.64 < 0.75 < ratios[1]


def test_small_batches_have_fewer_micro_batches_where_the_method_allows_it() -> None:
    cell = Cell(model="bert-96", method="gpipe", depth=8, width=1, batch=2, recompute=False)
    assert microbatches_of(cell, Assumptions()) == 2
    assert microbatches_of(dataclasses.replace(cell, method="wpipe"), Assumptions()) == 0
    assert microbatches_of(dataclasses.replace(cell, width=4), Assumptions()) == 0
    deep = dataclasses.replace(cell, depth=8, width=1, batch=16)
    for method, microbatches in (("weave slack 0", 8), ("weave", 16), ("wpipe", 8), ("wpipe fresh True", 16)):
        assert microbatches_of(dataclasses.replace(deep, method=method), Assumptions()) == microbatches


def test_methods_that_weft_does_not_recompute_have_no_such_cells() -> None:
    cells = cells_of("bert-96", Assumptions(batches=(64,)), METHODS[8])
    kept = {cell.method for cell in cells} - {
        cell.method for cell in cells_of("bert-96", Assumptions(batches=(64,), choices=(True,)), METHODS[8])
    }
    assert kept == {"paci", "xpipe"}
    with pytest.raises(weft.WeftError, match="can't be computed again"):
        simulate_cell(Cell(model="bert-96", method="paci", depth=8, width=1, batch=64, recompute=True), Assumptions())


def test_fresh_reads_halve_the_delay_and_slack_is_in_forwards_of_a_stage() -> None:
    cell = Cell(model="bert-96", method="wpipe", depth=8, width=1, batch=512, recompute=False)
    paper, fresh, weave = (
        simulate_cell(dataclasses.replace(cell, method=method), Assumptions())
        for method in ("wpipe", "wpipe fresh True", "weave")
    )
    assert fresh["mean_delay"] == pytest.approx(paper["mean_delay"] / 2)  # with twice the micro-batches
    assert paper["slack"] == 0
    assert 0.48 < weave["slack"] < 0.5  # the links take a part of it
    assert simulate_cell(dataclasses.replace(cell, recompute=True), Assumptions())["slack"] is None


def test_the_best_of_each_is_compared() -> None:
    def cell(method: str, batch: int, recompute: bool, throughput: float, gb: float) -> dict[str, object]:
        at = {"depth": 8, "width": 1, "method": method, "batch": batch, "recompute": recompute}
        return at | {"throughput": throughput, "total_gb": gb, "fits": gb <= 16}

    cells = [cell("wpipe", 64, False, 40, 16), cell("wpipe", 64, True, 30, 6)]
    cells += [cell("2bw", 64, False, 80, 17), cell("2bw", 64, True, 40, 8)]
    found = compare(cells)
    assert found["cell"]["most"] == found["cell"]["least"] == 0.75  # without recompute, 2bw does not fit
    assert found["cell"]["most_at"] == "(8,1) batch 64, recompute"
    assert found["batch"]["most"] == found["best"]["most"] == 1.0
    assert found["memory"]["least"] == 0.75
    assert found["memory"]["least_at"] == "(8,1) batch 64, recompute"


def test_the_quick_form_makes_every_table_and_picture() -> None:
    results = measure(quick=True, cache=ResumeCache())
    assert pages.tables(results).keys() == {"best", "memory", "idle", "slack", "assumptions"}
    assert pages.plots(results).keys() == {"throughput.svg", "memory.svg", "idle.svg"}
    assert not any("idles" in line for line in pages.missed(results))
    for cell in results["cells"]["bert-96"]:
        cell["idle"] = 0.5
    assert any("xpipe idles 50.0%" in line for line in pages.missed(results))
