"""The process of one notebook: runs papermill, finds the errors that papermill does not report, and
measures memory.

The runner starts `python -m moelab.lab.execute` and writes one line of JSON to its standard input;
when that input closes, because the runner ended or was killed, this process ends too and its kernel
follows. It leaves the executed notebook, `run.json` with the kernel's peak memory and, after a
failure, `error.txt` in the run directory: first a sentence, then the traceback."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moelab.files import atomic, write_json, write_text
from moelab.lab.runner import cells_of
from moelab.progress import progress

WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
PLOTLY = "application/vnd.plotly.v1+json"


def _poll_for_replies() -> None:
    """Make Jupyter's client poll once a second: the notification of a reply can be lost among a
    widget's messages."""
    from queue import Empty
    from time import monotonic

    from jupyter_client.channels import AsyncZMQSocketChannel

    once = AsyncZMQSocketChannel.get_msg

    async def get_msg(self: Any, timeout: float | None = None) -> Any:
        end = float("inf") if timeout is None else monotonic() + timeout
        while True:
            try:
                return await once(self, timeout=max(0.0, min(1.0, end - monotonic())))
            except Empty:
                if monotonic() >= end:
                    raise

    AsyncZMQSocketChannel.get_msg = get_msg


def import_nbformat() -> Any:
    """nbformat, without an optional package of jsonschema that takes seconds to import."""
    sys.modules.setdefault("rfc3987_syntax", None)
    import nbformat

    return nbformat


class _Watch:
    """Until `end` is set, shows every ten seconds which cell is running, and looks every 50 ms at
    the kernel's memory.
    peak : its anonymous memory, so without mapped files, in bytes; None where there is no /proc."""

    def __init__(self, bar: progress, kernels: list[int]) -> None:
        self.bar, self.kernels, self.end = bar, kernels, threading.Event()
        self.cell = self.peak = None
        for watching in (self._tick, self._measure):
            threading.Thread(target=watching, daemon=True).start()

    def started(self, cell: Any, cell_index: int) -> None:
        self.cell = cell
        self.bar.note(f"now: {first_line(cell)}")

    def _tick(self) -> None:
        while not self.end.wait(10):
            self.bar.update(0)

    def _measure(self) -> None:
        while not self.end.wait(0.05):
            found = [anonymous_bytes(pid) for pid in self.kernels]
            self.peak = max([of for of in [self.peak, *found] if of is not None], default=None)


def anonymous_bytes(pid: int) -> int | None:
    """Memory of a process that no file backs; None where it has ended or the system does not
    tell."""
    try:
        return 1024 * int(
            re.search(r"^RssAnon:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)[1]
        )
    except (OSError, TypeError):
        return None


def first_line(cell: Any) -> str:
    """The first line of code of a cell that is no comment; the first line if all are."""
    lines = [line.strip() for line in cell.source.splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith("#")), lines[0] if lines else "")[
        :60
    ]


def execute(
    notebook: str, parameters: dict[str, Any], directory: str, timeout: float, pictures: bool
) -> str | None:
    """Execute a notebook into a run directory, both absolute paths; returns the error, or None.

    timeout : seconds that one cell may take. pictures : also draw the figures as PNG.
    """
    import_nbformat()  # the packages of moelab[lab], or an error that names them
    source = Path(notebook)
    output = Path(directory) / Path(notebook).name
    cells = sum(cell["cell_type"] == "code" for cell in cells_of(source)) + bool(parameters)
    error = None
    kernels = []
    for _attempt in (1, 2):
        with progress(total=cells, desc=source.stem, unit="cells") as bar:
            watch = _Watch(bar, kernels)
            try:
                _run_cells(source, output, parameters, timeout, watch)
                error = None
            except Exception as failure:
                error = explain(failure, watch.cell, timeout)
            finally:
                watch.end.set()
        if error is None or watch.cell is not None:
            break  # again only where the kernel did not even start
    if watch.peak is not None:
        write_json(Path(directory) / "run.json", {"peak_anonymous_bytes": watch.peak})
    return _finished(output, error, pictures) if output.exists() else error


def _run_cells(
    source: Path, output: Path, parameters: dict[str, Any], timeout: float, watch: _Watch
) -> None:
    import papermill
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    class ThisInterpreter(AsyncKernelManager):
        """The kernel of the running Python, whatever kernelspecs are installed for the user."""

        @property
        def kernel_spec(self) -> KernelSpec:
            return KernelSpec(**get_kernel_dict(extra_arguments=["--log-level=50"]))

        async def _async_launch_kernel(self, *command: Any, **how: Any) -> None:
            await super()._async_launch_kernel(*command, **how)
            watch.kernels.append(self.provisioner.pid)

    papermill.execute_notebook(
        str(source),
        str(output),
        parameters,
        kernel_name="python3",
        language="python",
        progress_bar=False,
        execution_timeout=timeout,
        kernel_manager_class=ThisInterpreter,
        on_cell_start=watch.started,
        on_cell_executed=lambda **_: watch.bar.update(),
    )


def _finished(output: Path, error: str | None, pictures: bool) -> str | None:
    """Strip an executed notebook of what only a live kernel could use, and add pictures; returns
    the error, which widgets may have had."""
    nbformat = import_nbformat()
    executed = nbformat.read(output, 4)
    if error is None:
        error = "\n\n".join(widget_errors(executed)) or None
    executed.metadata.pop("widgets", None)  # their text stays
    for shown in _displays(executed):
        shown.data.pop(WIDGET_VIEW, None)
    if error is None and pictures:
        add_pictures(executed, output.parent)
    with atomic(output) as part:
        nbformat.write(executed, part)
    return error


def explain(error: Exception, cell: Any, timeout: float) -> str:
    """A sentence for people, then the traceback where there is one."""
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError, strip_color

    where = (
        f"in the cell that begins `{first_line(cell)}`"
        if cell is not None
        else "before the first cell"
    )
    if isinstance(error, PapermillExecutionError):
        trace = strip_color("\n".join(error.traceback))
        return f"{error.ename}: {strip_color(error.evalue)} ({where})\n\n{trace}"
    if isinstance(error, CellTimeoutError):
        return (
            f"a cell took longer than {timeout:g} s, {where}; allow more with --timeout, or try "
            "-p smoke=true"
        )
    if isinstance(error, DeadKernelError):
        return (
            f"the kernel died {where}; most often the machine ran out of memory, so try smaller "
            "parameters"
        )
    return f"{type(error).__name__}: {error} ({where})"


def widget_errors(notebook: Any) -> Iterator[str]:
    """The exceptions that were caught in the notebook's Output widgets, each with its traceback."""
    from papermill.exceptions import strip_color

    states = notebook.metadata.get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    for model in states.values():
        if model.get("model_name") != "OutputModel":
            continue
        for output in model.get("state", {}).get("outputs", ()):
            if output.get("output_type") == "error":
                trace = strip_color("\n".join(output.get("traceback", ())))
                yield (
                    f"{output['ename']}: {output['evalue']} (inside the callback of a "
                    f"widget)\n\n{trace}"
                )


def add_pictures(notebook: Any, directory: Path) -> None:
    """Add a PNG beside every plotly figure, for viewers that run no scripts; nothing happens
    without a browser."""
    figures = [output for output in _displays(notebook) if PLOTLY in output.data]
    if not figures:
        return
    from base64 import b64encode

    from moelab.viz.theme import render_png

    for output, png in zip(figures, render_png([output.data[PLOTLY] for output in figures])):
        output.data["image/png"] = b64encode(png).decode()
        if name := output.metadata.get("moelab_figure"):
            (directory / "figures" / f"{name}.png").write_bytes(png)


def _displays(notebook: Any) -> Iterator[Any]:
    return (
        output for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output
    )


def exit_with_the_runner() -> None:
    """End this process when the runner closes the pipe, or dies."""
    os.read(sys.stdin.fileno(), 1)  # returns when the runner closes the pipe, or dies
    os._exit(1)


def main() -> None:
    job = json.loads(sys.stdin.readline())
    logging.disable()  # what papermill and nbclient log is in the error that is returned
    threading.Thread(target=exit_with_the_runner, daemon=True).start()
    _poll_for_replies()
    error = execute(**job)
    if error is not None:
        write_text(Path(job["directory"]) / "error.txt", error.strip() + "\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
