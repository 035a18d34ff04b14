"""A service that locks through lockutils: ours, or OpenStack's own.

    worker.py ours|oslo [OPTION]...     and then, on standard input:

    lock NAME [PATH]      says "locked" and "unlocked"; `pause NAME` holds it
    synchronized NAME     the same by a decorated function
    count NAME TIMES      counts up in the file "count" of the lock directory, which
                          has a number already, under the lock
    put NAME TEXT         writes a file into the lock directory

Options: `off` switches locks between processes off; `tell=N` says so when a lock
was refused N times.
"""

import os
import sys

import steps

PREFIX = "nova-"


def open_lockutils(which, options):
    """The library, with the options set in its own way."""
    off = "off" in options
    if which == "oslo":
        from oslo_concurrency import lockutils

        lockutils.CONF([])
        lockutils.CONF.set_override("disable_process_locking", off, "oslo_concurrency")
        return lockutils
    import lockutils

    lockutils.Options.disable_process_locking = off
    for option in options:
        if option.startswith("tell="):
            often = int(option[5:])
            lockutils.Options.on_refused = lambda n: n == often and steps.say("refused", n)
    return lockutils


def main(which, *options):
    lockutils = open_lockutils(which, options)
    nova_lock = lockutils.lock_with_prefix(PREFIX)
    nova_synchronized = lockutils.synchronized_with_prefix(PREFIX)
    directory = os.environ.get("OSLO_LOCK_PATH", "")

    def hold(name):
        steps.say("locked", name)
        steps.at(name)

    def lock(name, path=None):
        try:
            with nova_lock(name, external=True, lock_path=path):
                hold(name)
        except Exception as e:
            steps.say("refused", name, type(e).__name__, e)
        else:
            steps.say("unlocked", name)

    def synchronized(name):
        nova_synchronized(name, external=True)(hold)(name)
        steps.say("unlocked", name)

    def count(name, times):
        path = os.path.join(directory, "count")
        for _ in range(int(times)):
            with nova_lock(name, external=True):
                n = int(open(path).read())
                with open(path, "w") as f:
                    f.write(str(n + 1))
        steps.say("counted", name)

    def put(name, text):
        try:
            with open(os.path.join(directory, name), "w") as f:
                f.write(text)
            steps.say("put", name)
        except OSError as e:
            steps.say("refused", name, e.strerror)

    steps.say("serving", directory)
    steps.serve({"lock": lock, "synchronized": synchronized, "count": count, "put": put})


if __name__ == "__main__":
    main(*sys.argv[1:])
