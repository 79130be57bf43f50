"""The engine's own time: scheduling, sampling's books and text, around a decoder that costs nothing."""
import time

import pytest
from overhead import Free, TOKENIZER, measure, measure_streams, new_engine, wishes

from glm52.engine import runner as runner_module
from glm52.engine.engine import Engine

pytestmark = pytest.mark.usefixtures("one_core")


def test_the_engine_costs_little():
    "Processor time a request and step: about 7 µs here. Three times that is allowed, and growth with the requests, not faster."
    some, many = (sum(measure(requests, 40, 3).values()) for requests in (256, 1024))
    assert some < 22 and many < 22, f"{some:.1f} µs at 256 requests, {many:.1f} µs at 1,024"
    assert many < 1.6 * some, f"{some:.1f} µs at 256 requests, {many:.1f} µs at 1,024: not linear"


def test_a_stream_for_each_costs_little_more():
    assert measure_streams(128) < 45


def test_what_is_measured_is_the_whole_engine():
    "The free decoder's requests run through scheduler, sampler and text like any others."
    engine = Engine(Free(), TOKENIZER, **new_engine(8, 10))
    for i in range(8): engine.add(f"r{i}", [10 + i] * 20, wishes(i, 10))
    text = dict.fromkeys(engine.requests, "")
    while engine.busy:
        for out in engine.step()[0]: text[out.request_id] += out.text_delta
    assert set(text.values()) == {"x" * 10}
    engine.check_integrity()


class Device:
    "A decoder whose work takes its time beside the host's, like a GPU's: the results are ready some milliseconds after they were asked for."

    def __init__(self, seconds: float, monkeypatch):
        self.free, self.seconds, self.ready, collect = Free(), seconds, 0.0, runner_module._collect

        def waits(*args):
            time.sleep(max(self.ready - time.perf_counter(), 0))
            return collect(*args)
        monkeypatch.setattr(runner_module, "_collect", waits)

    def __getattr__(self, name): return getattr(self.free, name)

    def forward(self, plan, caches):
        self.ready = time.perf_counter() + self.seconds
        return self.free.forward(plan, caches)


def test_text_is_made_while_the_device_computes(monkeypatch):
    "256 requests on a device that needs 20 ms a step: nothing of what `deliver` and text cost is added to a step."
    plain, overlapped, device = [], [], Device(0.02, monkeypatch)
    for steps, run in ((plain, lambda engine, hear: hear(engine.step()[0])), (overlapped, lambda engine, hear: engine.step_overlapped(hear))):
        engine = Engine(device, TOKENIZER, **new_engine(256, 40))
        for i in range(256): engine.add(f"r{i}", [10 + i % 200] * 20, wishes(i, 40))
        for number in range(18):
            at = time.perf_counter()
            run(engine, lambda outputs: time.sleep(0.008))       # a host that takes long over its outputs
            if number >= 6: steps.append(time.perf_counter() - at)
    assert min(overlapped) < min(plain) - 0.005, (min(plain), min(overlapped))
