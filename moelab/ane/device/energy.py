"""Energy of a block of code on Apple silicon, by part of the chip, as Zeus reads it (NPUMoE §5.1).

`with meter.window() as joules:` fills a dictionary at its end: mJ of "ane", "cpu", "gpu" and "dram". Without Zeus, or
on a machine that it cannot read, `meter.why` says so and the dictionary stays empty. The counters are of the whole
machine, so whatever else runs is measured, too; a window should be longer than a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

#: part → field of zeus' AppleSiliconMeasurement, in mJ
FIELDS = {"ane": "ane_mj", "cpu": "cpu_total_mj", "gpu": "gpu_mj", "dram": "dram_mj"}


class Meter:
    """Reads energy counters; `why` is "" or says why it cannot."""

    def __init__(self) -> None:
        self._monitor, self.why, self._keys = None, "", count()
        try:
            from zeus.monitor import ZeusMonitor
        except ImportError:
            self.why = "no energy: pip install 'zeus[apple]'"
            return
        monitor = ZeusMonitor(gpu_indices=[], cpu_indices=[])
        if monitor.soc_is_present:
            self._monitor = monitor
        else:
            self.why = "no energy: zeus finds no Apple chip that it can read here"

    @contextmanager
    def window(self) -> Iterator[dict[str, float]]:
        """Yields a dictionary that holds mJ by part after the block; parts that the chip does not report are absent."""
        found: dict[str, float] = {}
        if self._monitor is None:
            yield found
            return
        key = f"moelab {next(self._keys)}"
        self._monitor.begin_window(key, sync_execution=False)
        try:
            yield found
        finally:
            soc = self._monitor.end_window(key, sync_execution=False).soc_energy
            found |= {part: float(value) for part, field in FIELDS.items()
                      if (value := getattr(soc, field, None)) is not None}
