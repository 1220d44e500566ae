"""Which tests `make test` leaves out because they take long."""

from tests import seconds

LOG = """
12.50s call     tests/a/test_b.py::test_slow[case 1 of 2]
0.50s setup    tests/a/test_b.py::test_slow[case 2 of 2]
4.00s call     tests/a/test_b.py::test_quick
6.00s teardown tests/a/test_b.py::test_quick
"""


def test_the_seconds_of_a_function_are_those_of_its_cases(tmp_path, monkeypatch, capsys):
    """Catches cases that count one by one, a fixture whose time is missed, and a second log that adds to the first."""
    monkeypatch.setattr(seconds, "FILE", tmp_path / "seconds.json")
    logs = [tmp_path / name for name in ("first", "second")]
    for log in logs:
        log.write_text(LOG)
    assert seconds.main([str(log) for log in logs]) == 0
    assert capsys.readouterr().out == "seconds.json: 1 functions take longer than 5 s, 13 s in all\n"
    seconds.measured.cache_clear()
    assert [seconds.is_long(f"tests/a/test_b.py::test_{name}[x]") for name in ("slow", "quick", "new")] == [1, 0, 0]
    seconds.measured.cache_clear()
    assert seconds.main([str(tmp_path / "third")]) == 2


def test_what_is_kept_would_be_long():
    """Catches an exception for a test that was renamed or has become quick."""
    assert {*seconds.KEPT} <= {*seconds.measured()}
