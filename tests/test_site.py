"""The documentation as a site: it builds, fetches nothing, lists every flag, and its search works from disk."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from browser import MISSING, Browser
from tiltsam.cli import build_parser

REPOSITORY = Path(__file__).parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True)
    return folder


def test_pages_fetch_nothing(site):
    for page in site.rglob("*.html"):
        assert not re.search(
            r'<(script|img|iframe)[^>]* src="(https?:)?//|<link[^>]* href="(https?:)?//', page.read_text()
        )


def test_reference_leaves_out_internals_and_inherited_methods(site):
    page = (site / "api" / "methods.html").read_text()
    shown = set(re.findall(r'id="(tiltsam\.\w+\.\w+)"', page))
    assert {"tiltsam.SharpnessAware.step", "tiltsam.StepInfo.num_parts", "tiltsam.CapturedStep.reason"} <= shown
    for name in ("begin", "average_samples", "replay", "capture_key", "current_space", "first_step", "second_step"):
        assert f"tiltsam.SharpnessAware.{name}" not in shown
    assert "tiltsam.TSAM.check_settings" not in shown


def test_every_flag_is_listed(site):
    page = (site / "command-line.html").read_text()
    for name, parser in build_parser()[1].items():
        section = page.split(f'id="tiltsam-{name}"')[1].split("<h2")[0]
        for action in parser._actions:
            assert all(flag in section for flag in action.option_strings if action.dest != "help"), (name, action.dest)


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}")
def test_search_works_from_disk(site, tmp_path):
    browser = Browser(tmp_path / "profile")
    try:
        browser.driver.get((site / "choose.html").as_uri())
        box = browser.driver.find_element("css selector", "input.md-search__input")
        browser.driver.execute_script("arguments[0].focus()", box)
        end = time.monotonic() + 60
        while not box.is_displayed() and time.monotonic() < end:
            time.sleep(0.1)
        box.send_keys("CUDA graph")
        while not (found := browser.driver.find_elements("css selector", ".md-search-result__item")):
            assert time.monotonic() < end, "no result within a minute"
            time.sleep(0.1)
        assert any("How to" in item.text for item in found)
    finally:
        browser.close()
