"""Every method trains the weights it trained before, up to rounding; public names change only on purpose."""

import json
from pathlib import Path

import pytest

from golden.public_api import lines
from golden.trajectories import DTYPES, TOLERANCE, largest_difference, trajectory

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


@pytest.mark.parametrize("case", GOLDEN)
def test_trajectory_matches_golden(case):
    name, network, kind = case.split("/")
    found = trajectory(name, network, DTYPES[kind])
    assert largest_difference(found["losses"], GOLDEN[case]["losses"]) < TOLERANCE[kind]


def test_public_api_matches_snapshot():
    promised = (Path(__file__).parent / "public_api.txt").read_text().splitlines()
    assert list(lines()) == promised, "run tests/golden/public_api.py and tell users of the change in CHANGELOG.md"
