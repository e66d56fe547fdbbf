"""Executes a notebook with papermill, in a kernel of the running Python, and says what went wrong."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from moelab.base.progress import progress


def execute(
    source: Path,
    parameters: dict[str, Any],
    directory: Path,
    timeout: float,
    variables: dict[str, str],
) -> str | None:
    """Execute a notebook into a run directory; returns the error, first a sentence and then the
    traceback, or None.

    timeout : seconds that one cell may take. variables : of the kernel's environment.
    """
    import nbformat
    import papermill
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    class ThisInterpreter(AsyncKernelManager):
        """The kernel of the running Python, whatever kernelspecs are installed for the user."""

        @property
        def kernel_spec(self) -> KernelSpec:
            about = get_kernel_dict(extra_arguments=["--log-level=50"]) | {"env": variables}
            about["argv"][0:1] = [sys.executable, "-W", "ignore"]
            return KernelSpec(**about)

    for name in ("papermill", "asyncio"):  # what they say is in the error
        logging.getLogger(name).setLevel(logging.CRITICAL)
    code = [cell for cell in nbformat.read(source, 4).cells if cell.cell_type == "code"]
    at = []  # the cells that have begun
    with progress(total=len(code) + bool(parameters), desc=source.stem, unit="cells") as bar:

        def started(cell: Any, cell_index: int) -> None:
            at.append(cell)
            bar.note(f"now: {first_line(cell)}")

        try:
            papermill.execute_notebook(
                str(source),
                str(directory / source.name),
                parameters,
                kernel_name="python3",
                language="python",
                progress_bar=False,
                store_widget_state=False,
                execution_timeout=timeout,
                kernel_manager_class=ThisInterpreter,
                on_cell_start=started,
                on_cell_executed=lambda **_: bar.update(),
            )
        except Exception as failure:
            where = f"the cell that begins `{first_line(at[-1])}`" if at else "its first cell"
            return explain(failure, where, timeout)
    return None


def first_line(cell: Any) -> str:
    """The first line of code of a cell that is no comment; the first line if all are."""
    lines = [line.strip() for line in cell.source.splitlines() if line.strip()]
    return next((of for of in lines if not of.startswith("#")), lines[0] if lines else "")[:60]


def explain(error: Exception, where: str, timeout: float) -> str:
    """A sentence for people, then the traceback where there is one."""
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError, strip_color

    if isinstance(error, PapermillExecutionError):
        trace = strip_color("\n".join(error.traceback))
        return f"{error.ename}: {strip_color(error.evalue)} (in {where})\n\n{trace}"
    if isinstance(error, CellTimeoutError):
        return (
            f"it took longer than {timeout:g} s in {where}; allow more with --timeout, or try "
            "-p smoke=true"
        )
    if isinstance(error, DeadKernelError):
        return (
            f"the kernel died in {where}; most often the machine ran out of memory, so try smaller "
            "parameters"
        )
    return f"{type(error).__name__}: {error} (in {where})"
