"""The table of the paper's statements."""

from tiltsam.lab.theory.findings import render, table


def test_table_agrees_and_differs_where_expected():
    findings = table()
    verdicts = {finding.topic: finding.agrees for finding in findings}
    assert len(verdicts) == len(findings) == 18
    assert {topic for topic, agrees in verdicts.items() if not agrees} == {
        "toy 1: ERM by gradient descent",
        "toy 1: TSAM, uniform noise on [-.2, .2]",
        "toy 2: SAM",
        "L^t as t grows",
        "small t",
        "Lemma 3.3: smoothness",
        "Theorem 3.6: prefers flatter",
        "Theorem 3.7: a best t",
    }
    text = render(findings)
    for number in (
        "0.9134 0.9925 1.4450 1.9394 2.4663",
        "0.02027",
        "-0.0122",
        "0.469",
        "2.247",
        "1.122",
        "0.5730",
        "0.5429",
    ):
        assert number in text
    assert text.count("[DIFFERS]") == 8
    assert max(map(len, text.splitlines())) <= 110
