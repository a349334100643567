"""The HTML page, parsed: numbers equal the records, text is escaped, nothing is requested."""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from helpers.report_runs import flatness, rows, write_run, write_runs
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.palette import METHOD_COLORS
from tiltsam.lab.records import Record
from tiltsam.lab.report import write_report
from tiltsam.lab.report.page import headline, task_facts
from tiltsam.lab.report.plots import task_plots
from tiltsam.lab.report.runs import RunRecord, read_runs
from tiltsam.lab.report.summary import summarize
from tiltsam.lab.report.tables import overview_table
from tiltsam.lab.train import train

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&</style><!--"


class Page(HTMLParser):
    """Tables, tags, texts and scripts of a page."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.scripts, self.styles, self.tables = [], [], [], {}
        self.text = ""
        self._inside, self._table, self._cell = None, None, None
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if tag in ("script", "style"):
            self._inside = (self.scripts if tag == "script" else self.styles, attributes)
            self._inside[0].append([attributes, ""])
        elif tag == "table":
            self._table = self.tables.setdefault(attributes["data-table"], [])
        elif tag == "tr" and self._table is not None:
            self._table.append([])
        elif tag in ("td", "th"):
            self._cell = attributes | {"text": ""}
            self._table[-1].append(self._cell)
        elif tag == "b" and self._cell is not None:
            self._cell["bold"] = True

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._inside = None
        elif tag in ("td", "th"):
            self._cell = None
        elif tag == "table":
            self._table = None

    def handle_data(self, data):
        if self._inside is not None:
            self._inside[0][-1][1] += data
        else:
            self.text += data
            if self._cell is not None:
                self._cell["text"] += data

    def data(self):
        (text,) = [text for attributes, text in self.scripts if attributes.get("id") == "report-data"]
        return json.loads(text)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    runs = write_runs(tmp_path_factory.mktemp("runs"))
    report = write_report([runs], runs / "report", figures=False)
    return runs, Page(report.page)


def test_page_tables_equal_records(made):
    runs, page = made
    head, *body = page.tables["runs"]
    at = {cell["text"]: k for k, cell in enumerate(head)}
    assert len(body) == 12
    for row in body:
        folder = row[at["folder"]]["text"]
        result = json.loads(Path(folder, "result.json").read_text())
        score = row[at["test accuracy (%)"]]
        assert float(score["data-value"]) == 100 * result["score"]
        assert score["text"] == f"{100 * result['score']:.2f}"
        assert float(row[at["passes"]]["data-value"]) == result["passes"]
        assert float(row[at["epoch"]]["data-value"]) == result["epoch"]
    head, *body = page.tables["results"]
    column = [cell["text"] for cell in head].index("test accuracy (%)")
    (task,) = summarize(*read_runs([runs]))
    for row, setting in zip(body, task.settings, strict=True):
        mean = setting.final("score", 100)
        assert float(row[column]["data-value"]) == mean.value
        assert float(row[column]["data-error"]) == mean.error
        assert row[column]["text"] == f"{mean.value:.2f} ± {mean.error:.2f}"
    assert [row[column].get("bold", False) for row in body] == [False, False, False, True]
    assert [cell["text"] for cell in head][:3] == ["method", "test accuracy (%)", "minus erm [95% interval]"]
    assert [row[0]["text"] for row in body] == ["erm", "sam rho=0.05", "tsam t=1 rho=0.1", "tsam t=20 rho=0.1"]
    assert [row[2]["text"] for row in body][:2] == ["", "+4.82 [+4.58, +5.05]"]
    erm, sam, *_ = (setting.final("score", 100).value for setting in task.settings)
    assert float(body[1][2]["data-value"]) == pytest.approx(sam - erm)


def test_units_in_headings_do_not_break(made):
    _, page = made
    headings = [cell["text"] for cell in page.tables["flatness"][0]]
    assert "variance at 0.01 (1e\N{NON-BREAKING HYPHEN}6)" in headings


def test_page_curves_equal_records(made):
    runs, page = made
    data = page.data()
    (task,) = summarize(*read_runs([runs]))
    convergence = data["plots"][0]
    assert convergence["title"] == "Convergence"
    for series, setting in zip(convergence["curves"], task.settings, strict=True):
        assert series["name"] == setting.name
        means = setting.curve("test_accuracy", 100)
        assert data["columns"][series["y"]] == pytest.approx([m.value for m in means], rel=1e-6)
        assert data["columns"][series["error"]] == pytest.approx([m.error for m in means], rel=1e-6)
        assert data["columns"][series["x"]] == [1, 2, 3, 4, 5, 6]


def test_page_has_method_colors(made):
    _, page = made
    style = page.styles[0][1]
    for method, color in METHOD_COLORS.items():
        assert f"--m-{method}:{color};" in style
    dots = [attributes["class"] for tag, attributes in page.tags if "dot" in attributes.get("class", "")]
    assert {"dot m-erm", "dot m-sam", "dot m-tsam"} == set(dots)
    assert {s["method"] for f in page.data()["plots"] for s in f["curves"]} == {"erm", "sam", "tsam"}


def test_page_requests_nothing(made):
    runs, page = made
    text = (runs / "report" / "report.html").read_text()
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert not [a for _, a in page.tags if "src" in a]
    links = [a["href"] for tag, a in page.tags if "href" in a]
    assert all(link.startswith(("#", "data:")) for link in links)


def test_content_security_policy(made):
    _, page = made
    (policy,) = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    for kind, text in (("script-src", page.scripts[-1][1]), ("style-src", page.styles[0][1])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not [a for _, a in page.tags if "style" in a or any(k.startswith("on") for k in a)]


def test_page_escapes_text(tmp_path):
    calm = write_run(tmp_path / "calm", method="erm")
    folder = write_run(tmp_path / "evil", method="erm", notes=EVIL, flatness=flatness(label=EVIL))
    config = json.loads((folder / "config.json").read_text())
    config |= {"task": EVIL, "method": EVIL, "model": EVIL, "seed": EVIL, EVIL: EVIL}
    (folder / "config.json").write_text(json.dumps(config))
    lines = [row | {f"test_{EVIL}": 0.5} for row in rows(3)]
    metrics = [{k: v for k, v in row.items() if k != "test_accuracy"} for row in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in metrics) + EVIL + "\n")
    (folder / "environment.json").write_text(json.dumps({"device": EVIL, "torch": EVIL}))
    (folder / "result.json").write_text(json.dumps(metrics[-1] | {"metric": EVIL, "score": 0.5}))
    other = tmp_path / "evil" / EVIL.replace("/", "-")
    other.mkdir()
    (other / "config.json").write_text(EVIL)

    evil = Page(write_report([tmp_path], tmp_path / "out", figures=False).page)
    plain = Page(write_report([calm], tmp_path / "plain", figures=False).page)
    assert {tag for tag, _ in evil.tags} <= {tag for tag, _ in plain.tags} | {"ul", "li", "nav", "a", "h2"}
    *numbers, (_, code) = evil.scripts
    assert [found.get("id") for found, _ in numbers] == ["report-data"]
    assert code == plain.scripts[-1][1]
    assert EVIL in evil.text
    attributes = {name for _, found in evil.tags for name in found}
    assert not {name for name in attributes if name.startswith("on") or name == "src"}
    assert not set("".join(text for _, text in numbers)) & set("<>&")
    names = {s["name"] for f in evil.data()["plots"] for s in f["curves"]}
    assert EVIL in names
    assert {s["method"] for f in evil.data()["plots"] for s in f["curves"]} == {"erm", "other"}


def test_page_with_lone_surrogate(tmp_path):
    folder = write_run(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"task": "\ud800"}
    (folder / "config.json").write_text(json.dumps(config))
    assert "?" in Page(write_report([tmp_path], tmp_path / "out", figures=False).page).text


def test_page_lists_problems(tmp_path):
    write_run(tmp_path, method="erm")
    write_run(tmp_path, method="sam", finished=False, lines=rows(2))
    write_run(tmp_path, method="pgn", finished=False, lines=[])
    page = Page(write_report([tmp_path], tmp_path / "out", figures=False).page)
    assert "2 items missing or damaged" in page.text
    assert "pgn, seed 0: not finished, no epoch of 6 yet" in page.text
    assert "sam, seed 0: not finished, at epoch 2 of 6" in page.text
    assert "Not measured yet" in page.text


def test_progress_without_a_limit_on_epochs(tmp_path):
    run = RunRecord(tmp_path, {"epochs": math.inf, "passes": 900.0}, [{"epoch": 2.0}])
    assert run.progress == "at epoch 2"


def test_headline_verdicts(tmp_path):
    def headline_of(name, **scores):
        for method, values in scores.items():
            for seed, score in enumerate(values):
                lines = rows(3, score) if score else []
                write_run(tmp_path / name, method=method, seed=seed, lines=lines, finished=bool(score))
        return headline(summarize(*read_runs([tmp_path / name]))[0])

    assert headline_of("clear", erm=[0.5, 0.51], sam=[0.7, 0.712]) == (
        "sam has the highest test accuracy, 62.76 ± 0.53%: 17.87 ahead of erm, 95% interval [+16.74, +19.00], "
        "a significant difference."
    )
    close = headline_of("close", erm=[0.5, 0.6], sam=[0.52, 0.6])
    assert close.endswith("0.89 ahead of erm, 95% interval [-10.41, +12.18], not a significant difference.")
    assert headline_of("single", erm=[0.5], sam=[0.7]) == (
        "sam has the highest test accuracy, 62.22%: 17.78 ahead of erm. One seed gives no interval: use several."
    )
    assert headline_of("tie", erm=[0.7, 0.8], sam=[0.7, 0.8]) == (
        "erm and sam have the highest test accuracy, 66.67 ± 4.44%."
    )
    assert headline_of("wider", erm=[0.7, 0.8], sam=[0.6, 0.9]) == "sam and erm have the highest test accuracy, 66.67%."
    equal = headline_of("equal", erm=[0.5, 0.6], sam=[0.7, 0.8])
    assert equal.endswith("17.78 ahead of erm.")
    assert "17.78 ahead of erm over 1 common seed." in headline_of("uneven", erm=[0.5], sam=[0.7, 0.71])
    assert headline_of("many", erm=[0.5, 0.51], sam=[0.7, 0.8], asam=[0.7, 0.8], pgn=[0.7, 0.8]).startswith(
        "sam, asam and pgn have the highest test accuracy, 66.67 ± 4.44%. sam is 21.78 ahead of plain training (erm), "
    )
    assert headline_of("mixed", erm=[0.5, 0.52, 0.9], sam=[0.55, 0.56]).startswith(
        "erm has the highest test accuracy, 56.89 ± 11.57%, but is 4.00 behind sam over 2 common seeds, 95% interval"
    )
    plain = headline_of("plain", erm=[0.5, 0.51], sam=[0.7, 0.71], tsam=[0.72, 0.731])
    assert plain.startswith("tsam has the highest test accuracy, 64.49 ± 0.49%: 1.82 ahead of sam, ")
    assert "It is 19.60 ahead of plain training (erm), 95% interval" in plain
    assert headline_of("alone", erm=[0.9]).startswith("erm reaches a test accuracy of 80.00")
    assert "No run has finished" in headline_of("none", erm=[0])
    for file in (tmp_path / "none").rglob("config.json"):
        (file.parent / "diverged.txt").write_text("the loss is nan")
    assert headline(summarize(*read_runs([tmp_path / "none"]))[0]).startswith("All runs diverged")
    for rho in (0.1, 0.2):
        write_run(tmp_path / "tuned", method="sam", rho=rho, lines=rows(3, 0.8 + rho))
    (task,) = summarize(*read_runs([tmp_path / "tuned"]))
    assert headline(task).startswith(
        "Of 2 settings, the best on validation, sam:rho=0.2, reaches a test accuracy of 88.89"
    )


def test_headline_reports_methods_that_were_better_earlier(tmp_path):
    def headline_of(name, **peaks):
        for method, values in peaks.items():
            for seed, peak in enumerate(values):
                folder = write_run(tmp_path / name, method=method, seed=seed, lines=rows(3, 0.7 + 0.01 * seed))
                result = json.loads((folder / "result.json").read_text())
                result["score_at_best_validation"] = result["score"] + peak
                (folder / "result.json").write_text(json.dumps(result))
        return headline(summarize(*read_runs([tmp_path / name]))[0])

    advice = "Train for less, lower lr, or tune."
    peaks = [0.1, 0.101]
    text = headline_of("all", erm=peaks, sam=[0.2, 0.201])
    sentence = "methods were better at the best validation epoch than at the end: sam 82.72% (20.05 more) and "
    assert text.endswith(f"All {sentence}erm 72.72% (10.05 more). {advice}")
    some = headline_of("some", erm=peaks, sam=[0.2, 0.201], asam=[0.0, 0.0])
    assert f"Some {sentence}" in some
    four = headline_of(
        "four", **{name: [k / 10, k / 10 + 1e-3] for k, name in enumerate(["erm", "sam", "asam", "pgn"], 2)}
    )
    assert "pgn" in four
    assert "and 1 other." in four
    one = headline_of("one", erm=peaks, sam=[0.0, 0.0])
    assert f"erm was better at the best validation epoch than at the end: 72.72% (10.05 more). {advice}" in one
    assert advice not in headline_of("less", erm=[0.009, 0.0091], sam=[0.0, 0.0])  # less than a point
    assert advice not in headline_of("insignificant", erm=[0.0, 0.1], sam=[0.0, 0.0])
    assert advice not in headline_of("single", erm=[0.1], sam=[0.0])


def test_headline_reports_diverged_runs(tmp_path):
    for seed in range(3):
        write_run(tmp_path, method="erm", seed=seed, lines=rows(3, 0.7 + 0.01 * seed))
        folder = write_run(tmp_path, method="sam", seed=seed, lines=rows(3, 0.8), finished=seed == 0)
        if seed:
            (folder / "diverged.txt").write_text("the loss is nan")
    text = headline(summarize(*read_runs([tmp_path]))[0])
    assert text.startswith("sam has the highest test accuracy, 71.11%: 8.89 ahead of erm over 1 common seed.")
    assert "The means leave out diverged runs: sam 2 of 3." in text


def test_headline_names_differing_settings(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, method="erm", epochs=60, average=True, seed=seed, lines=rows(3, 0.9 + 0.002 * seed))
        write_run(tmp_path, method="sam", rho=0.3, seed=seed, lines=rows(3, 0.8 + 0.001 * seed))
    text = headline(summarize(*read_runs([tmp_path]))[0])
    assert text.startswith("erm:average=true has the highest test accuracy, 80.09 ± 0.09%: ")
    assert re.search(r": [\d.]+ ahead of sam:rho=0.3,epochs=6, 95% interval", text)


def test_headline_compares_settings(tmp_path):
    """The entries of a comparison: the runner-up may be a variant of the best one."""
    entries = (("erm", {}, 0.7), ("sam", {}, 0.8), ("sam", {"example_tilt": -0.5}, 0.9), ("sam", {"rho": 0.3}, 0.92))
    for k, (method, options, score) in enumerate(entries):
        for seed in (0, 1, 2):
            write_run(tmp_path, method=method, **options, seed=seed, lines=rows(3, score + 0.001 * k * seed))
    (task,) = summarize(*read_runs([tmp_path]))
    assert headline(replace(task, compare_settings=True)) == (
        "sam:rho=0.3 has the highest test accuracy, 82.04 ± 0.15%: 1.87 ahead of sam:example_tilt=-0.5, 95% interval "
        "[+1.65, +2.09], a significant difference. It is 19.82 ahead of plain training (erm), 95% interval "
        "[+19.16, +20.48], a significant difference."
    )
    assert "example_ess" not in write_report([tmp_path], tmp_path / "out", figures=False).page.read_text()


def test_headline_plain_training_is_without_average_and_tilt(tmp_path):
    tilted = {"average": True, "example_tilt": -0.4}
    entries = (("erm", {}, 0.6), ("erm", tilted, 0.9), ("sam", {}, 0.8), ("tsam", {}, 0.7))
    for k, (method, options, score) in enumerate(entries):
        for seed in (0, 1, 2):
            write_run(tmp_path, method=method, **options, seed=seed, lines=rows(3, score + 0.001 * k * seed))
    (task,) = summarize(*read_runs([tmp_path]))
    for compare_settings in (True, False):  # the chosen setting of erm is the other one
        text = headline(replace(task, compare_settings=compare_settings))
        assert text.startswith("erm:example_tilt=-0.4,average=true has the highest test accuracy, 80.09 ± 0.05%: ")
        assert "It is 26.76 ahead of plain training (erm), " in text
    for average, score in ((False, 0.6), (True, 0.9)):
        write_run(tmp_path / "alone", method="erm", average=average, lines=rows(3, score))
    text = headline(summarize(*read_runs([tmp_path / "alone"]))[0])
    ending = "reaches a test accuracy of 80.00%. It is 26.67 ahead of plain training (erm)."
    assert text.endswith(f"erm:average=true, {ending}")
    for seed in (2, 3):
        write_run(tmp_path / "averaged", method="erm", average=True, seed=seed)
        for method in ("sam", "tsam"):
            write_run(tmp_path / "averaged", method=method, seed=seed, average=True, lines=rows(3, 0.9))
    assert "plain" not in headline(summarize(*read_runs([tmp_path / "averaged"]))[0])


def test_headline_reports_uneven_tuning(tmp_path):
    def headline_of(*runs):
        for method, options, score in runs:
            for seed in (0, 1):
                write_run(tmp_path, method=method, **options, seed=seed, lines=rows(3, score + 0.001 * seed))
        return headline(summarize(*read_runs([tmp_path]))[0])

    text = headline_of(
        ("erm", {}, 0.7), ("sam", {"rho": 0.1}, 0.8), ("sam", {"rho": 0.2}, 0.85), ("asam", {"rho": 1.0}, 0.9)
    )
    assert text.startswith("asam:rho=1 has the highest test accuracy, 80.04")
    assert "The comparison uses each method's best setting on validation." in text
    assert text.endswith(": erm 1, sam 2, asam 1.")
    for seed in (0, 1):
        write_run(tmp_path, method="erm", lr=0.3, seed=seed)
    assert "different numbers" not in headline_of(("asam", {"rho": 2.0}, 0.8))


def test_headline_without_validation(tmp_path):
    def unseen(score):
        return [{k: v for k, v in row.items() if not k.startswith("validation")} for row in rows(3, score)]

    for rho in (0.1, 0.2):
        write_run(tmp_path / "alone", method="sam", rho=rho, lines=unseen(0.8 + rho))
    (task,) = summarize(*read_runs([tmp_path / "alone"]))
    assert "the first (there is no validation score), sam:rho=0.1," in headline(task)
    assert task.tuning(task.settings[0]).startswith("not tuned")
    for number in range(12):
        write_run(tmp_path / "alone", method="asam", rho=1.0 + number)
    write_run(tmp_path / "alone", task="dtd", method="sam")
    tasks = summarize(*read_runs([tmp_path / "alone"]))
    (pick,) = {task.selection for task in tasks if task.name == "digits"}
    assert "no validation score" in pick
    assert headline(tasks[0]).startswith("sam:rho=0.1 has the highest")
    assert f"The comparison uses {pick}." in headline(tasks[0])
    assert task_plots(tasks[0])[0].note.startswith(f"Initially shown: {pick}; 12 more in the legend.")
    assert overview_table(tasks).caption.startswith(f"Test scores of {pick}, mean")
    assert "different numbers of settings" in overview_table(tasks).caption


def test_task_facts_of_a_trained_run(tmp_path):
    config = TrainConfig("digits", method="sam", epochs=1, batch_size=256)
    train(config, Record.of(tmp_path, config))
    (task,) = summarize(*read_runs([tmp_path]))
    facts = task_facts(task)
    assert facts["task"].startswith("digits · ")
    assert facts["examples"] == "1,078 train, 120 validation, 599 test"
    assert (facts["test share"], facts["classes"], facts["model"], facts["budget"]) == ("33%", "10", "mlp", "1 epochs")
    assert facts["label noise"].startswith("20%")
    assert "1,078 train" in Page(write_report([tmp_path], tmp_path / "out", figures=False).page).text


def test_task_facts_without_setup(tmp_path):
    write_run(tmp_path, method="erm", noise=0.0)
    write_run(tmp_path, method="sam", noise=0.0, model="cnn")
    (task,) = summarize(*read_runs([tmp_path]))
    assert task_facts(task) == {
        "task": "digits",
        "label noise": "none added",
        "model": "auto or cnn",
        "budget": "6 epochs",
    }


def test_task_facts_sort_numbers(tmp_path):
    for method, epochs in (("erm", 118), ("sam", 60), ("pgn", 58.5)):
        write_run(tmp_path, method=method, epochs=epochs)
    (task,) = summarize(*read_runs([tmp_path]))
    assert task_facts(task)["budget"] == "58.5 or 60 or 118 epochs"


def test_page_noscript(made):
    runs, _ = made
    text = (runs / "report" / "report.html").read_text()
    assert text.index("<noscript>") < text.index("<section")


def test_task_facts_leave_out_unlimited_epochs(tmp_path):
    write_run(tmp_path, method="erm", epochs=math.inf, passes=1560.0)
    (task,) = summarize(*read_runs([tmp_path]))
    assert task_facts(task)["budget"] == "1560 passes"
