"""All measurements of several models, and their table."""

from __future__ import annotations

import pytest

from helpers.measuring import convnet, cross_entropy, unequal_batches
from tiltsam.lab.flatness import FlatnessPlan, compare, format_table, table_rows

QUICK = FlatnessPlan(
    std=(0.01, 0.1), num_samples=4, num_trace_samples=3, num_density_probes=2, num_points=5, plane=True
)


def test_compare_and_table_rows() -> None:
    flats = compare({"a": convnet(), "b": convnet()}, cross_entropy, unequal_batches(), QUICK)
    first, second = table_rows(flats, std=0.1)
    assert first["std"] == 0.1
    assert {k: v for k, v in first.items() if k != "model"} == {k: v for k, v in second.items() if k != "model"}
    assert first["λ1"] == float(flats[0].eigenpairs.values[0])  # type: ignore[union-attr]
    assert {"loss", "mean", "variance", "t-variance", "worst case", "adaptive", "trace", "trace error"} <= first.keys()
    text = format_table([first, second])
    assert text.splitlines()[0].split() == ["model", "a", "b"]
    assert "±" in text
    few = compare(
        {"a": convnet()}, cross_entropy, unequal_batches(), FlatnessPlan((0.1,), 2, 1.0, 0.05, 0.5, 0, 0, 0, 0, 1, 0)
    )
    assert "λ1" not in table_rows(few)[0]
    with pytest.raises(ValueError, match="models"):
        compare({}, cross_entropy, unequal_batches())


def test_format_table_separates_long_names():
    names = ["tsam num_samples=5 rho=0.05 seed 0", "tsam num_samples=5 rho=0.05 seed 1"]
    text = format_table([{"model": name, "loss": 1.0} for name in names])
    assert "  ".join(names) in text
    assert len({len(line) for line in text.splitlines()}) == 1


def test_format_table_wraps_to_width():
    names = [f"tsam lr=0.05 num_samples=5 rho=0.05 seed {seed}" for seed in range(7)]
    text = format_table([{"model": name, "loss": 1.0, "mean": 2.0, "mean error": 0.1} for name in names], width=90)
    assert max(len(line) for line in text.splitlines()) <= 90
    first, second, third = text.split("\n\n")  # three models fit beside each other
    lines = [line.split() for line in first.splitlines()]
    assert lines[0] == ["model", *["tsam", "lr=0.05"] * 3]
    assert " ".join(lines[2]) == "seed 0 seed 1 seed 2"
    assert lines[-1] == ["mean", *["2", "±", "0.1"] * 3]
    assert second.count("±") == 3
    assert third.count("±") == 1
    assert len(format_table([{"model": "a", "loss": 1.0}], width=1).splitlines()) == 2
