from __future__ import annotations

from tests.draw.report.runs import NAMES, REFERENCE, Reader, eight_runs, make_run, slowly_smoothed

from weft.draw.report import report


def test_the_summary_of_one_run() -> None:
    run = make_run()
    words = Reader(report([run], title="t", metric="loss", reference=REFERENCE)).words
    first, last = run.training[0]["loss"], slowly_smoothed([line["loss"] for line in run.training])[-1]
    validation = [line["loss"] for line in run.evaluations]
    best = min(validation)
    for wanted in (
        "wpipe, seed 0: 120 updates, 3,840 samples, in 11 s.",
        f"The training loss fell from {first:.3f} to {last:.3f}.",
        f"On validation data the loss was {validation[-1]:.3f} at the end, "
        + ("the best of all" if validation[-1] == best else f"and best after {320 * (validation.index(best) + 1):,}"),
        "At the end the validation loss is below the entropy of single bytes (3.200).",
        "The ranks waited 12.5% of the time on average (the bubble), rank 3 most, 20.0%.",
        "The largest rank, rank 0, held 8.0 MiB at its peak, 50% of it weights.",
    ):
        assert wanted in words
    rising = [dict(line) | {"loss": loss} for loss, line in enumerate(run.training, start=1)]
    assert "The training loss rose from 1.000 to" in report([make_run(training=rising)], title="t", metric="loss")


def test_the_summary_of_several_runs() -> None:
    words = Reader(report(eight_runs(), title="t", metric="loss")).words
    assert "8 runs: 1f1b, 2bw, wpipe, xpipe, 2 runs each." in words
    assert "xpipe was the fastest, 350.5 samples/s, and 2bw the slowest, 290.5 samples/s." in words
    assert "2bw waited the least, 7.5% of the time, and xpipe the most, 12.5%." in words
    assert "needed the least memory" not in words  # all hold the same
    assert "smallest bubble 2bw: 7.5%" in words
    finals = {name: [make_run(name, seed).final("loss") for seed in (0, 1)] for name in NAMES}
    assert f"differ by up to {max(max(pair) - min(pair) for pair in finals.values()):.3f}" in words
    two_runs = Reader(report([make_run("2bw"), make_run("wpipe")], title="t", metric="loss")).words
    assert "only one run of each, so small differences may be chance" in two_runs
