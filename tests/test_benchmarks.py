"""The benchmarks measure what their labels say."""

import contextlib
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bench_overhead
import bench_step
import differences
import evidence
import tiltsam
from helpers.cases import Problem, sgd


@pytest.mark.parametrize("name", bench_step.our_methods((1, 3)))
def test_bench_step_rows_cost_the_passes_they_state(name):
    key, options, passes = bench_step.our_methods((1, 3))[name]
    problem = Problem(dropout=0.0)
    optimizer = tiltsam.METHODS[key](sgd(problem.model.parameters()), model=problem.model, **options)
    optimizer.step(problem.closure)
    info = optimizer.info
    forwards_alone = info.num_forwards - info.num_backwards
    assert info.num_backwards + forwards_alone / 3 == pytest.approx(passes)
    if samples := re.search(r"s=(\d)", name):
        assert info.losses.shape == torch.Size([int(samples[1])])


def test_bench_overhead_times_a_network_of_22_tensors():
    assert len(list(bench_overhead.Problem().model.parameters())) == 22
    for step in bench_overhead.candidates().values():
        step()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:weights are bfloat16")
def test_bench_scale_measures_and_draws(tmp_path, monkeypatch):
    bench_scale = pytest.importorskip("bench_scale")  # needs transformers
    pytest.importorskip("matplotlib")
    tiny = {"width": 32, "layers": 1, "heads": 2, "hidden": 64, "classes": 50, "batch": 1, "inner": 1}
    sizes = {k: replace(v, **tiny, length=8 if v.kind == "gpt" else 197) for k, v in bench_scale.SIZES.items()}
    monkeypatch.setattr(bench_scale, "SIZES", sizes)
    bench_scale.main(["--repeats", "1", "--out", str(tmp_path), "--only", "cpu-10m-*"])
    rows = json.loads((tmp_path / "scale.json").read_text())["rows"]
    assert {row["weights"] for row in rows} == {"fp32", "bf16", "lora"}
    for row in rows:
        if row["step"] in ("sam", "tsam s=3"):
            assert row["passes"] == {"sam": 2, "tsam s=3": 6}[row["step"]]
        if row["step"] in ("sam", "tsam s=3") and row["weights"] != "lora":
            copies = row["above"] / row["trained"] / (2 if row["weights"] == "bf16" else 4)
            assert copies == pytest.approx({"sam": 1, "tsam s=3": 2}[row["step"]], abs=0.5)  # the model is tiny
    bench_scale.main(["--figure", str(tmp_path / "scale.json")])
    assert (tmp_path / "scale.png").stat().st_size > 10_000


RECORDS = Path(differences.__file__).parent / "records"


def test_differences_are_paired_by_seed(capsys):
    """The numbers of docs/evidence.md: SAM's lead over ERM on digits, each at its best learning rate."""
    sam, erm = "sam lr=0.01 rho=0.5 average=false", "erm lr=0.001 average=false"
    differences.main([str(RECORDS / "2026-11-16_digits_below"), sam, "--minus", erm])
    assert capsys.readouterr().out.splitlines() == [
        "at the end: +1.49 ± 0.19 (10 seeds) [+1.06, +1.91]",
        "at the best epoch: +1.59 ± 0.28 (10 seeds) [+0.95, +2.22]",
        "test loss: -0.055 ± 0.004 (10 seeds) [-0.065, -0.045]",
    ]
    differences.main([str(RECORDS / "2026-11-16_digits_below"), erm])
    assert capsys.readouterr().out.startswith("at the end: 95.21 ± ")
    for query in ("sam lr=7", "sam lr=0.01"):
        with pytest.raises(SystemExit, match=query):
            differences.main([str(RECORDS / "2026-11-16_digits_below"), query])


@pytest.fixture(scope="module")
def evidence_output():
    """Return what ``evidence.py`` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        evidence.main([])
    return output.getvalue()


def test_evidence_page_has_the_tables_and_intervals_of_the_records(evidence_output):
    tables, printed = evidence_output.split("\nevidence_", 1)
    page = (RECORDS.parents[1] / "docs" / "evidence.md").read_text()
    for table in tables.strip().split("\n\n"):
        assert table in page
    intervals = re.findall(r"\[[−+]?[\d.]+, [−+]?[\d.]+\]", page)
    assert len(intervals) > 20
    assert [interval for interval in intervals if interval not in tables + printed] == []


@pytest.mark.parametrize("name", ["reproduce", "example-tilt"])
def test_pages_have_the_intervals_of_the_records(name, evidence_output):
    printed = evidence_output + (RECORDS / "2026-11-18_two_tilts_digits" / "two-tilts.md").read_text()
    page = (RECORDS.parents[1] / "docs" / f"{name}.md").read_text()
    intervals = re.findall(r"\[[−+]\d+\.\d\d, [−+]\d+\.\d\d\]", page)
    assert len(intervals) > 5
    assert [interval for interval in intervals if interval not in printed.replace("-", "−")] == []


def test_example_tilt_page_has_the_single_runs_of_the_records():
    page = (RECORDS.parents[1] / "docs" / "example-tilt.md").read_text()
    assert "\n".join(evidence.single_table()) in page


@pytest.mark.parametrize("record", sorted(path.name for path in RECORDS.iterdir()))
def test_records_are_listed_and_short(record):
    assert len((RECORDS / record / "README.md").read_text().splitlines()) <= 40
    assert f"records/{record}/README.md" in (RECORDS.parent / "README.md").read_text()
