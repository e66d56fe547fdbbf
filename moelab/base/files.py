"""Files: where moelab's own are, how paths from users are read, and atomic writing of JSON, text and
tensors."""

from __future__ import annotations

import atexit
import json
import os
import platform
import re
import shutil
import site
import stat
import sysconfig
import tempfile
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from moelab.base.schema import naming, parse_json, typed

T = TypeVar("T")

_ROOT = Path(__file__).resolve().parents[2]
#: the repository that this package is imported from; None for an installed package
CHECKOUT = (
    _ROOT if (_ROOT / "pyproject.toml").is_file() and (_ROOT / "notebooks").is_dir() else None
)


def absolute(path: str | Path) -> Path:
    """A path from a user, "~" expanded and made absolute, as the working folder may change later."""
    return Path(os.path.expanduser(path)).absolute()


def child_environment(*folders: Path) -> dict[str, str]:
    """Of a Python process that is to import this moelab, from whatever folder, and from `folders`."""
    found = (*map(str, folders), str(_ROOT), os.environ.get("PYTHONPATH"))
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, found))}


def shipped(name: str) -> Path:
    """A file or folder of the repository's data/, in a clone or where pip installed it."""
    data = _ROOT / "data"
    share = Path("share", "moelab")
    prefixes = (_ROOT, sysconfig.get_path("data"), site.getuserbase())
    places = [data, *(Path(prefix) / share for prefix in prefixes)]
    return next((place / name for place in places if (place / name).exists()), data / name)


def beside(module: str) -> Any:
    """The content of the TOML file that lies beside a module, `__file__`, under its name."""
    return tomllib.loads(Path(module).with_suffix(".toml").read_text(encoding="utf-8"))


def small_model() -> Path:
    """The folder of the shipped small model."""
    return shipped("small")


def results_root(results: str | Path | None = None) -> Path:
    """The folder of results: the argument, else $MOELAB_RESULTS, else `results/` of the repository or
    the working folder."""
    return absolute(
        results or os.environ.get("MOELAB_RESULTS") or (CHECKOUT or Path()) / "results"
    ).resolve()


def cache_root() -> Path:
    """The cache of stores and measurements: $MOELAB_CACHE, else `data/cache` of the repository, else
    ~/.cache/moelab."""
    kept = CHECKOUT / "data" / "cache" if CHECKOUT else "~/.cache/moelab"
    return absolute(os.environ.get("MOELAB_CACHE") or kept).resolve()


def cache_folder(name: str) -> Path:
    """A folder in the cache; if it cannot be written, a temporary one, with a warning."""
    return _writable_or_temporary(cache_root() / name)


@cache
def _writable_or_temporary(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _probe(folder)
    except OSError as error:
        warnings.warn(
            f"nothing can be kept in {folder} ({error.strerror}), so it is measured and "
            "computed anew each time; set MOELAB_CACHE to a folder that can be written",
            stacklevel=3,
        )
        folder = Path(tempfile.mkdtemp(prefix="moelab-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _probe(folder: Path) -> None:
    """OSError unless a file can be written in a folder; unlike a check of permissions, this notices
    a full disk."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(bytes(1 << 16))


def from_hub(name: str, patterns: list[str]) -> Path:
    """Download the files of a hub id that match `patterns`, if they are not cached; returns their
    folder. FileNotFoundError: they cannot be had, and why."""
    from huggingface_hub import snapshot_download

    try:  # asks once; hf_hub_download for 23 s more
        folder = Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub client has a dozen kinds of "cannot be had"
        raise FileNotFoundError(
            f"{name!r} is no folder here, and as a hub id, which looks like Qwen/Qwen3-30B-A3B, it cannot "
            f"be had ({type(error).__name__}: {error}). Check the spelling and the network; log in (hf "
            f"auth login) for one with terms; or give the folder of a checkpoint"
        ) from error
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{name!r} on the hub has no config.json: it is no checkpoint for transformers. If it is GGUF, "
            f"download one of its files (hf download), and give its path"
        )
    return folder


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def stamp(path: str | Path) -> tuple[int, ...]:
    """What changes when a file is changed or replaced: (device, inode, bytes, mtime, ctime), times in
    ns; () if there is none. `cp -p` and `rsync` set the mtime; nobody can set the ctime."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def nearest(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    return next(one for one in (path, *path.parents) if one.exists())


def writable(path: str | Path) -> Path:
    """The resolved path of a file that is to be written; call it before the work that produces it.

    Raises ValueError: something that is not a regular file is there; OSError: it cannot be written,
    and why."""
    path = Path(os.path.realpath(absolute(path)))
    if os.path.lexists(path) and not path.is_file():
        raise ValueError(f"{path} is no regular file, and one is to be written; give another name")
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(f"{path} is there and write-protected; give another name")
    folder = nearest(path.parent)
    try:
        _probe(folder)
    except OSError as error:
        words = f"{path} cannot be written: {error.strerror}"
        raise OSError(error.errno, words, str(folder)) from error
    return path


def vacant(path: str | Path) -> Path:
    """The absolute path of a folder that is to be made; call it before the work that fills it.

    Raises FileExistsError: something is there; OSError: it cannot be written, and why.
    """
    path = absolute(path)
    if os.path.lexists(path):
        raise FileExistsError(
            f"{path} exists and is not overwritten; give another destination, or remove it first"
        )
    writable(path)
    return path


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """A temporary path for a file or folder, which replaces `path` when the block ends without an
    error.

    Readers see the old or the new one, complete; the last of several writers wins. Of a symbolic
    link, the target is replaced. Raises what `writable` raises."""
    path = writable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent)
    mine = f".{path.name[:40]}@{platform.node()}@{os.getpid()}@"
    # a new folder, and nobody else's: it follows no link
    folder = Path(tempfile.mkdtemp(".part", mine, path.parent))
    try:
        part = folder / path.name
        new = folder / ".new"
        new.touch()
        # safetensors has rights of its own
        rights = stat.S_IMODE((path if path.exists() else new).stat().st_mode)
        yield part
        if part.is_file():
            with open(part, "rb+") as file:
                os.fsync(file.fileno())
            part.chmod(rights)
        os.replace(part, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove folders NAME@HOST@PROCESS.part of processes of this machine that have ended."""
    import psutil

    known = re.compile(rf".*@{re.escape(platform.node())}@(\d{{1,9}})(@\w+)?\.part")
    for part in folder.glob(f"*@{platform.node()}@*.part"):
        found = known.fullmatch(part.name)
        if found and not psutil.pid_exists(int(found[1])):
            shutil.rmtree(part, ignore_errors=True)


def write_text(path: str | Path, text: str) -> Path:
    """Write UTF-8 text atomically; returns the path."""
    with atomic(path) as part:
        part.write_text(text, encoding="utf-8")
    return absolute(path)


def write_json(path: str | Path, content: Any) -> Path:
    """Write JSON atomically; returns the path. ValueError for NaN and infinities, which are no
    JSON."""
    return write_text(
        path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    )


def read_json(path: str | Path, shape: Any = Any) -> Any:
    """The content of a JSON file, as the annotation `shape` has it (`moelab.base.schema.typed`); what
    cannot be read is named in a ValueError."""
    try:
        return typed(parse_json(absolute(path).read_bytes()), shape)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete it or make it again") from error


def save_tensors(path: str | Path, form: str, tensors: dict[str, Any], **about: Any) -> Path:
    """Write tensors, the format `form` and what else is `about` them atomically as safetensors, a
    text as it is and all else as JSON; returns the path."""
    from safetensors.torch import save_file

    said = {name: one if isinstance(one, str) else json.dumps(one) for name, one in about.items()}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic(path) as part:
        save_file(tensors, part, {"format": form, **said})
    return absolute(path)


def load_tensors(
    path: str | Path,
    form: str,
    what: str,
    remedy: str,
    about: Mapping[str, Any],
    build: Callable[..., T],
) -> T:
    """What `build` makes of a file of the format `form`, called with the tensors by name and, by
    keyword, with what is `about` them: name → annotation, other than of a text read as JSON.

    what, remedy : what the file holds and what makes another, in words for the errors.

    Raises FileNotFoundError, ValueError: no such file; not a whole file, of another format, or of
    wrong content."""
    from safetensors import safe_open

    path = absolute(path)
    with naming(path, what, remedy):
        if not path.is_file():
            raise FileNotFoundError(path)
        with safe_open(path, "pt") as file:
            said = file.metadata() or {}
            if said.get("format") != form:
                raise ValueError(f"it is a safetensors file but no {what} ({form})")
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if missing := about.keys() - said.keys():
            raise ValueError(f"it does not say {', '.join(sorted(missing))}")
        words = {
            name: said[name] if kind is str else typed(parse_json(said[name]), kind, name)
            for name, kind in about.items()
        }
        return build(tensors, **words)
