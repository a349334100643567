"""The numbers that the paper prints (Li, Zhou and Bilmes, ICML 2025), each with the label of its table or figure.

Labels are those of the paper's source, such as ``table:main`` and ``fig:sharpness``. Scores are in percent. No number
is read off a curve.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "EIGENVALUES",
    "GLUE",
    "GLUE_AVERAGE",
    "HMC_STEPS",
    "IMAGES",
    "LOSSES",
    "MINUTES",
    "SAMPLES",
    "SAM_EARLY_STOPPED",
    "PaperNumber",
]


@dataclass(frozen=True)
class PaperNumber:
    """A number that the paper prints."""

    value: float
    source: str
    """Label of the table or figure."""
    error: float | None = None
    """Printed in parentheses; the paper does not state the number of runs."""
    digits: int = 2
    """Printed digits after the point."""


def _columns(source: str, rows: str) -> dict[str, dict[str, tuple[PaperNumber, ...]]]:
    """Parse a table, a heading and then one row per line, into columns; ``a/b`` is a cell with two numbers."""
    heading, *lines = [line.split() for line in rows.strip().splitlines()]

    def cell(text: str) -> tuple[PaperNumber, ...]:
        parts = [part.partition("(") for part in text.rstrip(")").split("/")]
        return tuple(
            PaperNumber(float(value), source, float(error) if error else None, len(value.partition(".")[2]))
            for value, _, error in parts
        )

    return {column: {line[0]: cell(line[k]) for line in lines} for k, column in enumerate(heading, 1)}


IMAGES = _columns(
    "table:main",
    """
    cifar100-resnet18 cifar100-wrn dtd-vit   dtd-wrn   noisy-resnet18 noisy-wrn tiny-resnet18 tiny-resnet34
    erm   71.39(.2)   73.22(.2)    66.38(.2) 16.97(.3) 61.01(.2)      57.03(.3) 71.10(.2)     74.90(.1)
    sam   76.52(.1)   78.44(.1)    67.87(.2) 17.45(.2) 69.00(.1)      68.02(.2) 72.43(.1)     76.75(.2)
    esam1 77.40(.1)   80.22(.1)    68.18(.2) 17.67(.2) 69.20(.1)      69.79(.1) 73.24(.1)     77.41(.1)
    esam2 77.52(.1)   79.03(.2)    68.35(.1) 17.71(.1) 67.27(.1)      66.83(.1) 73.26(.1)     77.40(.1)
    pgn   77.45(.1)   78.58(.2)    67.76(.1) 18.23(.2) 65.68(.1)      64.02(.2) 73.18(.1)     77.80(.1)
    rsam  77.35(.1)   79.02(.2)    68.35(.2) 17.66(.3) 69.31(.1)      65.93(.2) 73.57(.1)     77.72(.1)
    tsam  77.78(.1)   80.85(.2)    68.82(.1) 18.63(.2) 69.98(.1)      70.26(.1) 73.55(.1)     77.79(.1)
    """,
)
"""Test accuracy by column and method."""

GLUE = _columns(
    "table:main",
    """
          cola     wnli  sst2  mnli qnli  rte   mrpc  qqp   stsb
    erm   52/80.34 54.93 90.48 79.6 87.72 60.65 83.82 86.32 86.6/86.3
    sam   52/80.48 56.34 91.74 81.1 86.42 58.84 85.29 87.71 87.0/86.5
    esam1 52/80.44 56.34 91.63 81.1 86.18 59.02 85.31 87.69 87.1/86.7
    esam2 52/80.53 56.34 91.63 81.2 86.29 59.25 85.80 87.47 86.8/86.5
    tsam  52/80.81 56.34 91.86 81.1 87.81 60.65 85.05 88.77 87.1/86.6
    """,
)
"""By task and method: Matthews correlation and accuracy for CoLA, Pearson and Spearman correlation for STS-B, accuracy
for the others."""

GLUE_AVERAGE = _columns("table:main", "average\nerm 77.15\nsam 77.56\nesam1 77.59\nesam2 77.62\ntsam 78.01")["average"]
"""By method: the printed mean of the eleven numbers in its row, which is off by up to 0.02."""

SAMPLES = _columns(
    "table:s",
    """
          cifar100-resnet18 dtd-vit noisy-resnet18
    sam   76.52             67.87   69.00
    s=3   77.40             68.82   69.55
    s=5   77.78             68.70   69.98
    """,
)
"""Test accuracy of SAM, and of TSAM by number of samples."""

HMC_STEPS = _columns(
    "tab:N",
    """
        cifar100-resnet18 dtd-vit
    1,3 77.40             68.82
    1,5 77.78             68.70
    2,3 77.45             68.83
    3,3 77.52             68.80
    """,
)
"""Test accuracy of TSAM by N and s; the paper prints fractions of one."""

SAM_EARLY_STOPPED = PaperNumber(69.18, "fig:multiple_t")
"""Accuracy of SAM with early stopping on noisy CIFAR-100, from the caption."""

MINUTES = _columns(
    "table:runtime",
    """
          cifar100-resnet18 dtd-vit noisy-resnet18
    erm   32                5       45
    sam   65                6       92
    esam1 325               18      350
    esam2 310               17      315
    pgn   333               15      302
    rsam  320               16      312
    tsam  333               15      337
    """,
)
"""Minutes per run, "averaged over different hyperparameter sets"; the paper names neither models nor device."""

LOSSES = {
    split: _columns("table:train_test", rows)
    for split, rows in {
        "train": """
              ERM    SAM  TSAM
        erm   0.1283 1.35 3.48
        sam   0.1489 0.22 0.60
        tsam  0.1763 0.27 0.46
        """,
        "test": """
              ERM    SAM  TSAM
        erm   0.9302 2.05 3.54
        sam   0.7414 0.91 1.34
        tsam  0.7163 0.90 1.08
        """,
    }.items()
}
"""Loss by split, evaluated objective and training method."""

EIGENVALUES = {
    method: tuple(PaperNumber(value, "sec:experiments:sharpness") for value in values)
    for method, values in {
        "erm": (342.11, 304.72, 260.71, 252.92, 210.88),
        "sam": (232.60, 198.35, 182.61, 153.74, 145.76),
        "tsam": (140.91, 113.38, 105.90, 92.94, 89.55),
    }.items()
}
"""The five largest eigenvalues of the Hessian for CIFAR-100 with ResNet-18, from the text."""
