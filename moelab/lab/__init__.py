"""The laboratory: running notebooks headlessly, keeping what they found, comparing and reporting it.

    runner.py    one notebook, one process, one run directory         python -m moelab run
    execute.py   what that process does
    results.py   what a notebook calls: metrics, claims, figures
    check.py     newest runs against results/baseline                 python -m moelab check
    report.py    one static page of the newest runs
    reproduce.py everything, then the report                          python -m moelab reproduce
"""

from moelab.lab.results import open_run

__all__ = ["open_run"]
