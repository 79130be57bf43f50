"""The engine's own time: scheduling, sampling's books and text, around a decoder that costs nothing."""
import pytest
import torch
from overhead import Free, TOKENIZER, measure, measure_streams, new_engine, wishes

from glm52.engine.engine import Engine


@pytest.fixture(autouse=True)
def one_core():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
