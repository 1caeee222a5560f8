"""The fit finds constants that it was not told, and leaves systems out whole."""

from __future__ import annotations

import pytest

from timetrial.errors import UserError
from timetrial.predict import constants, fit, refit, sure
from timetrial.predict.constants import KINDS, Constants
from timetrial.predict.fit import Point

TRUE = Constants({"speed.hopper": 0.8, "speed.ada": 0.9, "contention": 0.25})


def point(system: str, generation: str, work: float, hidden: float, noise: float = 0.0) -> Point:
    def seconds(c: Constants) -> float:
        return work / c.get("speed", generation) + hidden * c.get("contention")

    return Point(system, generation, "ngc25.04", seconds(TRUE) * (1 + noise), seconds)


POINTS = [
    *(point("one", "hopper", w, h) for w, h in ((1, 0), (2, 1), (1, 3), (4, 2))),
    *(point("two", "hopper", w, h) for w, h in ((3, 1), (1, 2))),
    *(point("three", "ada", w, h) for w, h in ((1, 0), (1, 1), (2, 3))),
]
WANTED = ["speed.hopper", "speed.ada", "contention"]


def test_constants_are_found_again() -> None:
    found = fit.fit(POINTS, WANTED, "made up")
    # the prior pulls a little, as it should
    for name, value in TRUE.values.items():
        assert found.values[name] == pytest.approx(value, rel=0.05)
    assert found.basis == "made up"


def test_one_wild_point_does_not_steer() -> None:
    wild = [*POINTS, point("one", "hopper", 2, 1, noise=1.0)]
    assert fit.fit(wild, WANTED, "").values["speed.hopper"] == pytest.approx(0.8, rel=0.06)


def test_constants_stay_within_their_range() -> None:
    far = [point("one", "hopper", 1, 0, noise=3.0)] * 50
    assert fit.fit(far, ["speed.hopper"], "").values["speed.hopper"] >= KINDS["speed"].low


def test_a_system_left_out_tells_the_constants_nothing() -> None:
    whole = fit.fit(POINTS, WANTED, "")
    without = fit.left_out(POINTS, WANTED, whole)
    assert set(without) == {"one", "two", "three"}
    assert "speed.ada" not in without["three"].values, "no other system is of that generation"
    assert without["one"].values["speed.hopper"] == pytest.approx(0.8, rel=0.05)


def test_names_are_those_that_the_points_bear_on() -> None:
    names = fit.names(POINTS)
    assert {"speed.hopper", "speed.ada", "kernels.ngc25.04", "contention"} <= set(names)
    assert not any("blackwell" in name for name in names)


def test_summary() -> None:
    found = fit.summary([-0.02, 0.04, 0.1, -0.3])
    assert found == {"n": 4, "median": pytest.approx(0.07), "p90": 0.3, "bias": pytest.approx(0.01)}
    assert fit.summary([]) == {"n": 0}


def test_the_packages_constants_lie_in_their_ranges_and_not_at_them() -> None:
    known = constants.load()
    assert known.values
    for name, value in known.values.items():
        kind = KINDS[name.partition(".")[0]]
        assert kind.low < value < kind.high * 1.0001, name


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"values": {"speed.hopper": 7}, "basis": ""}', '{"values": {"luck": 1}, "basis": ""}', '{"values": 1}'],
)
def test_a_file_that_is_none_of_constants_is_refused(tmp_path, text: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(UserError, match="constant"):
        constants.load(str(path))


def test_what_is_written_is_read_again(tmp_path) -> None:
    runs = list(sure.validated())[:5]
    refit.write(tmp_path, Constants({"contention": 0.25}, "five runs"), runs)
    again = constants.load(str(tmp_path / "constants.json"))
    assert again == Constants({"contention": 0.25}, "five runs")
    assert (tmp_path / "validated.csv").read_text() == sure.dumps(runs)


def test_the_table_tells_groups_and_the_farthest(capsys) -> None:
    text = refit.table(sure.validated(), ["a.csv line 2: no workload for X yet", "a.csv line 3: no workload for X yet"])
    assert "without its system" in text
    assert "system h100-sxm" in text
    assert "farthest off:" in text
    assert "2  no workload for X yet" in text
