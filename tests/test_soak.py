"""A short soak in the suite, and the proof that it would see a fault. The long one: `python tests/soak.py --minutes 20`."""
import pytest
from soak import HOUSES, soak

from glm52.engine.sampling import SamplingTable

pytestmark = pytest.mark.usefixtures("one_core")


def test_a_short_soak_loses_nothing():
    diary = soak(0.1, seed=1, clients=4)
    assert not diary.wrong, diary.wrong[:3]
    assert sum(asked.end == "finished" for asked in diary.asked) > len(HOUSES) and sum(diary.acts.values()) > 0


def test_it_sees_a_fault(monkeypatch):
    "Noise that depends on the line of a request in the runner's tables: alone everybody is in line 0."
    put = SamplingTable.put
    monkeypatch.setattr(SamplingTable, "put", lambda self, line, params, seed, *rest: put(self, line, params, seed + line, *rest))
    assert any("alone" in what for what in soak(0.02, seed=2, clients=6, houses=("plain",)).wrong)
