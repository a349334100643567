from tiltsam.lab.flags import parse_method


def test_parse_method_reads_none():
    assert parse_method("tsam:radius=none,t=5") == {"method": "tsam", "radius": None, "t": 5.0}
