"""Python processes with the words that a user types, forked from a server that imports torch and transformers once.

That import takes most of the time of a short run. It is a process of its own: it may be killed, and the test goes on.
"""

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch.multiprocessing as torch_multiprocessing

from helpers.checkout import HELPERS, TESTS


KILLED = -signal.SIGKILL
STREAMS = ("stdout", "stderr")
WARM = [
    "datasets",
    "torch.distributed.tensor.parallel",
    "torch.utils.data",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.siglip.modeling_siglip",
]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(WARM)


def run(words, *, timeout=300, **given):
    """What `subprocess.run([sys.executable, *words], capture_output=True, text=True, ...)` returns."""
    with tempfile.TemporaryDirectory() as folder:
        process = start(words, Path(folder), **given)
        _wait([process], timeout)
        return _made(process, Path(folder))


def run_ranks(count, words, *, timeout=300):
    """What `count` processes print, started as `torchrun --nproc-per-node COUNT` starts them; one is alone."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(count):
            own = common | {"RANK": rank, "LOCAL_RANK": rank} if count > 1 else {}
            whole = os.environ | {name: str(value) for name, value in own.items()} | {"OMP_NUM_THREADS": "1"}
            (Path(folder) / str(rank)).mkdir()
            started.append(start(words, Path(folder) / str(rank), environment=whole))
        _wait(started, timeout)
        made = [_made(process, Path(folder) / str(rank)) for rank, process in enumerate(started)]
    assert not any(each.returncode for each in made), "\n".join(each.stderr[-3000:] for each in made)
    return "".join(each.stdout for each in made)


def free_port():
    """A port below those that the system gives to connections: nothing takes it before the ranks listen."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def spawn(function, *arguments, count=2):
    """`torch.multiprocessing.spawn`: calls a function of a helper with the rank and the arguments."""
    torch_multiprocessing.start_processes(function, arguments, count, start_method="forkserver")


def call(function, *arguments, output=None, timeout=120):
    """Calls a function of a helper in a process, and returns its exit code: `KILLED` where a signal ended it."""
    process = SERVER.Process(target=_call, args=(function, arguments, output))
    process.start()
    _wait([process], timeout)
    return process.exitcode


def start(words, folder, *, cwd=None, environment=None):
    """A process that runs, and prints to files of `folder`."""
    files = [folder / name for name in STREAMS]
    words = [str(word) for word in words]
    process = SERVER.Process(target=_play, args=(words, cwd or os.getcwd(), dict(environment or os.environ), files))
    process.start()
    return process


def _made(process, folder):
    said = [path.read_text() if (path := folder / name).exists() else "" for name in STREAMS]
    return subprocess.CompletedProcess([], process.exitcode, *said)


def _wait(processes, timeout):
    """Until all have ended, or one has failed: the others would wait for it."""
    end = time.monotonic() + timeout
    while any(process.exitcode is None for process in processes):
        running = [process.sentinel for process in processes if process.exitcode is None]
        multiprocessing.connection.wait(running, end - time.monotonic())
        if any(process.exitcode for process in processes) or time.monotonic() > end:
            for process in processes:
                process.kill()
                process.join()


def _print_to(*files):
    for stream, path in zip((sys.stdout, sys.stderr), files, strict=True):
        with open(path, "a") as file:
            os.dup2(file.fileno(), stream.fileno())


def _call(function, arguments, output):
    multiprocessing.set_start_method(None, force=True)
    if output is not None:
        _print_to(output, output)
    function(*arguments)


def _read_again(environment):
    """What the server's imports have read of its own environment."""
    import torch
    from transformers import dynamic_module_utils

    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if "HF_MODULES_CACHE" in environment:
        dynamic_module_utils.HF_MODULES_CACHE = environment["HF_MODULES_CACHE"]


def _play(words, cwd, environment, files):
    """`python WORDS...`, from a file, `-m` or `-c`."""
    multiprocessing.set_start_method(None, force=True)  # the platform's, not this server's
    _print_to(*files)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    _read_again(environment)
    # A user finds what is installed, not what the test finds beside it.
    installed = (sys.prefix, sys.base_prefix, "__editable__")
    sys.path[:] = [path for path in sys.path if path.startswith(installed)]
    first, rest = words[0], words[1:]
    sys.argv = rest if first == "-m" else [first, *(rest[1:] if first == "-c" else rest)]
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [os.getcwd() if first in ("-m", "-c") else str(Path(first).parent), *filter(None, given)]
    if Path(first).is_relative_to(HELPERS):
        sys.path.insert(0, str(TESTS))
    try:
        if first == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            exec(rest[0], {"__name__": "__main__"})
        else:
            runpy.run_path(first, run_name="__main__")
    finally:
        atexit._run_exitfuncs()
