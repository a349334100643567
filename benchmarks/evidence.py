"""Print the tables and intervals of docs/evidence.md and draw its figures, from the runs in records/.

    python benchmarks/evidence.py                           # the tables, and the differences of each figure
    python benchmarks/evidence.py --figures docs/figures    # draws evidence_*.png, too

Runs are selected as by ``differences.py``. Scores (times 100) and test losses are those at the end of training.
Differences are paired by seed; intervals are 95% of Student's t over seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from differences import select_runs
from record import read_runs
from tiltsam.lab.paper.numbers import IMAGES, SAMPLES
from tiltsam.lab.stats import Mean, confidence_interval, mean_of, paired_difference

RECORDS = Path(__file__).parent / "records"
NOISY, COSINE, MINILM = "2026-11-15_noisy", "2026-11-17_noisy_cosine", "2026-11-15_minilm"
BELOW, CNN, DIGITS = "2026-11-16_digits_below", "2026-11-16_digits_cnn", "2026-11-15_digits"
SPLIT, TILTS, TILTS_CIFAR = "2026-11-15_digits_split", "2026-11-17_two_tilts", "2026-11-18_two_tilts_cifar"
TILTS_MINILM = "2026-11-18_two_tilts_minilm"
START, BASELINES = "2026-11-18_digits_start", "2026-11-18_digits_baselines"
PROTOCOL, CLEAN, SAMPLING = "2026-11-18_protocol", "2026-11-19_protocol_clean", "2026-11-18_digits_sampling"
CHOSEN, LONGER = "2026-11-20_protocol_noisy", "2026-11-20_protocol_longer"
TILTS_DIGITS, VIT = "2026-11-18_two_tilts_digits", "2026-11-19_digits_vit"
RHOS = (0.3, 0.4, 0.5, 0.6, 0.7)
METRICS = {"accuracy": ("score", 100, 2), "test loss": ("test_loss", 1, 3)}  # key of a result, factor, digits


class Runs(NamedTuple):
    """Runs of one setting, by seed."""

    query: str
    records: tuple[str, ...] = (NOISY,)

    def results(self) -> dict[Hashable, dict[str, Any]]:
        """Return the results by seed."""
        entries = [run for name in self.records for run in _finished(name)]
        return {seed: run["result"] for seed, run in select_runs(entries, self.query).items()}

    def values(self, metric: str) -> dict[Hashable, float]:
        """Return a metric at the end of training, by seed."""
        key, factor, _ = METRICS[metric]
        return {seed: factor * result[key] for seed, result in self.results().items()}


Comparison: TypeAlias = tuple[str, Runs, Runs]
"""What is compared, the runs, the runs to subtract."""


@cache
def _all_runs(record: str) -> list[dict[str, Any]]:
    return list(read_runs(RECORDS / record / "runs.jsonl.gz"))


@cache
def _finished(record: str) -> list[dict[str, Any]]:
    return [run for run in _all_runs(record) if "result" in run]


def digits_tilts(method: str, noise: float, tilt: float = 0.0, warmup: float = 0.0, **chosen: float) -> Runs:
    """Return the runs of the sweep without label smoothing, with the settings that it chose."""
    settings = {"noise": noise, "example_tilt": tilt, "example_tilt_warmup": warmup, **chosen}
    query = " ".join(f"{name}={value}" for name, value in settings.items())
    return Runs(f"{method} task=digits label_smoothing=0.0 {query}", (TILTS,))


def baseline(method: str, noise: float, schedule: str = "constant", tilt: float = 0.0, **chosen: float) -> Runs:
    """Return the runs of the sweep of baselines on digits, with the settings that it chose."""
    settings = {"noise": noise, "schedule": schedule, "example_tilt": tilt, "rho_from": 0.0, **chosen}
    query = " ".join(f"{name}={value}" for name, value in settings.items())
    return Runs(f"{method} average=false {query}", (BASELINES,))


def in_folder(record: str, folder: str) -> Runs:
    """Return the runs of a folder of a record, which is named TASK/METHOD-DIGEST."""
    return Runs(f"{folder.partition('/')[2].partition('-')[0]} folder={folder}", (record,))


def first_study(folder: str) -> Runs:
    """Return the runs of a folder of the first record about digits."""
    return in_folder(DIGITS, f"digits/{folder}")


def two_tilts(folder: str) -> Runs:
    """Return the runs of a folder of the record of ``tiltsam reproduce two-tilts``."""
    return in_folder(TILTS_DIGITS, f"digits/{folder}")


def vit(folder: str) -> Runs:
    """Return the runs of a folder of the record of a vision transformer on digits."""
    return in_folder(VIT, f"digits/{folder}")


def parts(number: int, rho: float) -> Runs:
    """Return the runs of m-SAM on digits."""
    return Runs(f"tsam split=true num_samples={number} radius=0.0 t=0.0 rho={rho} average=false", (SPLIT,))


def sampled(digest: str) -> Runs:
    """Return the runs of TSAM with this digest in the record about its samplers on digits."""
    return in_folder(SAMPLING, f"digits/tsam-{digest}")


def minilm(folder: str) -> Runs:
    """Return the runs of a folder of the record of MiniLM."""
    return in_folder(MINILM, folder)


def minilm_noisy(folder: str) -> Runs:
    """Return the runs of a folder of the record of MiniLM with noisy labels."""
    return in_folder(TILTS_MINILM, folder)


def tilted(folder: str) -> Runs:
    """Return the runs of a folder of the record of tilts on CIFAR-100."""
    return in_folder(TILTS_CIFAR, folder)


# Noisy CIFAR-100: what the trials chose (tables.md of the record), with three seeds or more.
ERM = Runs("erm lr=0.1 average=false epochs=118.0")
SAM = Runs("sam folder=cifar100-noisy/sam-73af265261")
TSAM1 = Runs("tsam folder=cifar100-noisy/tsam-505f0fdf7a")
TSAM3 = Runs("tsam folder=cifar100-noisy/tsam-dc267a4515")
PGN = Runs("pgn folder=cifar100-noisy/pgn-c501b189a6")
RSAM = Runs("rsam folder=cifar100-noisy/rsam-2a8c1466cd")
ESAM2 = Runs("esam2 folder=cifar100-noisy/esam2-d8cdfa7af7")
ERM_COSINE = Runs("erm schedule=cosine lr=0.1", (COSINE,))
SAM_COSINE = Runs("sam schedule=cosine lr=0.1 rho=0.2")
ERM_AVERAGED = Runs("erm lr=0.1 average=true epochs=116.3")
SAM_AVERAGED = Runs("sam lr=0.1 rho=0.2 average=true epochs=59.5")
TSAM_AVERAGED = Runs("tsam average=true")
# With a tilt over examples, and without one at the same seeds.
SAM_FIVE = Runs(SAM.query, (NOISY, TILTS_CIFAR))
ERM_AVERAGED_FIVE = Runs("erm folder=cifar100-noisy/erm-edf8d6d57b", (NOISY, TILTS_CIFAR))
SAM_TILTED = Runs("sam example_tilt=-0.5", (TILTS_CIFAR,))
ERM_TILTED = Runs("erm task=cifar100-noisy noise=null example_tilt=-0.4 example_tilt_warmup=0.0", (TILTS, TILTS_CIFAR))
ERM_TILTED_WARM = tilted("cifar100-noisy/erm-96887bb22c")
ERM_TILTED_HALF = tilted("cifar100-noisy/erm-15150149f7")
ERM_AVERAGED_40 = tilted("cifar100-noisy/erm-4f7b95b101")
SST2_ERM, SST2_SAM = minilm_noisy("glue-sst2/erm-898cdbd27a"), minilm_noisy("glue-sst2/sam-3f504d93e0")
QNLI_ERM, QNLI_SAM = minilm_noisy("glue-qnli/erm-980a03931a"), minilm_noisy("glue-qnli/sam-410ad81cd2")

# Method, settings, epochs, runs; in the order of the page.
MAIN = [
    ("ERM", "lr 0.1", "118", ERM),
    ("SAM", "lr 0.03, ρ 0.2", "60", SAM),
    ("TSAM, s=1", "lr 0.03, ρ 0.2, R 20", "58.8", TSAM1),
    ("TSAM, s=3", "lr 0.03, ρ 0.1, R 20, t 20", "20", TSAM3),
    ("PGN", "lr 0.03, ρ 0.2, α 0.5", "58.9", PGN),
    ("RSAM", "lr 0.03, ρ 0.2, λ 2", "50.1", RSAM),
    ("ESAM2", "lr 0.03, ρ 0.1, K 3", "38.5", ESAM2),
    ("ERM, cosine", "lr 0.1", "118", ERM_COSINE),
    ("SAM, cosine", "lr 0.1, ρ 0.2", "60", SAM_COSINE),
    ("ERM, averaged", "lr 0.1", "116.3", ERM_AVERAGED),
    ("SAM, averaged", "lr 0.1, ρ 0.2", "59.5", SAM_AVERAGED),
    ("TSAM, s=1, averaged", "lr 0.1, ρ 0.2, R 10", "58.8", TSAM_AVERAGED),
    ("SAM, τ = −0.5", "lr 0.03, ρ 0.2", "58.15", SAM_TILTED),
    ("ERM, averaged, τ = −0.4", "lr 0.1", "116.3", ERM_TILTED),
    ("ERM, averaged, τ = −0.2, warm-up", "lr 0.1", "116.3", ERM_TILTED_HALF),
]

# Tilts, and GCE instead of one, with seed 0 only: what is compared, the runs, the same without a tilt.
SINGLE: list[Comparison] = [
    ("20% noisy, ERM, τ = −0.4", tilted("cifar100-noisy/erm-0c9f4fbac2"), ERM),
    ("20% noisy, TSAM (s=1), τ = −0.5", tilted("cifar100-noisy/tsam-869406ffb1"), TSAM1),
    ("20% noisy, ERM, cosine, τ = −0.4", tilted("cifar100-noisy/erm-8f72bcafcf"), ERM_COSINE),
    ("20% noisy, SAM, cosine, τ = −0.4", tilted("cifar100-noisy/sam-e2fc670efc"), SAM_COSINE),
    ("20% noisy, averaged SAM, τ = −0.4", tilted("cifar100-noisy/sam-fa691d77b3"), SAM_AVERAGED),
    ("20% noisy, averaged TSAM (s=1), τ = −0.4", tilted("cifar100-noisy/tsam-39b9ee817a"), TSAM_AVERAGED),
    (
        "20% noisy, averaged ERM, ESS 0.8, no warm-up",
        Runs("erm folder=cifar100-noisy/erm-4dfb399168", (TILTS,)),
        ERM_AVERAGED,
    ),
    ("20% noisy, averaged ERM, GCE, q = 0.7", tilted("cifar100-noisy/erm-3cc5cda3d4"), ERM_AVERAGED),
    ("20% noisy, averaged ERM, GCE, q = 0.4", tilted("cifar100-noisy/erm-c77f0c1421"), ERM_AVERAGED),
    ("20% noisy, averaged ERM, GCE, q = 0.2", tilted("cifar100-noisy/erm-8c7f872ede"), ERM_AVERAGED),
    ("40% noisy, averaged ERM, τ = −0.2", tilted("cifar100-noisy/erm-a5b8c8a565"), ERM_AVERAGED_40),
    ("40% noisy, averaged ERM, ESS 0.6", tilted("cifar100-noisy/erm-36716b35a5"), ERM_AVERAGED_40),
]

# Figure, heading, rows.
DIFFERENCES: dict[str, dict[str, list[Comparison]]] = {
    "ascent": {
        "SAM − ERM, noisy labels": [
            ("CIFAR-100", SAM, ERM),
            ("CIFAR-100, cosine schedules", SAM_COSINE, ERM_COSINE),
            ("CIFAR-100, SAM at a constant rate, ERM with a cosine", SAM, ERM_COSINE),
            ("CIFAR-100, averaged weights", SAM_AVERAGED, ERM_AVERAGED),
            (
                "digits_below",
                Runs("sam lr=0.01 rho=0.5 average=false", (BELOW,)),
                Runs("erm lr=0.001 average=false", (BELOW,)),
            ),
            ("digits_baselines", baseline("sam", 0.2, lr=0.01, rho=0.4), baseline("erm", 0.2, lr=0.001)),
            (
                "digits_baselines, cosine schedules",
                baseline("sam", 0.2, "cosine", lr=0.03, rho=0.6),
                baseline("erm", 0.2, "cosine", lr=0.003),
            ),
            ("two_tilts_digits", two_tilts("sam-6e427c7e4c"), two_tilts("erm-78fb112f91")),
            ("two_tilts_digits, 40%", two_tilts("sam-354c0692ce"), two_tilts("erm-dc6a8f6204")),
            (
                "digits_cnn",
                Runs("sam lr=0.03 rho=0.8 average=false", (CNN,)),
                Runs("erm lr=0.001 average=false", (CNN,)),
            ),
            (
                "digits_cnn, averaged weights",
                Runs("sam lr=0.03 rho=0.8 average=true", (CNN,)),
                Runs("erm lr=0.001 average=true", (CNN,)),
            ),
            (
                "digits_below, averaged weights",
                Runs("sam lr=0.01 rho=0.5 average=true", (BELOW,)),
                Runs("erm lr=0.001 average=true", (BELOW,)),
            ),
            (
                "digits_baselines, averaged weights",
                Runs("sam folder=digits/sam-c6ac755015", (BASELINES,)),
                Runs("erm folder=digits/erm-3b2b6e60fc", (BASELINES,)),
            ),
            ("two_tilts_digits, averaged weights", two_tilts("sam-498026f454"), two_tilts("erm-f499f8495e")),
            ("two_tilts_digits, 40%, averaged weights", two_tilts("sam-e3ce884108"), two_tilts("erm-b7051100d7")),
            ("digits_vit, cosine schedules", vit("sam-7b88592a35"), vit("erm-1aa31af89e")),
            ("digits_vit, averaged weights", vit("sam-20234b2877"), vit("erm-7a5adaa8e5")),
            ("MiniLM, SST-2", SST2_SAM, SST2_ERM),
            ("MiniLM, QNLI", QNLI_SAM, QNLI_ERM),
        ],
        "SAM − ERM, clean labels": [
            ("digits_baselines", baseline("sam", 0.0, lr=0.1, rho=0.2), baseline("erm", 0.0, lr=0.003)),
            ("two_tilts_digits", two_tilts("sam-b1c9ea2cc2"), two_tilts("erm-5c6d7ac3f7")),
            (
                "digits_baselines, cosine schedules",
                baseline("sam", 0.0, "cosine", lr=0.03, rho=0.4),
                baseline("erm", 0.0, "cosine", lr=0.006),
            ),
            ("digits_vit, cosine schedules", vit("sam-a5edead15e"), vit("erm-dbe5280b25")),
            ("digits_vit, averaged weights", vit("sam-0fa5cdda77"), vit("erm-a411f1853f")),
            ("RTE", minilm("glue-rte/sam-b423ca7fb9"), minilm("glue-rte/erm-1f471a06e2")),
            ("MRPC", minilm("glue-mrpc/sam-06188ba257"), minilm("glue-mrpc/erm-386d96b0fa")),
            ("STS-B", minilm("glue-stsb/sam-f070023a97"), minilm("glue-stsb/erm-6aba6ff916")),
            ("CoLA", minilm("glue-cola/sam-993122395b"), minilm("glue-cola/erm-fc733f2de6")),
        ],
        "SAM in the last quarter of training only − SAM": [
            (
                "digits_baselines, noisy labels",
                baseline("sam", 0.2, lr=0.01, rho=0.6, rho_from=0.75),
                baseline("sam", 0.2, lr=0.01, rho=0.4),
            ),
            (
                "digits_baselines, clean labels",
                baseline("sam", 0.0, lr=0.03, rho=0.6, rho_from=0.75),
                baseline("sam", 0.0, lr=0.1, rho=0.2),
            ),
        ],
        "other methods − SAM (its ρ below the best), digits": [
            ("ESAM2", first_study("esam2-bcebe052fe"), first_study("sam-bfec8a2b0c")),
            ("PGN", first_study("pgn-62187e1ec0"), first_study("sam-bfec8a2b0c")),
            ("RSAM", first_study("rsam-17669fb483"), first_study("sam-bfec8a2b0c")),
        ],
    },
    "samples": {
        "several samples, digits": [
            ("s = 3 − SAM, equal passes", first_study("tsam-8b832cf25a"), first_study("sam-bfec8a2b0c")),
            (
                "s = 3 − SAM, equal passes, digits_sampling",
                sampled("c4df1a2584"),
                Runs("sam folder=digits/sam-7978dcfda4", (SAMPLING,)),
            ),
            (
                "s = 2 with a shared ascent − SAM, equal passes",
                first_study("tsam-35f249ac0e"),
                first_study("sam-bfec8a2b0c"),
            ),
            ("s = 3 − s = 1, equal steps", first_study("tsam-e5a5a11456"), first_study("tsam-a9be145e87")),
            ("s = 5 − s = 1, equal steps", first_study("tsam-af7b72497a"), first_study("tsam-a9be145e87")),
        ],
        "tilt over three samples, digits": [
            ("t = 20 − t = 0", first_study("tsam-e5a5a11456"), first_study("tsam-491908054f")),
            ("t = 1000 − t = 0", first_study("tsam-0b313a6d4b"), first_study("tsam-491908054f")),
            ("t from 0 to 20 − t = 20", sampled("d959e5d9f8"), sampled("c4df1a2584")),
        ],
        "sampling, digits, s = 3, equal passes": [
            ("uniform sampling − Algorithm 2", sampled("5708107447"), sampled("c4df1a2584")),
            ("HMC − Algorithm 2", sampled("78b25de2d0"), sampled("c4df1a2584")),
            ("N = 2 − N = 1", sampled("c40f487e64"), sampled("c4df1a2584")),
            ("N = 3 − N = 1", sampled("8112f78fdd"), sampled("c4df1a2584")),
        ],
        "TSAM with one sample − SAM": [
            ("CIFAR-100", TSAM1, SAM),
            ("CIFAR-100, averaged weights", TSAM_AVERAGED, SAM_AVERAGED),
            ("digits", first_study("tsam-a9be145e87"), first_study("sam-bfec8a2b0c")),
            ("digits, ρ 0.6 − SAM with ρ 0.5", first_study("tsam-fb1c63da58"), first_study("sam-bfec8a2b0c")),
            ("digits, ρ and R best on the test set", first_study("tsam-55a00838e8"), first_study("tsam-e8aa3441f0")),
            (
                "digits_baselines, another ρ",
                Runs("tsam folder=digits/tsam-f5f5ec895b", (BASELINES,)),
                baseline("sam", 0.2, lr=0.01, rho=0.4),
            ),
            ("digits_vit, clean, cosine, other lr and ρ", vit("tsam-75ea524173"), vit("sam-a5edead15e")),
            ("digits_vit, clean, averaged", vit("tsam-6bd1ea0757"), vit("sam-0fa5cdda77")),
            ("digits_vit, cosine, another lr", vit("tsam-e8f73bae03"), vit("sam-7b88592a35")),
            ("digits_vit, averaged", vit("tsam-9d3ddb4b38"), vit("sam-20234b2877")),
            ("digits_sampling, R 4", sampled("d31a20aab2"), Runs("sam folder=digits/sam-7978dcfda4", (SAMPLING,))),
            (
                "digits_baselines, cosine, another lr",
                Runs("tsam folder=digits/tsam-92ee3d44d9", (BASELINES,)),
                baseline("sam", 0.2, "cosine", lr=0.03, rho=0.6),
            ),
            ("RTE, other lr and ρ", minilm("glue-rte/tsam-cbfdaa4c47"), minilm("glue-rte/sam-b423ca7fb9")),
            ("MRPC", minilm("glue-mrpc/tsam-e4bb0d6537"), minilm("glue-mrpc/sam-06188ba257")),
            ("STS-B, another ρ", minilm("glue-stsb/tsam-018e36e72b"), minilm("glue-stsb/sam-f070023a97")),
            ("CoLA, other lr and ρ", minilm("glue-cola/tsam-f42c2246c9"), minilm("glue-cola/sam-993122395b")),
            ("CoLA, equal lr and ρ", minilm("glue-cola/tsam-f42c2246c9"), minilm("glue-cola/tsam-ae9b56e3c3")),
        ],
    },
    "start": {
        f"TSAM with one sample and R = {radius} − SAM, digits_start": [
            (f"ρ = {rho}", Runs(f"tsam rho={rho} radius={radius}", (START,)), Runs(f"sam rho={rho}", (START,)))
            for rho in RHOS
        ]
        for radius in (2, 4)
    },
    "radius": {
        f"R = {radius} − R = 0, MiniLM": [
            (task, minilm(f"glue-{folder}/tsam-{first}"), minilm(f"glue-{folder}/tsam-{second}"))
            for task, folder, first, second in rows
        ]
        for radius, rows in (
            (
                24,
                (
                    ("RTE", "rte", "4bced8e6b1", "f8054adfeb"),
                    ("MRPC", "mrpc", "b24c97f1df", "f5e4c85965"),
                    ("STS-B", "stsb", "b3c7293940", "e7cb4e9496"),
                    ("CoLA", "cola", "8b90fa205f", "ae9b56e3c3"),
                ),
            ),
            (
                48,
                (
                    ("RTE", "rte", "3e86433f38", "f8054adfeb"),
                    ("MRPC", "mrpc", "46c42b1408", "f5e4c85965"),
                    ("STS-B", "stsb", "e18ddb3461", "e7cb4e9496"),
                    ("CoLA", "cola", "dd9f1c3803", "ae9b56e3c3"),
                ),
            ),
        )
    },
    "average": {
        "averaged − final weights": [
            ("CIFAR-100, ERM", ERM_AVERAGED, ERM),
            ("CIFAR-100, SAM", SAM_AVERAGED, SAM),
            (
                "digits_below, ERM",
                Runs("erm lr=0.001 average=true", (BELOW,)),
                Runs("erm lr=0.001 average=false", (BELOW,)),
            ),
            (
                "digits_below, SAM",
                Runs("sam lr=0.01 rho=0.5 average=true", (BELOW,)),
                Runs("sam lr=0.01 rho=0.5 average=false", (BELOW,)),
            ),
            (
                "digits_baselines, ERM",
                Runs("erm folder=digits/erm-3b2b6e60fc", (BASELINES,)),
                baseline("erm", 0.2, lr=0.001),
            ),
            (
                "digits_baselines, SAM",
                Runs("sam folder=digits/sam-c6ac755015", (BASELINES,)),
                baseline("sam", 0.2, lr=0.01, rho=0.4),
            ),
            (
                "digits_cnn, SAM",
                Runs("sam lr=0.03 rho=0.8 average=true", (CNN,)),
                Runs("sam lr=0.03 rho=0.8 average=false", (CNN,)),
            ),
            ("two_tilts_digits, ERM", two_tilts("erm-f499f8495e"), two_tilts("erm-78fb112f91")),
            ("two_tilts_digits, SAM", two_tilts("sam-498026f454"), two_tilts("sam-6e427c7e4c")),
            ("two_tilts_digits, 40%, ERM", two_tilts("erm-b7051100d7"), two_tilts("erm-dc6a8f6204")),
            ("two_tilts_digits, 40%, SAM", two_tilts("sam-e3ce884108"), two_tilts("sam-354c0692ce")),
            ("RTE, ERM", minilm("glue-rte/erm-2ae760bedf"), minilm("glue-rte/erm-1f471a06e2")),
            ("MRPC, ERM", minilm("glue-mrpc/erm-c086dff91c"), minilm("glue-mrpc/erm-386d96b0fa")),
            ("STS-B, ERM", minilm("glue-stsb/erm-ea9e50747e"), minilm("glue-stsb/erm-6aba6ff916")),
            ("CoLA, ERM", minilm("glue-cola/erm-e1c505bef6"), minilm("glue-cola/erm-fc733f2de6")),
            ("RTE, SAM", minilm("glue-rte/sam-d012b2a567"), minilm("glue-rte/sam-b423ca7fb9")),
            ("MRPC, SAM", minilm("glue-mrpc/sam-32761fc0e6"), minilm("glue-mrpc/sam-06188ba257")),
            ("STS-B, SAM", minilm("glue-stsb/sam-949f18390f"), minilm("glue-stsb/sam-f070023a97")),
            ("CoLA, SAM", minilm("glue-cola/sam-7452d16b37"), minilm("glue-cola/sam-993122395b")),
        ],
        "averaged, constant rate − final weights, cosine schedule": [
            ("CIFAR-100, ERM", ERM_AVERAGED, ERM_COSINE),
            ("CIFAR-100, SAM", SAM_AVERAGED, SAM_COSINE),
            ("digits_vit, clean, ERM", vit("erm-a411f1853f"), vit("erm-dbe5280b25")),
            ("digits_vit, clean, SAM, other lr and ρ", vit("sam-0fa5cdda77"), vit("sam-a5edead15e")),
            ("digits_vit, ERM, another lr", vit("erm-7a5adaa8e5"), vit("erm-1aa31af89e")),
            ("digits_vit, SAM, another lr", vit("sam-20234b2877"), vit("sam-7b88592a35")),
        ],
        "averaged ERM − SAM": [
            ("CIFAR-100", ERM_AVERAGED, SAM),
            ("RTE", minilm("glue-rte/erm-2ae760bedf"), minilm("glue-rte/sam-b423ca7fb9")),
            ("MRPC", minilm("glue-mrpc/erm-c086dff91c"), minilm("glue-mrpc/sam-06188ba257")),
            ("STS-B", minilm("glue-stsb/erm-ea9e50747e"), minilm("glue-stsb/sam-f070023a97")),
            ("CoLA", minilm("glue-cola/erm-e1c505bef6"), minilm("glue-cola/sam-993122395b")),
        ],
    },
    "parts": {
        "m-SAM − SAM": [
            ("digits_split, 4 sub-batches", parts(4, 0.4), Runs("tsam num_samples=1 radius=0.0 rho=0.7", (SPLIT,))),
            ("digits_split, 8 sub-batches", parts(8, 0.25), Runs("tsam num_samples=1 radius=0.0 rho=0.7", (SPLIT,))),
            ("RTE, 4 sub-batches", minilm("glue-rte/tsam-211007391c"), minilm("glue-rte/sam-b423ca7fb9")),
            ("MRPC, 4 sub-batches", minilm("glue-mrpc/tsam-e8af5201c6"), minilm("glue-mrpc/sam-06188ba257")),
            ("STS-B, 4 sub-batches", minilm("glue-stsb/tsam-dca319a455"), minilm("glue-stsb/sam-f070023a97")),
            ("CoLA, 4 sub-batches", minilm("glue-cola/tsam-d9f71bb066"), minilm("glue-cola/sam-993122395b")),
        ],
    },
    "example_tilt": {
        "20% noisy labels": [
            ("CIFAR-100, SAM, τ = −0.5, no warm-up", SAM_TILTED, SAM_FIVE),
            ("CIFAR-100, averaged ERM, τ = −0.4, no warm-up", ERM_TILTED, ERM_AVERAGED_FIVE),
            ("CIFAR-100, averaged ERM, τ = −0.4", ERM_TILTED_WARM, ERM_AVERAGED_FIVE),
            ("CIFAR-100, averaged ERM, τ = −0.2", ERM_TILTED_HALF, ERM_AVERAGED_FIVE),
            (
                "two_tilts, ERM, τ = −1",
                digits_tilts("erm", 0.2, -1.0, 0.3, lr=0.003),
                digits_tilts("erm", 0.2, lr=0.001),
            ),
            ("two_tilts_digits, ERM, τ = −1", two_tilts("erm-d507ce2a77"), two_tilts("erm-78fb112f91")),
            ("two_tilts_digits, SAM, τ = −1", two_tilts("sam-4918b1310a"), two_tilts("sam-6e427c7e4c")),
            (
                "digits_baselines, ERM, cosine, τ = −1",
                baseline("erm", 0.2, "cosine", -1.0, lr=0.006),
                baseline("erm", 0.2, "cosine", lr=0.003),
            ),
            (
                "digits_baselines, SAM, cosine, τ = −1",
                baseline("sam", 0.2, "cosine", -1.0, lr=0.1, rho=0.4),
                baseline("sam", 0.2, "cosine", lr=0.03, rho=0.6),
            ),
            ("MiniLM, SST-2, ERM, τ = −0.5", minilm_noisy("glue-sst2/erm-4a90012af5"), SST2_ERM),
            ("MiniLM, SST-2, SAM, τ = −0.5", minilm_noisy("glue-sst2/sam-5a0c5b8671"), SST2_SAM),
            ("MiniLM, QNLI, ERM, τ = −0.5", minilm_noisy("glue-qnli/erm-29aa3c2798"), QNLI_ERM),
            ("MiniLM, QNLI, SAM, τ = −0.5", minilm_noisy("glue-qnli/sam-7a25abf16c"), QNLI_SAM),
        ],
        "40% noisy labels": [
            (
                "CIFAR-100, averaged ERM, τ = −0.4",
                tilted("cifar100-noisy/erm-073dfe6670"),
                ERM_AVERAGED_40,
            ),
            (
                "two_tilts, ERM, τ = −1",
                digits_tilts("erm", 0.4, -1.0, 0.3, lr=0.003),
                digits_tilts("erm", 0.4, lr=0.001),
            ),
            (
                "two_tilts, SAM, τ = −1",
                digits_tilts("sam", 0.4, -1.0, 0.3, lr=0.03, rho=0.2),
                digits_tilts("sam", 0.4, lr=0.01, rho=0.5),
            ),
            ("two_tilts_digits, ERM, τ = −1", two_tilts("erm-d0c07fa5d1"), two_tilts("erm-dc6a8f6204")),
            ("two_tilts_digits, SAM, τ = −1", two_tilts("sam-96771080ef"), two_tilts("sam-354c0692ce")),
        ],
        "clean labels": [
            (
                "CIFAR-100, averaged ERM, τ = −0.4",
                tilted("cifar100/erm-65304bb378"),
                tilted("cifar100/erm-5947c6cdd7"),
            ),
            (
                "CIFAR-100, averaged ERM, τ = −0.2",
                tilted("cifar100/erm-935e07eba6"),
                tilted("cifar100/erm-5947c6cdd7"),
            ),
            (
                "two_tilts, ERM, τ = −1",
                digits_tilts("erm", 0.0, -1.0, 0.3, lr=0.03),
                digits_tilts("erm", 0.0, lr=0.03),
            ),
            (
                "digits_baselines, ERM, cosine, τ = −1",
                baseline("erm", 0.0, "cosine", -1.0, lr=0.006),
                baseline("erm", 0.0, "cosine", lr=0.006),
            ),
            (
                "two_tilts, SAM, τ = −1",
                digits_tilts("sam", 0.0, -1.0, 0.3, lr=0.03, rho=0.2),
                digits_tilts("sam", 0.0, lr=0.03, rho=0.5),
            ),
            (
                "digits_baselines, SAM, cosine, τ = −1",
                baseline("sam", 0.0, "cosine", -1.0, lr=0.1, rho=0.4),
                baseline("sam", 0.0, "cosine", lr=0.03, rho=0.4),
            ),
            (
                "two_tilts, SAM, τ = −1, no warm-up",
                digits_tilts("sam", 0.0, -1.0, 0.0, lr=0.03, rho=0.8),
                digits_tilts("sam", 0.0, lr=0.03, rho=0.5),
            ),
            ("two_tilts_digits, ERM, τ = −1", two_tilts("erm-7d50e93ad1"), two_tilts("erm-5c6d7ac3f7")),
            ("two_tilts_digits, SAM, τ = −1", two_tilts("sam-d45395a6ff"), two_tilts("sam-b1c9ea2cc2")),
        ],
    },
}


def difference(metric: str, first: Runs, second: Runs) -> Mean:
    """Return the difference of a metric, paired by seed."""
    return paired_difference(first.values(metric), second.values(metric))


def format_interval(mean: Mean, digits: int, sign: str = "") -> str:
    """Return ``value [low, high]``."""
    low, high = confidence_interval(mean)
    return f"{mean.value:{sign}z.{digits}f} [{low:{sign}z.{digits}f}, {high:{sign}z.{digits}f}]".replace("-", "−")


def format_difference(metric: str, first: Runs, second: Runs) -> str:
    """Return a difference with its interval."""
    return format_interval(difference(metric, first, second), METRICS[metric][2], "+")


def format_row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


class PaperRow(NamedTuple):
    """A row of the paper's table, and our run."""

    paper: str | None
    """Its name in the paper; None if it is not in it."""
    label: str
    settings: str
    record: str = ""
    query: str = ""
    """Selects the run; empty: not run."""
    epochs: float | None = None
    """Show the run after so many epochs; None: at its end. The learning rate is constant."""

    def metrics(self) -> list[dict[str, Any]]:
        """Return the run's evaluations."""
        (run,) = select_runs(_all_runs(self.record), self.query).values()
        return [row for row in run["metrics"] if self.epochs is None or row["epoch"] <= self.epochs]


PAPER_CLEAN = [
    PaperRow("erm", "ERM", "lr 0.01", CLEAN, "erm epochs=100.0 lr=0.01"),
    PaperRow("sam", "SAM", "lr 0.01, ρ 0.05", CLEAN, "sam epochs=100.0"),
    PaperRow(None, "TSAM, s=1", "lr 0.03, ρ 0.1", CLEAN, "tsam epochs=100.0"),
    PaperRow("s=3", "TSAM, s=3", "t 20"),
    PaperRow("s=5", "TSAM, s=5", "t 20"),
    PaperRow(None, "SAM, 200 epochs", "lr 0.01, ρ 0.05", LONGER, "sam epochs=300.0", 200),
    PaperRow(None, "SAM, 300 epochs", "lr 0.01, ρ 0.05", LONGER, "sam epochs=300.0"),
    PaperRow("esam1", "ESAM1", ""),
    PaperRow(None, "ERM, cosine", "lr 0.1", CLEAN, "erm epochs=100.0 lr=0.1"),
    PaperRow(None, "SAM, cosine, 50 epochs", "lr 0.1, ρ 0.1", LONGER, "sam schedule=cosine"),
]
PAPER_NOISY = [
    PaperRow("erm", "ERM", "lr 0.02", CHOSEN, "erm epochs=100.0"),
    PaperRow("sam", "SAM", "lr 0.03, ρ 0.1", CHOSEN, "sam epochs=100.0"),
    PaperRow(None, "TSAM, s=1", "lr 0.03, ρ 0.1", CHOSEN, "tsam epochs=100.0"),
    PaperRow("s=3", "TSAM, s=3", "t 1"),
    PaperRow("s=5", "TSAM, s=5", "t 1"),
    PaperRow("esam1", "ESAM1", ""),
    PaperRow(None, "ERM", "lr 0.01", PROTOCOL, "erm"),
    PaperRow(None, "SAM", "lr 0.01, ρ 0.1", PROTOCOL, "sam rho=0.1"),
    PaperRow(None, "TSAM, s=1", "lr 0.01, ρ 0.1", PROTOCOL, "tsam num_samples=1 rho=0.1"),
    PaperRow(None, "TSAM, s=3", "lr 0.01, ρ 0.1, t 0", PROTOCOL, "tsam num_samples=3 t=0"),
    PaperRow(None, "TSAM, s=3", "lr 0.01, ρ 0.1, t 20", PROTOCOL, "tsam num_samples=3 t=20"),
    PaperRow(None, "SAM, 90 epochs", "lr 0.01, ρ 0.2", PROTOCOL, "sam rho=0.2"),
    PaperRow(None, "TSAM, s=1, 80 epochs", "lr 0.01, ρ 0.2", PROTOCOL, "tsam num_samples=1 rho=0.2"),
]


def paper_table(column: str, rows: Sequence[PaperRow]) -> list[str]:
    """Return a column of the paper's tables next to our runs with its settings."""
    printed = {**IMAGES[column], **SAMPLES[column]}
    heading = ["method", "settings", "paper", "ours", "best epoch", "last five", "test loss", "ECE"]
    lines = [format_row(heading), "|---" * len(heading) + "|"]
    for row in rows:
        paper = "–" if row.paper is None else f"{printed[row.paper][0].value:.2f}"
        ours = _cells(row.metrics()) if row.query else ["not run", "", "", "", ""]
        lines.append(format_row([row.label, row.settings, paper, *ours]))
    return lines


def _cells(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the cells of a run: test accuracy at the end, at the best epoch and in the last five; loss; ECE."""
    accuracies = [100 * row["test_accuracy"] for row in metrics]
    last, best = metrics[-1], max(metrics, key=lambda row: row["test_accuracy"])
    return [
        f"{accuracies[-1]:.2f}",
        f"{max(accuracies):.2f} ({best['epoch']:g})",
        f"{mean_of(accuracies[-5:]).value:.2f}",
        f"{last['test_loss']:.3f}",
        f"{last['test_ece']:.3f}",
    ]


def main_table() -> list[str]:
    """Return all methods on noisy CIFAR-100."""
    heading = ["method", "settings", "epochs", "accuracy", "test loss", "accuracy − SAM's"]
    lines = [format_row(heading), "|---" * len(heading) + "|"]
    for label, settings, epochs, runs in MAIN:
        means = {metric: mean_of(list(runs.values(metric).values())) for metric in METRICS}
        cells = [label, settings, epochs]
        cells += [f"{mean.value:.{METRICS[metric][2]}f}" for metric, mean in means.items()]
        cells.append("" if runs is SAM else format_difference("accuracy", runs, SAM_FIVE))
        lines.append(format_row(cells))
    return lines


def single_table() -> list[str]:
    """Return accuracy and test loss of the runs with one seed, and without a tilt."""
    heading = ["seed 0", "without", "with", "difference", "test loss without", "with"]
    lines = [format_row(heading), "|---" * len(heading) + "|"]
    for label, with_tilt, without in SINGLE:
        after, before = ([runs.values(metric)[0] for metric in METRICS] for runs in (with_tilt, without))
        cells = [label, f"{before[0]:.2f}", f"{after[0]:.2f}", f"{after[0] - before[0]:+.2f}".replace("-", "−")]
        lines.append(format_row([*cells, f"{before[1]:.3f}", f"{after[1]:.3f}"]))
    return lines


def draw(groups: Mapping[str, Sequence[Comparison]], path: Path) -> None:
    """Draw differences in accuracy with their intervals; differences in test loss are printed next to them.

    Markers of two seeds are hollow. Their intervals may be very wide and do not set the range; arrows show where they
    are cut off.
    """
    import matplotlib.pyplot as plt

    num_rows = sum(1 + len(comparisons) for comparisons in groups.values())
    height = 0.75 + 0.24 * num_rows  # in inches, as are the margins: labels left, numbers right
    figure = plt.figure(figsize=(10.5, height))
    axes = figure.add_axes((3.4 / 10.5, 0.5 / height, 3.7 / 10.5, 1 - 0.5 / height))

    def write(text: str, x: int, y: int, points: int, **style: Any) -> None:
        """Write text next to the axes, some points from their left (x = 0) or right (x = 1) edge."""
        place = {"xycoords": axes.get_yaxis_transform(), "xytext": (points, 0), "textcoords": "offset points"}
        axes.annotate(text, (x, y), va="center", fontsize=8, annotation_clip=False, **place, **style)

    for points, title in zip((8, 128), ("score, points", "test loss"), strict=True):
        write(title, 1, -1, points, color="0.4")
    labels: list[str] = []
    intervals: list[tuple[int, float, float]] = []  # row, low, high
    edges = [0.0]
    for heading, comparisons in groups.items():
        write(heading, 0, len(labels), -240, weight="bold")
        labels.append("")
        for label, first, second in comparisons:
            y, mean = len(labels), difference("accuracy", first, second)
            interval = confidence_interval(mean)
            intervals.append((y, *interval))
            axes.plot(interval, [y, y], color="C0", linewidth=1.4)
            axes.plot(mean.value, y, "o", color="C0", markersize=5, markerfacecolor="C0" if mean.runs > 2 else "white")
            edges += interval if mean.runs > 2 else [mean.value]
            for points, metric in zip((8, 128), METRICS, strict=True):
                write(format_difference(metric, first, second), 1, y, points)
            labels.append(f"{label} ({mean.runs})")
    axes.axvline(0, color="0.3", linewidth=0.8)
    margin = 0.05 * (max(edges) - min(edges))
    left, right = min(edges) - margin, max(edges) + margin
    for y, low, high in intervals:
        if low < left:
            axes.plot(left, y, "<", color="C0", markersize=5, clip_on=False)
        if high > right:
            axes.plot(right, y, ">", color="C0", markersize=5, clip_on=False)
    axes.set_yticks(range(num_rows), labels, fontsize=8)
    axes.set(xlim=(left, right), ylim=(num_rows - 0.5, -1.4))
    axes.set_xlabel("difference in test score, points, with its 95% interval; number of seeds in brackets", fontsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", alpha=0.25)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_start(groups: Mapping[str, Sequence[Comparison]], path: Path) -> None:
    """Draw the gain of a random start against ρ, with its interval, for each radius."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for color, comparisons in enumerate(groups.values()):
        means = [difference("accuracy", first, second) for _, first, second in comparisons]
        shown = [(rho, mean) for rho, mean in zip(RHOS, means, strict=True) if mean.value > -1]
        xs, ys = [rho for rho, _ in shown], [mean.value for _, mean in shown]
        low, high = zip(*(confidence_interval(mean) for _, mean in shown), strict=True)
        axes.fill_between(xs, low, high, color=f"C{color}", alpha=0.2, linewidth=0)
        axes.plot(xs, ys, "-o", color=f"C{color}", markersize=4, label=f"R = {(2, 4)[color]}")
        for rho, mean in zip(RHOS, means, strict=True):
            if mean.value <= -1:
                axes.annotate(
                    f"{format_interval(mean, 1)}\none seed of {mean.runs} did not learn",
                    (rho, -0.44),
                    (rho - 0.015, -0.33),
                    ha="right",
                    va="center",
                    fontsize=8,
                    color=f"C{color}",
                    arrowprops={"arrowstyle": "->", "color": f"C{color}"},
                )
    axes.axhline(0, color="0.3", linewidth=0.8)
    axes.set(xlabel="ρ", ylabel="test accuracy minus SAM's, points", ylim=(-0.45, 0.75), xticks=RHOS)
    axes.legend(frameon=False, title="digits, 20 seeds, 95% intervals", title_fontsize=9, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_flatness(path: Path) -> None:
    """Draw the variance of the training loss under noise on the weights, and test accuracy against it at 0.01."""
    import matplotlib.pyplot as plt

    figure, (curves, scatter) = plt.subplots(1, 2, figsize=(10.5, 3.9), layout="constrained")
    names = ("ERM", "SAM", "TSAM, s=1", "TSAM, s=3")
    pairs = ((ERM, ERM_AVERAGED), (SAM, SAM_AVERAGED), (TSAM1, TSAM_AVERAGED), (TSAM3, None))
    for color, (last, averaged) in enumerate(pairs):
        for runs, style, name in ((last, "-o", ""), (averaged, "--s", ", averaged")):
            if runs is None:
                continue
            measured = [run for run in select_runs(_finished(NOISY), runs.query).values() if "flatness" in run]
            label = names[color] + name
            around = [run["flatness"]["neighborhood"] for run in measured]
            stds = [std for std in around[0]["std"] if std <= 0.02]  # beyond, the loss exceeds that of guessing
            variances = [sum(a["variance"][i] for a in around) / len(around) for i in range(len(stds))]
            curves.plot(stds, variances, style, color=f"C{color}", markersize=4, label=f"{label} ({len(measured)})")
            at, accuracy = variances[stds.index(0.01)], mean_of(list(runs.values("accuracy").values())).value
            scatter.plot(at, accuracy, style[-1], color=f"C{color}")
            side = -1 if label in ("SAM, averaged", "TSAM, s=3") else 1  # of the point: labels must not overlap
            place = {"xytext": (7 * side, 0), "textcoords": "offset points", "ha": "left" if side > 0 else "right"}
            scatter.annotate(label, (at, accuracy), fontsize=8, color=f"C{color}", va="center", **place)
    curves.set(yscale="log", xlabel="standard deviation of the noise", ylabel="variance of the training loss")
    curves.legend(fontsize=8, title="measured runs in brackets", title_fontsize=8)
    scatter.set(xlabel="variance of the training loss at noise 0.01", ylabel="test accuracy, %", xlim=(0.0, 0.0048))
    for axes in (curves, scatter):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Print, and draw if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, help="folder for evidence_*.png")
    args = parser.parse_args(argv)
    print(*paper_table("cifar100-resnet18", PAPER_CLEAN), "", sep="\n")
    print(*paper_table("noisy-resnet18", PAPER_NOISY), "", *main_table(), sep="\n")
    for name, groups in DIFFERENCES.items():
        print(f"\nevidence_{name}.png: score, test loss (seeds)")
        for heading, comparisons in groups.items():
            print(heading)
            for label, first, second in comparisons:
                texts = [format_difference(metric, first, second) for metric in METRICS]
                print(f"  {label}: {', '.join(texts)} ({difference('accuracy', first, second).runs})")
        if args.figures is not None:
            (draw_start if name == "start" else draw)(groups, args.figures / f"evidence_{name}.png")
    if args.figures is not None:
        draw_flatness(args.figures / "evidence_flatness.png")
    print("", *single_table(), sep="\n")
    print(
        "\nsilenced examples: % of the mislabelled that are silenced, % of the silenced that are mislabelled, by seed"
    )
    for label, runs in (
        ("SAM, τ = −0.5", SAM_TILTED),
        ("ERM, averaged, τ = −0.4", ERM_TILTED),
        ("the same, with warm-up", ERM_TILTED_WARM),
        ("the same, τ = −0.2", ERM_TILTED_HALF),
    ):
        found = [result for result in runs.results().values() if "silenced_recall" in result]  # newer runs
        print(label, [f"{100 * r['silenced_recall']:.0f}, {100 * r['silenced_precision']:.0f}" for r in found])


if __name__ == "__main__":
    main()
