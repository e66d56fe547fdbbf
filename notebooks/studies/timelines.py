"""One token in each mode of prefetching, beside notebook 04."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plotly.graph_objects import Figure

from moelab.base.specs import Event
from moelab.viz.charts import gantt
from moelab.viz.figures import READS, kind_of


def token_timeline(runs: Mapping[str, Sequence[Event]]) -> Figure:
    """One token in each mode, measured: {mode: the events of one token}; numbers in bars are
    layers."""
    return gantt(
        {
            mode: [
                e._replace(
                    resource="copy" if e.resource in READS else e.resource, kind=kind_of(e, events)
                )
                for e in events
                if e.resource in (*READS, "compute")
            ]
            for mode, events in runs.items()
        },
        "layers",
        "measured",
    )
