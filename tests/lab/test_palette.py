"""Method colours can be distinguished, also by colour-blind readers."""

from itertools import combinations

import numpy as np
import pytest

import tiltsam
from tiltsam.lab.palette import METHOD_COLORS, METHOD_COLORS_ON_DARK

# Machado, Oliveira and Fernandes (2009): linear RGB as seen with one kind of cone missing.
SIGHT = {
    "full": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(color):
    c = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """Convert to CIE L*a*b*, where a distance of about 2.3 is just noticeable."""
    xyz = XYZ @ np.clip(rgb, 0, 1) / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("palette", [METHOD_COLORS, METHOD_COLORS_ON_DARK], ids=["light", "dark"])
def test_method_colors_differ_in_all_visions(palette, sight):
    seen = {method: lab(np.array(SIGHT[sight]) @ linear(color)) for method, color in palette.items()}
    for (a, x), (b, y) in combinations(seen.items(), 2):
        assert np.linalg.norm(x - y) > 15, (a, b)


@pytest.mark.parametrize(("palette", "background"), [(METHOD_COLORS, "#FFFFFF"), (METHOD_COLORS_ON_DARK, "#171B1E")])
def test_method_colors_contrast_with_background(palette, background):
    for method, color in palette.items():
        dark, light = sorted(XYZ[1] @ linear(c) + 0.05 for c in (color, background))
        assert light / dark > 2, method


def test_every_method_has_a_color():
    assert tiltsam.METHODS.keys() <= METHOD_COLORS.keys()
