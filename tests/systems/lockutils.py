"""Locks between threads and between processes, as OpenStack's services use them.

An external lock is an fcntl lock on a file PREFIX-NAME in a common directory;
whoever does not get it tries again every 10 ms. The file stays.

    with lock("disk", "nova-", external=True, lock_path="/srv/static/build"):
        ...

    @synchronized("disk", "nova-", external=True)
    def resize():
        ...

The directory is the option lock_path, which comes from the environment's
OSLO_LOCK_PATH. `lockutils.py COMMAND…` runs a command with a directory of its
own for that, and removes it afterwards.
"""

import collections
import contextlib
import fcntl
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time

DELAY = 0.01  # seconds between two tries


class Options:
    """What a service sets once, before it locks."""

    disable_process_locking = False
    lock_path = os.environ.get("OSLO_LOCK_PATH")
    on_refused = None  # called with the number of tries that were in vain


_internal = collections.defaultdict(threading.Lock)
_internal_mutex = threading.Lock()


class InterProcessLock:
    """A lock on a file, which threads of one process must not share."""

    def __init__(self, path):
        self.path = path
        self.file = None

    def acquire(self, delay=DELAY):
        self.file = open(self.path, "w")
        tries = 0
        while True:
            try:
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as e:
                if not isinstance(e, (BlockingIOError, PermissionError)):
                    raise
            tries += 1
            if Options.on_refused:
                Options.on_refused(tries)
            time.sleep(delay)

    def release(self):
        fcntl.lockf(self.file, fcntl.LOCK_UN)
        self.file.close()


def _path(name, lock_file_prefix, lock_path):
    lock_path = lock_path or Options.lock_path
    if not lock_path:
        raise ValueError("an external lock needs a lock_path")
    name = name.replace(os.sep, "_")
    if lock_file_prefix:
        name = lock_file_prefix.rstrip("-") + "-" + name
    return os.path.join(lock_path, name)


@contextlib.contextmanager
def lock(name, lock_file_prefix=None, external=False, lock_path=None):
    """Holds a lock; without external, it is one between threads only."""
    with _internal_mutex:
        internal = _internal[name]
    with internal:
        if not external or Options.disable_process_locking:
            yield internal
            return
        file_lock = InterProcessLock(_path(name, lock_file_prefix, lock_path))
        file_lock.acquire()
        try:
            yield file_lock
        finally:
            file_lock.release()


def synchronized(name, lock_file_prefix=None, external=False, lock_path=None):
    """Makes each call of a function hold a lock."""

    def decorate(function):
        @functools.wraps(function)
        def synchronous(*args, **kwargs):
            with lock(name, lock_file_prefix, external, lock_path):
                return function(*args, **kwargs)

        return synchronous

    return decorate


def lock_with_prefix(lock_file_prefix):
    """The context manager of one service."""
    return functools.partial(lock, lock_file_prefix=lock_file_prefix)


def synchronized_with_prefix(lock_file_prefix):
    """The decorator of one service."""
    return functools.partial(synchronized, lock_file_prefix=lock_file_prefix)


def wrapper(command):
    """Runs a command with a new directory for its locks; gives back its status."""
    lock_path = tempfile.mkdtemp()
    try:
        return subprocess.call(command, env=dict(os.environ, OSLO_LOCK_PATH=lock_path))
    finally:
        shutil.rmtree(lock_path, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(wrapper(sys.argv[1:]))
