"""Running notebooks headlessly, keeping their results, comparing and reporting them."""

from moelab.lab.results import open_run

__all__ = ["open_run"]
