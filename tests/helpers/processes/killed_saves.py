"""Kills a process at the n-th time that it touches the disk, for every n. So no moment of a save is left out.

The process is forked from the tests, which takes milliseconds. What it touches is known from Python's audit events.
safetensors opens its files without any: it is killed before, in the middle and behind.
"""

import os
import shutil
import signal
import sys
import traceback

import safetensors.torch


CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")


class Killer:
    """Ends this process at the moment of this number, counted from 1."""

    def __init__(self, root, moment):
        self.root, self.moment, self.count = str(root), moment, 0

    def install(self):
        sys.addaudithook(self.hook)
        self.in_place_of(os, "fsync")
        serialize = safetensors.torch.serialize_file

        def file_in_the_middle(tensors, filename, *args, **kwargs):
            self.tick()
            serialize(tensors, filename, *args, **kwargs)
            self.tick(lambda: os.truncate(filename, os.path.getsize(filename) // 2))
            self.tick()

        safetensors.torch.serialize_file = file_in_the_middle

    def in_place_of(self, owner, name):
        function = getattr(owner, name)

        def call(*args, **kwargs):
            self.tick()
            return function(*args, **kwargs)

        setattr(owner, name, call)

    def hook(self, event, args):
        if event in CHANGES and any(self.is_inside(path) for path in args):
            self.tick()
        elif event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
            if self.is_inside(args[0]):
                self.tick()
                self.tick(lambda: os.close(os.open(args[0], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)))  # an empty file

    def is_inside(self, path):
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self.root)

    def tick(self, last=None):
        self.count += 1
        if self.count == self.moment:
            self.moment = -1  # `last` causes events too
            if last is not None:
                last()
            os.kill(os.getpid(), signal.SIGKILL)


def run_until(root, moment, action):
    """Runs `action` in a process that is killed at a moment. Returns the number of moments if there was no such
    moment, else None.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            killer = Killer(root, moment)
            killer.install()
            action()
            os.write(write, str(killer.count).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        count = pipe.read()
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the action itself has failed"
    return None if os.WIFSIGNALED(status) else int(count)


def copy_to(before, root):
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(before, root, symlinks=True)


def at_moments(before, root, action, at_most=None):
    """Yields after each kill, with `root` a copy of the folder `before`. Of more than `at_most` moments, some are left
    out.
    """
    copy_to(before, root)
    count = run_until(root, 0, action)
    assert count
    step = 1 if at_most is None else max(1, count / at_most)
    for moment in sorted({count - round(number * step) for number in range(count) if number * step < count}):
        copy_to(before, root)
        assert run_until(root, moment, action) is None
        yield moment
    copy_to(before, root)
    run_until(root, 0, action)
