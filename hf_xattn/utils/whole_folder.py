"""Writes a folder or a file whole, or not at all. A process that ends meanwhile, also by SIGKILL, leaves the old state or the new one.

New files are first written into a hidden folder and flushed to the disk. Then they get their places:

- A folder that does not exist yet: the hidden folder lies beside it, and one rename brings all files. A single file is replaced so too.
- A folder that exists is not replaced as a whole: it may be a mount, somebody's working folder, or hold files and runs of others. The
  hidden folder lies inside, and its files move one by one. The move of the first one, the configuration, decides. A process that is
  killed before it has changed nothing. After it, whoever loads the folder or saves there next moves the others.

Whoever writes a folder holds a lock on its hidden folder, so that others can tell what a killed process has left, and remove it. Whoever
moves files in a folder holds a lock on this folder, so that the files of two saves do not mix.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from safetensors import SafetensorError


fcntl: Any
try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

BESIDE, INSIDE = ".hf_xattn-new-", ".hf_xattn-save-"
JOURNAL = "journal.json"
FORMAT = 1  # of journals
LARGEST_JOURNAL = 2**20
FIRST = ("config.json", "adapter_config.json", "processor_config.json")
SMALL = 2**20  # bytes of a file that is worth a comparison with the one that it would replace
ABANDONED_AFTER = 24 * 3600  # seconds, where nothing can be locked
LONGEST_TURN = 60.0  # seconds that another process may take to move its files: renames alone
FULL = {code for name in ("ENOSPC", "EFBIG", "EDQUOT") if (code := getattr(errno, name, None)) is not None}


class _Journal(NamedTuple):
    """What is left to do after the first file has its place."""

    folder: str  # with the new files
    first: str
    stale: list[str]  # files of the earlier state that go
    format: int = FORMAT


class WholeFolder:
    """Writes files into a folder, all or none: `with WholeFolder(target) as fresh: ...` writes into `fresh`.

    Files of `target` that the body does not write stay as they are.

    Args:
        target (`str` or `Path`): the folder, which may exist.
        stale (`Callable`, *optional*): returns the files of `target` that belong to an earlier save. Those that the body does not write
            again are removed.

    Raises:
        OSError: for a full disk, among others. `target` is then as it was before.
    """

    def __init__(self, target: str | os.PathLike[str], stale: Callable[[Path], Iterable[Path]] | None = None):
        self.target = Path(
            target
        ).resolve()  # renaming must not replace a link; `.` and `..` name no folder to write beside
        self._stale = stale
        self._hidden: _Hidden | None = None

    def __enter__(self) -> Path:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        clear_interrupted(self.target)
        exists = self.target.is_dir()
        if not exists and self.target.exists():
            raise FileExistsError(errno.EEXIST, "Expected a folder, got a file", str(self.target))
        with _explained(self.target):
            self._hidden = _Hidden(self.target if exists else self.target.parent, INSIDE if exists else BESIDE)
            self.fresh = self._hidden.path / self.target.name
            self.fresh.mkdir()
        return self.fresh

    @property
    def is_open(self) -> bool:
        """Whether files can still be written into `fresh`."""
        return self._hidden is not None

    def commit(self) -> None:
        """Brings the files to their places. The end of the `with` statement does it too."""
        if self._hidden is None:
            return
        with _explained(self.target):
            for path in self.fresh.rglob("*"):
                _flush(path)
            _flush(self.fresh)
            if not self._hidden.path.name.startswith(INSIDE):
                try:
                    os.rename(self.fresh, self.target)
                except OSError:
                    if not self.target.is_dir():
                        raise
                    self._move_inside()  # somebody else has made the folder meanwhile
            if self._hidden.path.name.startswith(INSIDE):
                with _turn(self.target):
                    _finish_all(
                        self.target
                    )  # the save of a process that was killed since this one began is the older one
                    self._replace_files(self._hidden.path)
        _flush(self.target.parent)
        self._close()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            with _explained(self.target):
                if isinstance(error, (OSError, SafetensorError)):
                    raise error
            if error is None:
                self.commit()
        finally:
            self._close()

    def _move_inside(self) -> None:
        assert self._hidden is not None
        self._hidden.rename(self.target / (INSIDE + secrets.token_hex(8)))
        self.fresh = self._hidden.path / self.target.name

    def _replace_files(self, hidden: Path) -> None:
        files = [name for name in _files(self.fresh) if not self._is_there_already(name)]
        kept = set(_files(self.fresh))
        old = () if self._stale is None else self._stale(self.target)
        stale = sorted(name for path in old if (name := path.name) not in kept)
        if not kept or not (files or stale):
            return
        first = next((name for name in (*FIRST, *files) if name in files), min(kept))
        for name in files:
            _place(self.target, name)  # makes its checks
        for name in kept - {first}:
            if name not in files:
                (self.fresh / name).unlink()
        journal = hidden / JOURNAL
        journal.write_text(json.dumps(_Journal(self.fresh.name, first, stale)._asdict()))
        _flush(journal)
        _flush(hidden)
        os.replace(self.fresh / first, _place(self.target, first))
        _finish(hidden, self.target)

    def _is_there_already(self, name: str) -> bool:
        new, old = self.fresh / name, self.target / name
        if not old.is_file() or old.is_symlink() or not new.stat().st_size == old.stat().st_size <= SMALL:
            return False
        return filecmp.cmp(new, old, shallow=False)

    def _close(self) -> None:
        if self._hidden is not None:
            hidden, self._hidden = self._hidden, None
            try:
                if _journal_of(hidden.path) is not None:
                    with _turn(self.target):
                        _finish(hidden.path, self.target)
            except BaseException:
                hidden.unlock()  # a later save or load finishes it
                raise
            hidden.close()


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields the path to write to, in a hidden folder. The file replaces the one at `path` at the end of the `with` statement.

    Raises:
        FileNotFoundError: if the folder of `path` does not exist.
        OSError: for a full disk, among others. The file at `path` is then as it was before.
    """
    path = Path(path).resolve()
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "Expected the folder of the file to exist", str(path))
    _remove_abandoned(path.parent, BESIDE)
    with _explained(path):
        hidden = _Hidden(path.parent, BESIDE)
        try:
            yield hidden.path / path.name
            replace_file(hidden.path / path.name, path)
        finally:
            hidden.close()


def replace_file(written: Path, path: Path) -> None:
    """Moves a file to the place of another one. It is on the disk before it gets the name."""
    _flush(written)
    os.replace(written, path)
    _flush(path.parent)


def finish_interrupted(folder: str | os.PathLike[str]) -> None:
    """Finishes a save into a folder that a process began to move and was killed. To be called before the folder is read.

    Raises:
        OSError: if that is not possible, for example because the folder may not be written to.
        ValueError: for a save by a later version of this package, which alone knows how it goes on.
    """
    target = Path(folder)
    if any(_journal_of(hidden) is not None for hidden in _hidden_folders(target, INSIDE)):
        with _turn(target):  # a process that still moves its files is waited for
            _finish_all(target)


def _finish_all(target: Path) -> None:
    for hidden in _hidden_folders(target, INSIDE):
        try:
            _finish(hidden, target)
        except OSError as error:
            raise OSError(
                error.errno,
                f"A save into {target} was interrupted, and its files cannot be moved to their places ({error}). Load the folder "
                "once where it can be written to, or save the model again",
            ) from error


def clear_interrupted(folder: str | os.PathLike[str]) -> None:
    """Finishes interrupted saves as [`finish_interrupted`], and removes what killed processes left in a folder and beside it."""
    path = Path(folder).resolve()
    finish_interrupted(path)
    _remove_abandoned(path, INSIDE)
    _remove_abandoned(path.parent, BESIDE)


class _Hidden:
    """A locked hidden folder."""

    def __init__(self, parent: Path, prefix: str):
        while True:
            self.path = parent / (prefix + secrets.token_hex(8))
            self.path.mkdir()
            self._lock = _try_lock(self.path)
            if self._lock is not None and self.path.is_dir():
                return
            self.unlock()  # somebody took it for abandoned before it was locked

    def rename(self, path: Path) -> None:
        os.rename(self.path, path)
        self.path = path

    def close(self) -> None:
        _remove(self.path)
        self.unlock()

    def unlock(self) -> None:
        if self._lock is not None and self._lock >= 0:
            os.close(self._lock)
        self._lock = None


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Inside, no other process and no other thread moves files in a folder, where folders can be locked."""
    lock, end = _try_lock(folder), time.monotonic() + LONGEST_TURN
    while lock is None and folder.is_dir() and time.monotonic() < end:
        time.sleep(0.01)
        lock = _try_lock(folder)
    try:
        yield
    finally:
        if lock is not None and lock >= 0:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor too
            os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """Locks a folder. Returns None if another process has locked or removed it, and -1 if folders cannot be locked here."""
    if fcntl is None:
        return -1
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # some network file systems
        os.close(descriptor)
        return -1
    return descriptor


def _remove_abandoned(folder: Path, prefix: str) -> None:
    for hidden in _hidden_folders(folder, prefix):
        try:
            lock = _try_lock(hidden)
            if lock is None or (lock < 0 and time.time() - hidden.stat().st_mtime < ABANDONED_AFTER):
                continue
        except OSError:  # of another user, or gone
            continue
        _remove(hidden)
        if lock >= 0:
            os.close(lock)


def _remove(hidden: Path) -> None:
    """Removes a hidden folder. Without its journal, nobody takes the rest of it for files that wait for their places."""
    with contextlib.suppress(OSError):
        (hidden / JOURNAL).unlink(missing_ok=True)
        shutil.rmtree(hidden, ignore_errors=True)


def _hidden_folders(folder: Path, prefix: str) -> list[Path]:
    pattern = re.compile(re.escape(prefix) + "[0-9a-f]{16}")
    try:
        with os.scandir(folder) as entries:
            return sorted(
                Path(entry.path)
                for entry in entries
                if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            )
    except OSError:
        return []


def _journal_of(hidden: Path) -> _Journal | None:
    """What is left to do for a hidden folder. None before its first file has its place. It may come with a downloaded folder."""
    path = hidden / JOURNAL
    try:
        if path.is_symlink() or path.stat().st_size > LARGEST_JOURNAL:
            return None
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    if isinstance(content, dict) and type(content.get("format")) is int and content["format"] > FORMAT:
        raise ValueError(
            f"{hidden} holds files of a save that was interrupted, by a later version of hf_xattn. Load the folder once with that version, "
            "or save the model again in another folder."
        )
    try:
        journal = _Journal(**content)
        names = [journal.folder, *journal.stale]
        if not all(isinstance(name, str) and Path(name).name == name not in ("", "..") for name in names):
            return None
        waits = (hidden / journal.folder / journal.first).exists()
    except (OSError, ValueError, TypeError):
        return None
    return None if waits else journal


def _finish(hidden: Path, target: Path) -> None:
    """Moves the files behind the first one. Several processes may do this at once."""
    journal = _journal_of(hidden)
    if journal is None:
        return
    for name in journal.stale:  # first: transformers takes a file with all weights before an index of shards
        (target / name).unlink(missing_ok=True)
    for name in _files(hidden / journal.folder):
        with contextlib.suppress(FileNotFoundError):
            os.replace(hidden / journal.folder / name, _place(target, name))
    _flush(target)
    _remove(hidden)


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


def _place(target: Path, name: str) -> Path:
    """Where a file goes. Makes the folders above it."""
    place = target / name
    if place.is_dir() and not place.is_symlink():
        raise IsADirectoryError(errno.EISDIR, "Expected a file, or nothing, in the place of a new file", str(place))
    if len(Path(name).parts) > 1:
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.parent.resolve().is_relative_to(target.resolve()):
            raise OSError(
                errno.EXDEV, "Expected a folder below the one that is saved to, got a link", str(place.parent)
            )
    return place


def _flush(path: Path) -> None:
    """Flushes a file or the names in a folder to the disk."""
    if os.name == "nt" and path.is_dir():
        return
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):  # file systems that cannot
                raise
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _explained(target: Path) -> Iterator[None]:
    """Says of a full disk that nothing is lost."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        code = _code_of(error)
        if code is None or code not in FULL:
            raise
        raise OSError(
            code,
            f"{target} could not be written: {os.strerror(code)}. It is as it was before. Free some space, or choose another place",
        ) from error


def _code_of(error: Any) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))  # safetensors tells it in words
    return None if found is None else int(found[1])
