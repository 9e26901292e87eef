"""Writes a folder or a file whole or not at all, also if the process is killed while it writes.

New files are written into a hidden folder. One rename then brings a new folder, or a single file, to its place. In an
existing folder, the files are replaced one by one, the configuration and the index last. Until this is done, a marker
file lies beside them, and a folder with a marker is not loaded.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError


HIDDEN, MARKER = ".hf_xattn-save-", ".hf_xattn-unfinished"
LAST = re.compile(r"(config|index|cross_attention)[\w.-]*\.json$")  # the files that say which model a folder holds


@contextlib.contextmanager
def whole_folder(
    target: str | os.PathLike[str], stale: Callable[[Path], Iterable[Path]] | None = None
) -> Iterator[Path]:
    """Context that writes files into a folder, all or none.

    The body of `with whole_folder(target) as fresh: ...` writes into the folder `fresh`.

    Args:
        target (`str` or `Path`): the folder. Its files that the body does not write are kept.
        stale (`Callable`, *optional*): returns files of an earlier save. Those that are not written again are removed.

    Raises:
        OSError: for a full disk, for example. `target` is then as it was before.
    """
    target = Path(target).resolve()  # a rename would replace a link
    target.parent.mkdir(parents=True, exist_ok=True)
    with _hidden_folder(target) as hidden:
        fresh = hidden / target.name
        fresh.mkdir()
        yield fresh
        files = [str(path.relative_to(fresh)) for path in fresh.rglob("*") if not path.is_dir()]
        for name in files:
            _flush(fresh / name)
        try:
            os.rename(fresh, target)
        except OSError:
            if not target.is_dir():
                raise
            _replace(fresh, target, files, stale or (lambda _: ()))


def _replace(fresh: Path, target: Path, files: list[str], stale: Callable[[Path], Iterable[Path]]) -> None:
    """Moves files into a folder that exists, one by one."""
    if name := next((name for name in files if (target / name).is_dir()), None):
        raise IsADirectoryError(errno.EISDIR, "Expected a file, got a folder", str(target / name))
    with _locked(target):  # so that the files of two saves do not mix
        old = {path.name for path in stale(target)}.difference(files)
        marker = target / MARKER
        earlier = marker.read_text(errors="replace").splitlines() if marker.is_file() else []
        (fresh.parent / MARKER).write_text("\n".join([*earlier, *files, *old]))
        os.replace(fresh.parent / MARKER, marker)
        for name in old:
            (target / name).unlink(missing_ok=True)
        for name in sorted(files, key=lambda name: bool(LAST.search(name))):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(fresh / name, target / name)
        left = [name for name in earlier if name not in files and (target / name).exists()]
        marker.write_text("\n".join(left))
        if not left:
            marker.unlink()


def refuse_unfinished(folder: str | os.PathLike[str]) -> None:
    """Raises a `ValueError` for a folder in which a save was cut off. Call it before the folder is read."""
    marker = Path(folder) / MARKER
    if marker.is_file():
        what = f"A save into {folder} was cut off or goes on, so it may hold files of two saves"
        raise ValueError(f"{what}. Save again into it, or remove it. {marker} names the files to save again.")


def is_free(folder: Path) -> bool:
    """Whether a folder is new or empty. Hidden folders that killed processes have left do not count."""
    return not folder.exists() or (folder.is_dir() and all(path.name.startswith(HIDDEN) for path in folder.iterdir()))


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Context that yields a path to write to. At its end, unless there was an error, the file moves to `path`."""
    path = Path(path).resolve()
    with _hidden_folder(path) as hidden:
        yield hidden / path.name
        replace_file(hidden / path.name, path)


def replace_file(written: Path, path: Path) -> None:
    """Moves a file to the place of another one, after all its content is on the disk."""
    _flush(written)
    os.replace(written, path)


def _flush(file: Path) -> None:
    with open(file, "r+b") as opened:
        os.fsync(opened)


@contextlib.contextmanager
def _hidden_folder(target: Path) -> Iterator[Path]:
    """Context that makes a hidden folder in or beside a target. It removes those that killed processes have left."""
    parent = target if target.is_dir() else target.parent
    own = HIDDEN + hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12] + "-"
    for left in parent.glob(f"{HIDDEN}*"):
        # Locks of other machines may not be seen on a network file system, so the folders of other machines stay.
        if left.is_symlink() or not left.name.startswith(own):
            continue
        with _locked(left, wait=False) as is_abandoned:
            if is_abandoned and list(left.glob("*")):  # an empty folder may belong to a process that locks it next
                shutil.rmtree(left, ignore_errors=True)
    hidden = Path(tempfile.mkdtemp(prefix=own, dir=parent))
    try:
        with _locked(hidden):
            yield hidden
    except (OSError, SafetensorError) as error:
        found = re.search(r"(?:Errno|os error) (\d+)", str(error))  # safetensors has the number only in its message
        if found is None or int(found[1]) not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        raise OSError(int(found[1]), f"{target} could not be written: {os.strerror(int(found[1]))}") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path, wait: bool = True) -> Iterator[bool]:
    """Context that locks a folder. It waits for other processes, unless `wait` is False.

    It yields whether the folder is locked. It is not if another process holds the lock, or if the system has no locks.
    """
    is_locked = False
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl  # not on Windows

            stack.callback(os.close, descriptor := os.open(folder, os.O_RDONLY))
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # Closing is not enough, because a process that was forked meanwhile has the descriptor, too.
            stack.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)
            is_locked = True
        yield is_locked
