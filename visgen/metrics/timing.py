"""Wall-clock time, throughput and peak memory, measured the same way everywhere.

The device is synchronised at the edges of a lap only, so the measured loop itself never waits for it.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Laps of work on `device`. The first `warmup` laps (compilation, allocation) are timed but not counted."""

    def __init__(self, device: torch.device | str = "cpu", warmup: int = 0) -> None:
        self.device = torch.device(device)
        self.warmup = warmup
        self.laps: list[tuple[float, int]] = []  # (seconds, images) of each lap
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    @contextmanager
    def lap(self, images: int = 0) -> Iterator[None]:
        """Times the body, which handles `images` images; a body that raises is not counted."""
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.laps.append((time.perf_counter() - start, images))

    def _wait(self) -> None:
        if self.device.type in ("cuda", "mps", "xpu"):
            torch.accelerator.synchronize(self.device)

    @property
    def counted(self) -> list[tuple[float, int]]:
        return self.laps[self.warmup :]

    @property
    def seconds(self) -> float:
        return sum(seconds for seconds, _ in self.counted)

    @property
    def images(self) -> int:
        return sum(images for _, images in self.counted)

    @property
    def images_per_second(self) -> float:
        """0 while nothing was counted."""
        return self.images / self.seconds if self.seconds else 0.0

    @property
    def latency_ms(self) -> float:
        """Median milliseconds of a lap; 0 while nothing was counted."""
        return 1e3 * statistics.median(seconds for seconds, _ in self.counted) if self.counted else 0.0

    @property
    def peak_memory_gb(self) -> float:
        """Peak memory in 1e9 bytes: of the allocator on CUDA since construction, of the whole process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e9
        unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9

    def to_dict(self) -> dict[str, float | str]:
        """The `speed` block of a report."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device)
        return {
            "img_per_s": self.images_per_second,
            "latency_ms": self.latency_ms,
            "peak_mem_gb": self.peak_memory_gb,
            "seconds": self.seconds,
            "device": name,
        }
