"""Lets an onlooker drive the programs here, one line at a time.

A program says what happens in lines on its standard output, and takes commands
as lines on its standard input. Each command runs in a thread of its own, as
requests do in a server. Three are understood everywhere:

    pause STEP      the next thread that comes to STEP says "at STEP" and waits
    go STEP         lets it go on
    fail STEP WHY   makes it fail there, as if the system had said so
"""

import queue
import shlex
import sys
import threading
import traceback

_said = threading.Lock()
_pauses = {}  # step -> the queue that its thread will wait on
_paused = {}  # step -> the queue that its thread waits on


def say(*words):
    """Reports what happened, in one write: other processes may write there too."""
    with _said:
        sys.stdout.write(" ".join(map(str, words)) + "\n")
        sys.stdout.flush()


def at(step):
    """Comes to a step; whoever asked for a pause there decides how it goes on."""
    answer = _pauses.pop(step, None)
    if answer is None:
        return
    _paused[step] = answer
    say("at", step)
    error = answer.get()
    if error:
        raise OSError(error)


def serve(commands):
    """Obeys until the standard input ends; what has begun then goes on."""
    for line in sys.stdin:
        name, *args = shlex.split(line)
        if name == "pause":
            _pauses[args[0]] = queue.Queue()
        elif name in ("go", "fail"):
            _paused.pop(args[0]).put(" ".join(args[1:]))
        else:
            threading.Thread(target=_obey, args=(commands[name], args)).start()


def _obey(command, args):
    try:
        command(*args)
    except Exception:  # a mistake in the program itself
        say("error", traceback.format_exc())
