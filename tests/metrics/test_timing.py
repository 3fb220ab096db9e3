import time

import pytest
import torch

from visgen.metrics.timing import Stopwatch


def test_laps_throughput_and_warmup():
    watch = Stopwatch(warmup=1)
    for seconds in (0.2, 0.02, 0.02):
        with watch.lap(images=4):
            time.sleep(seconds)
    assert watch.images == 8 and 0.04 <= watch.seconds < 0.15
    assert watch.images_per_second == pytest.approx(8 / watch.seconds)
    assert 20 <= watch.latency_ms < 75
    speed = watch.to_dict()
    assert speed["device"] == "cpu" and speed["peak_mem_gb"] > 0.01


def test_a_failing_lap_is_not_counted():
    watch = Stopwatch()
    with pytest.raises(RuntimeError), watch.lap(images=1):
        raise RuntimeError
    assert watch.images == 0 and watch.images_per_second == 0 and watch.latency_ms == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_laps_wait_for_the_device():
    watch = Stopwatch("cuda", warmup=1)
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        with watch.lap(images=1):
            for _ in range(20):
                x = torch.nn.functional.normalize(x @ x)
    assert watch.latency_ms > 5 and watch.peak_memory_gb > 0.1
