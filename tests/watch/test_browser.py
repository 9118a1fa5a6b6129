"""The `alignkit watch` page in headless Chromium; skipped without `chromium` on PATH.

It tests what needs a browser: the live updates, the drawn plot, and that no text from a file runs as a script.
"""

import re

import pytest
from PIL import Image

from . import browser, runs

pytestmark = pytest.mark.skipif(browser.CHROMIUM is None, reason="no chromium on PATH: apt-get install chromium")


def test_the_page_shows_the_numbers_of_a_growing_run(tmp_path):
    directory = tmp_path / "run"
    runs.write(directory, range(5), off={3: 0.5})
    with browser.watch(directory) as (_, url):
        first = browser.chromium("--dump-dom", url=url)
        runs.append(directory, step=6)
        second = browser.chromium("--dump-dom", url=url)
    assert "1 of 40 logprobs are not bit-equal." in first and "to step 4;" in first
    assert "0xbfc00000" in first and "4321" in first
    assert "1 of 48 logprobs are not bit-equal." in second and "to step 6;" in second


def test_the_page_updates_live(tmp_path):
    """The page's content security policy allows the script, which inserts the server's content."""
    runs.write(tmp_path, range(5))
    with browser.watch(tmp_path) as (_, url):
        page = browser.chromium("--dump-dom", "--virtual-time-budget=5000", url=url)
    assert int(re.search(r"live, (\d+) updates?", page)[1]) >= 2
    assert page.count("All 40 logprobs are bit-equal.") == page.count('id="plot"') == 1


def test_text_from_files_runs_no_script(tmp_path):
    runs.write(tmp_path, [0])
    runs.append(
        tmp_path,
        contract="<script>document.title = 'run'</script>",
        metrics={"<img src=x onerror=\"document.title = 'run'\">": 1.0},
    )
    with browser.watch(tmp_path) as (_, url):
        page = browser.chromium("--dump-dom", "--virtual-time-budget=3000", url=url)
    assert "<title>alignkit watch</title>" in page and "&lt;script&gt;" in page and "&lt;img src=x" in page


def test_the_plot_is_rendered(tmp_path):
    """The curve's color is on the page, so the policy allows the plot's own style sheet."""
    directory = tmp_path / "run"
    runs.write(directory, range(20), off={step: 2.0**-step for step in range(10, 20)})
    with browser.watch(directory) as (_, url):
        browser.chromium(f"--screenshot={tmp_path}/page.png", "--window-size=1040,900", url=url)
    pixels = Image.open(tmp_path / "page.png").convert("RGB")
    assert sum(count for count, color in pixels.getcolors(2**24) if color == (0x1F, 0x77, 0xB4)) > 200
