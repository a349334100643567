"""The page in a browser: no errors, sorting, legends, tooltips, light and dark mode, phone width."""

import json
import re

import pytest

from browser import MISSING, Browser
from helpers.report_runs import flatness, rows, write_run, write_runs
from tiltsam.lab.palette import METHOD_COLORS, METHOD_COLORS_ON_DARK
from tiltsam.lab.report import write_report

pytestmark = pytest.mark.skipif(MISSING != "", reason=f"not installed: {MISSING}")

CONVERGENCE = 'figure[data-name="convergence"]'
EVIL = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 2'>"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    runs = write_runs(tmp_path_factory.mktemp("runs"))
    write_run(runs, method="sam", seed=3, finished=False, lines=rows(2))
    return write_report([runs], runs / "report", figures=False).page


@pytest.fixture(scope="module")
def shared_browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def browser(shared_browser, page):
    shared_browser.clear_logs()
    shared_browser.resize()
    shared_browser.open(page)
    yield shared_browser
    assert shared_browser.errors() == []


def column(browser, number, table="results"):
    cells = f"document.querySelectorAll('table[data-table=\"{table}\"] tbody td:nth-child({number})')"
    return browser.run(f"[...{cells}].map(cell => cell.textContent)")


def color(browser, selector):
    return browser.run(f"getComputedStyle(document.querySelector({json.dumps(selector)})).color")


def rgb(hexadecimal):
    return "rgb({}, {}, {})".format(*(int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5)))


def test_page_opens_without_errors_or_requests(browser, page):
    assert browser.requests() == [page.as_uri()]
    browser.run("dispatchEvent(new Event('beforeprint'))")
    browser.draw()
    figures, drawn = browser.run(
        "[document.querySelectorAll('figure').length, document.querySelectorAll('figure .plot > svg').length]"
    )
    assert figures == drawn == 12
    empty = "[...document.querySelectorAll('.plot > svg')].filter(s => !s.querySelector('.curve[d^=M]')).length"
    assert browser.run(empty) == 0
    assert "NaN" not in browser.run("[...document.querySelectorAll('svg *')].map(n => n.outerHTML).join('')")


def test_tables_sort(browser):
    names = ["erm", "sam rho=0.05", "tsam t=1 rho=0.1", "tsam t=20 rho=0.1"]
    assert column(browser, 1) == names
    heading = 'table[data-table="results"] th:nth-child(2)'
    browser.click(f"{heading} button")
    scores = [float(text.split()[0]) for text in column(browser, 2)]
    assert scores == sorted(scores, reverse=True)
    assert browser.run(f"document.querySelector({json.dumps(heading)}).ariaSort") == "descending"
    browser.run(f"document.querySelector({json.dumps(heading + ' button')}).focus()")
    browser.press("ENTER")
    assert [float(text.split()[0]) for text in column(browser, 2)] == sorted(scores)
    assert browser.run(f"document.querySelector({json.dumps(heading)}).ariaSort") == "ascending"
    browser.click('table[data-table="results"] th:nth-child(1) button')
    assert column(browser, 1) == names
    assert browser.run(f"document.querySelector({json.dumps(heading)}).ariaSort") == "none"


def test_missing_scores_sort_last(browser):
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    for _ in range(2):
        browser.click('table[data-table="runs"] th:nth-child(3) button')
        assert column(browser, 3, "runs")[-1] == "–"


def test_legend_toggles_curves(browser):
    count = f"document.querySelectorAll('{CONVERGENCE} .series').length"
    curve = f"[...document.querySelectorAll('{CONVERGENCE} path.curve')].at(-1).getAttribute('d')"
    assert browser.run(count) == 4
    before = browser.run(curve)
    button = f"{CONVERGENCE} .legend button:nth-child(1)"
    browser.click(button)
    assert browser.run(count) == 3
    assert browser.run(f"document.querySelector('{button}').ariaPressed") == "false"
    assert browser.run(curve) != before  # the axis is rescaled
    browser.run(f"document.querySelector('{button}').focus()")
    browser.press("ENTER")
    assert browser.run(count) == 4
    for number in range(1, 5):
        browser.click(f"{CONVERGENCE} .legend button:nth-child({number})")
    assert browser.run(count) == 0


def test_tooltip_on_hover_and_arrow_keys(browser, page):
    tip = f"document.querySelector('{CONVERGENCE} .tip')"
    shown = f"getComputedStyle({tip}).visibility"
    assert browser.run(shown) == "hidden"
    browser.hover(f"{CONVERGENCE} .plot")
    assert browser.run(shown) == "visible"
    text = browser.run(f"{tip}.textContent")
    assert "epoch: " in text
    assert "erm" in text
    assert "±" in text
    browser.run(f"document.querySelector('{CONVERGENCE} .plot > svg').focus()")
    browser.press("ARROW_RIGHT")
    browser.press("ARROW_LEFT")
    lines = browser.run(f"[...{tip}.querySelectorAll('p')].map(p => p.textContent)")
    data = browser.run("report")
    erm = data["plots"][0]["curves"][0]
    value, error = (data["columns"][erm[name]][0] for name in ("y", "error"))
    assert lines[0] == "epoch: 1"
    assert f"erm  {value:.2f} ± {error:.2f}" in lines
    assert "sam" in " ".join(lines)
    browser.run(f"document.querySelector('{CONVERGENCE} .plot > svg').blur()")
    assert browser.run(shown) == "hidden"


def test_tooltip_stays_after_a_tap(browser):
    shown = f"getComputedStyle(document.querySelector('{CONVERGENCE} .tip')).visibility"

    def touch(kind, selector):
        event = f"new PointerEvent('{kind}', {{pointerType: 'touch', bubbles: true, clientX: 200, clientY: 200}})"
        browser.run(f"document.querySelector('{selector}').dispatchEvent({event})")

    touch("pointerdown", f"{CONVERGENCE} .plot > svg")
    touch("pointerleave", f"{CONVERGENCE} .plot > svg")
    assert browser.run(shown) == "visible"
    touch("pointerdown", "h1")
    assert browser.run(shown) == "hidden"


@pytest.mark.parametrize(("width", "media"), [(1200, "screen"), (703, "print")])  # 703 px: A4 without its margins
def test_tables_fit(browser, page, width, media):
    browser.resize(width=width, media=media)
    browser.open(page)
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    excess = "t.scrollWidth - t.closest('.scroll').clientWidth"
    tables = f"[...document.querySelectorAll('table')].map(t => [t.dataset.table, {excess}])"
    assert [name for name, pixels in browser.run(tables) if pixels > 1] == []


@pytest.mark.parametrize(("dark", "palette"), [(False, METHOD_COLORS), (True, METHOD_COLORS_ON_DARK)])
def test_light_and_dark_mode(browser, page, dark, palette):
    browser.resize(dark=dark)
    browser.open(page)
    ground = browser.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    ink = browser.run("getComputedStyle(document.body).color.match(/\\d+/g).map(Number)")
    assert (max(ground) < 40 and min(ink) > 200) if dark else (min(ground) > 230 and max(ink) < 60)
    for number, method in enumerate(("erm", "sam", "tsam", "tsam"), 1):
        assert color(browser, f"{CONVERGENCE} .series:nth-of-type({number})") == rgb(palette[method])
        assert color(browser, f'table[data-table="results"] tr:nth-child({number}) .dot') == rgb(palette[method])


def test_phone_width(browser, page):
    browser.resize(width=360, height=740, phone=True)
    browser.open(page)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    browser.draw()
    assert browser.run("document.documentElement.scrollWidth") == 360  # tables scroll inside their frames
    rights = "[...document.querySelectorAll('figure')].map(f => f.getBoundingClientRect().right)"
    assert max(browser.run(rights)) <= 360
    # No text of a plot is cut off.
    outside = """[...document.querySelectorAll('.plot > svg')].flatMap(svg => {
        const frame = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('text')].filter(t => {
            const b = t.getBoundingClientRect();
            return b.left < frame.left - 1 || b.right > frame.right + 1 || b.bottom > frame.bottom + 1;
        }).map(t => t.textContent);
    })"""
    assert browser.run(outside) == []
    # The score is next to the method.
    score = "document.querySelector('table[data-table=\"results\"] tbody td:nth-child(2)')"
    assert "±" in browser.run(f"{score}.textContent")
    assert browser.run(f"{score}.getBoundingClientRect().right") <= 360


def test_long_names_wrap(browser, tmp_path):
    long = "own:/a_folder/" + "of_my_own_data_" * 8
    for seed in range(2):
        write_run(tmp_path, method="sam", task=long, seed=seed, model="hf:" + "m" * 90)
        write_run(tmp_path, method="sam", task=long, seed=seed, rho=5.0, flatness=flatness())
        write_run(tmp_path, method="tsam", task=long, seed=seed, t=1.0, flatness=flatness())
    browser.resize(width=360, height=740, phone=True)
    browser.open(write_report([tmp_path], tmp_path / "report", figures=False).page)
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.run("document.documentElement.scrollWidth") == 360
    cut = (
        "[...document.querySelectorAll('p, h1')].filter(p => p.scrollWidth > p.clientWidth + 1).map(p => p.textContent)"
    )
    assert browser.run(cut) == []
    # A range over a word has one box per line.
    words = """[...document.querySelectorAll('table[data-table="flatness"] .under')].flatMap(settings => {
        const text = settings.firstChild;
        return [...text.textContent.matchAll(/\\S+/g)].map(word => {
            const range = document.createRange();
            range.setStart(text, word.index);
            range.setEnd(text, word.index + word[0].length);
            return [word[0], range.getClientRects().length];
        });
    })"""
    lines = dict(browser.run(words))
    assert lines["rho=0.1"] == lines["t=1"] == 1
    widths = browser.run(
        "[...document.querySelectorAll('table[data-table=\"results\"] td.text')].map(c => c.clientWidth)"
    )
    assert max(widths) < 300  # the name of 90 letters wraps
    browser.run("plots.forEach(plot => plot.open())")
    legends = "[...document.querySelectorAll('.legend')].filter(legend => legend.textContent.includes('mmmm'))"
    assert browser.run(f"{legends}.length") > 0
    assert browser.run(f"{legends}.filter(legend => legend.scrollWidth > legend.clientWidth).length") == 0


def test_short_log_axis_has_ticks(browser, tmp_path):
    measured = flatness()
    measured["neighborhood"]["mean"] = [4.57, 4.6, 5.3]
    write_run(tmp_path, method="sam", flatness=measured)
    browser.open(write_report([tmp_path], tmp_path / "report", figures=False).page)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    names = "document.querySelectorAll('figure[data-name=\"noise-mean\"] text[text-anchor=end]')"
    ticks = [float(text) for text in browser.run(f"[...{names}].map(name => name.textContent)")]
    assert len(ticks) >= 3
    assert all(4.5 < tick < 5.4 for tick in ticks)


def test_page_axis_includes_early_peaks(browser, tmp_path):
    lines = rows(40, 0.5)
    lines[0] |= {"test_accuracy": 0.1, "train_loss": 9.0}
    lines[1] |= {"test_accuracy": 0.9, "train_loss": 0.001}
    write_run(tmp_path, method="erm", lines=lines, epochs=40)
    browser.open(write_report([tmp_path], tmp_path / "report", figures=False).page)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    for name in ("convergence", "train-loss"):
        path = f"document.querySelector('[data-name={name}] path.curve').getAttribute('d')"
        first, second, *_ = (float(point.split(",")[1]) for point in re.split("[ML]", browser.run(path))[1:])
        clip = f"document.querySelector('[data-name={name}] clipPath rect')"
        top, height = (float(browser.run(f"{clip}.getAttribute('{side}')")) for side in ("y", "height"))
        assert top <= second <= top + height
        assert not top <= first <= top + height


def test_curve_has_gaps(browser, tmp_path):
    bells = {"grid": [-1.0, 0.0, 1.0, 7.0, 8.0], "values": [2.0, 5.0, 1e-12, 0.01, 0.002]}
    write_run(tmp_path, method="erm", flatness=flatness() | {"density": bells})
    browser.open(write_report([tmp_path], tmp_path / "report", figures=False).page)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    path = browser.run("document.querySelector('[data-name=density] path.curve').getAttribute('d')")
    assert re.sub(r"[^ML]", "", path) == "MLML"


def test_text_is_not_executed(browser, tmp_path):
    folder = write_run(tmp_path, method="sam", notes=EVIL, flatness=flatness(label=EVIL))
    config = json.loads((folder / "config.json").read_text()) | {"task": EVIL, "method": EVIL, "seed": EVIL}
    (folder / "config.json").write_text(json.dumps(config))
    browser.open(write_report([tmp_path], tmp_path / "report", figures=False).page)
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    browser.run("dispatchEvent(new Event('beforeprint'))")
    browser.hover(f"{CONVERGENCE} .plot")
    assert browser.run("document.querySelector('h1').textContent") == EVIL
    assert EVIL in browser.run(f"document.querySelector('{CONVERGENCE} .tip').textContent")
    assert browser.run("[window.hurt, document.images.length, document.scripts.length]") == [None, 0, 2]


def test_500_runs_open_quickly(browser, tmp_path):
    lines = rows(60, 0.6)
    for number in range(500):
        write_run(tmp_path, method=("erm", "sam", "tsam")[number % 3], lr=0.001 * (1 + number // 3), lines=lines)
    page = write_report([tmp_path], tmp_path / "report", figures=False).page
    # The bound of 3 s is for an idle machine; benchmarks/bench_report.py measures it with longer runs.
    assert any(browser.open(page) < 3000 for _ in range(10))
