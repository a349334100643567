"""Records of made-up runs for the tests of the report, in the format that training writes."""

import json

from tiltsam.lab.config import TrainConfig
from tiltsam.lab.records import Record


def rows(epochs, score=0.8, loss=1.0, cost=1):
    """Return rows of metrics with numbers that have no short decimal form."""
    return [
        {
            "epoch": epoch,
            "steps": 10 * epoch,
            "passes": 10.0 * epoch * cost,
            "seconds": 0.7 * epoch * cost,
            "lr": 0.05,
            "train_loss": loss / epoch,
            "effective_sample_size": 2 + 1 / epoch,
            "validation_accuracy": (score - 0.01) * (1 - 1 / (3 * epoch)),
            "validation_loss": 1.1,
            "validation_ece": 0.13 / epoch,
            "validation_worst_class_accuracy": (score - 0.2) * (1 - 1 / (3 * epoch)),
            "test_accuracy": score * (1 - 1 / (3 * epoch)),
            "test_loss": 1.2 / epoch,
            "test_ece": 0.11 / epoch,
            "test_worst_class_accuracy": (score - 0.1) * (1 - 1 / (3 * epoch)),
        }
        for epoch in range(1, epochs + 1)
    ]


def write_run(out, *, lines=None, finished=True, notes="", flatness=None, **settings):
    """Write a run and return its folder; ``settings`` are fields of its config and options of its method."""
    config = TrainConfig.from_settings({"epochs": 6, **settings})
    folder = Record.of(out, config).folder
    folder.mkdir(parents=True)
    lines = rows(6) if lines is None else lines
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    (folder / "environment.json").write_text(json.dumps({"device": "cpu", "torch": "2.0"}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        final = lines[-1]
        best = {}
        if "validation_accuracy" in final:
            best = {"score_at_best_validation": final["test_accuracy"], "best_validation": final["validation_accuracy"]}
        result = final | {"metric": "accuracy", "score": final["test_accuracy"]} | best
        (folder / "result.json").write_text(json.dumps(result))
    if notes:
        (folder / "notes.txt").write_text(notes)
    if flatness is not None:
        (folder / "flatness.json").write_text(json.dumps(flatness))
    return folder


def flatness(scale=1.0, label="random direction"):
    """Return part of what ``tiltsam sharpness`` writes."""
    return {
        "about": {"task": "digits", "split": "train", "examples": 300},
        "loss": 0.3 * scale,
        "neighborhood": {
            "std": [0.005, 0.01, 0.1],
            "mean": [0.31 * scale, 0.33 * scale, 2.0 * scale],
            "variance": [1e-6 * scale, 1e-5 * scale, 0.1 * scale],
        },
        "worst_case": {"value": 0.05 * scale, "error": None},
        "rounding": {"bits": [8, 4], "losses": [0.5, 0.6 * scale]},
        "eigenvalues": {"values": [7.1 * scale, 6.2 * scale, 5.3 * scale]},
        "density": {"grid": [-1.0, 0.0, 4.0 * scale, 8.0 * scale], "values": [1e-12, 5.0, 0.01, 0.002]},
        "trace": {"value": 120.0 * scale, "error": 4.0},
        "slices": [{"label": label, "positions": [-1.0, 0.0, 1.0], "losses": [2.0 * scale, 0.3 * scale, 2.1 * scale]}],
    }


def write_runs(out, **everywhere):
    """Write three methods with three seeds, tsam with two tilts; tsam with t=20 leads significantly."""
    for seed in range(3):
        for method, options, score, spread, loss, cost in (
            ("erm", {}, 0.7, 0.004, 0.5, 1),
            ("sam", {}, 0.75, 0.005, 0.8, 2),
            ("tsam", {"t": 1.0}, 0.77, 0.006, 0.9, 6),
            ("tsam", {"t": 20.0}, 0.83, 0.003, 1.0, 6),
        ):
            lines = rows(6, score + spread * seed, loss + 0.01 * seed, cost)
            measured = flatness(1 / cost + 0.01 * seed)
            write_run(out, lines=lines, flatness=measured, method=method, seed=seed, **options, **everywhere)
    return out


def column(table, heading):
    """Return the cells of a table's column."""
    return [row[table.headings.index(heading)] for row in table.rows]
