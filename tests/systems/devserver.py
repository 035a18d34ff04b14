"""A dev server: stages builds in directories STATIC/<board>/<version>.

AcquireLock makes the directory of a build and locks it with a lock file, so
that several servers can share one static directory. ReleaseLock gives it up,
and keeps or destroys what was staged.

    devserver.py STATIC     and then, on standard input:

    acquire TAG             a new directory for TAG, locked
    acquire TAG revisit     the same, but it may exist already
    put TAG NAME TEXT       stages a file
    release TAG [destroy]
    break TAG [destroy]     the same, as another object and by the lock's name alone
"""

import functools
import os
import shutil
import sys

import lockfile

import steps

LOCK_FILE = "devserver"  # lockfile adds ".lock"

_held = {}  # build directory -> the lock that this process has on it


class DevServerError(Exception):
    """A request that cannot be fulfilled."""


def BuildDir(static_dir, tag):
    """The directory of a tag, which has to be beneath the static directory."""
    static_dir = os.path.realpath(static_dir)
    build_dir = os.path.realpath(os.path.join(static_dir, tag))
    if build_dir == static_dir or os.path.commonpath([static_dir, build_dir]) != static_dir:
        raise DevServerError("invalid tag %r" % tag)
    return build_dir


def AcquireLock(static_dir, tag, create_once=True):
    """Makes the directory of a tag and locks it; gives back its path.

    With create_once it must be new. If the lock cannot be had, a directory
    that was made for it is removed again.
    """
    build_dir = BuildDir(static_dir, tag)
    made = False
    try:
        try:
            os.makedirs(build_dir)
            made = True
        except FileExistsError:
            if create_once or not os.path.isdir(build_dir):
                raise
        steps.at("made")
        lock = lockfile.FileLock(os.path.join(build_dir, LOCK_FILE))
        lock.acquire(timeout=0)
    except (OSError, lockfile.LockError) as e:
        if made:
            shutil.rmtree(build_dir)
        raise DevServerError("cannot acquire: %s: %s" % (type(e).__name__, e))
    _held[build_dir] = lock
    return build_dir


def ReleaseLock(static_dir, tag, destroy=False):
    """Gives up the lock on a tag's directory; any thread may do that.

    The lock ends first; then, with destroy, the directory is removed.
    """
    build_dir = BuildDir(static_dir, tag)
    lock = _held.pop(build_dir, None) or lockfile.FileLock(os.path.join(build_dir, LOCK_FILE))
    try:
        lock.release()
        steps.at("released")
        if destroy:
            shutil.rmtree(build_dir)
    except (OSError, lockfile.UnlockError) as e:
        raise DevServerError("cannot release: %s: %s" % (type(e).__name__, e))


def BreakLock(static_dir, tag, destroy=False):
    """ReleaseLock without the lock that AcquireLock made: its temporary file stays."""
    build_dir = BuildDir(static_dir, tag)
    _held.pop(build_dir, None)
    try:
        lockfile.FileLock(os.path.join(build_dir, LOCK_FILE)).break_lock()
        if destroy:
            shutil.rmtree(build_dir)
    except OSError as e:
        raise DevServerError("cannot release: %s: %s" % (type(e).__name__, e))


def main(static_dir):
    def request(command):
        """What goes wrong is the answer to a request, and not the server's end."""

        @functools.wraps(command)
        def answered(tag, *args):
            try:
                steps.say(command(tag, *args), tag)
            except (DevServerError, OSError) as e:
                steps.say("refused", tag, e)

        return answered

    @request
    def acquire(tag, how=""):
        AcquireLock(static_dir, tag, create_once=how != "revisit")
        return "acquired"

    @request
    def put(tag, name, text):
        with open(os.path.join(BuildDir(static_dir, tag), name), "w") as f:
            f.write(text)
        return "put"

    @request
    def release(tag, how=""):
        ReleaseLock(static_dir, tag, destroy=how == "destroy")
        return "released"

    @request
    def break_(tag, how=""):
        BreakLock(static_dir, tag, destroy=how == "destroy")
        return "broken"

    steps.say("serving", static_dir)
    steps.serve({"acquire": acquire, "put": put, "release": release, "break": break_})


if __name__ == "__main__":
    main(sys.argv[1])
