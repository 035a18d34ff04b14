"""The dev server's cleaner: removes builds that nobody has used for long.

    cleaner.py STATIC SECONDS

A build is old when its staged.timestamp is. The cleaner asks for no lock: on a
plain directory it takes away a build that is being staged anew.
"""

import os
import shutil
import sys
import time

TIMESTAMP = "staged.timestamp"


def OldBuilds(static_dir, seconds):
    """The directories with a timestamp that is older."""
    for path, dirs, files in os.walk(static_dir):
        if TIMESTAMP not in files:
            continue
        dirs.clear()
        if time.time() - os.stat(os.path.join(path, TIMESTAMP)).st_mtime > seconds:
            yield path


def main(static_dir, seconds):
    for path in sorted(OldBuilds(static_dir, float(seconds))):
        tag = os.path.relpath(path, static_dir)
        try:
            shutil.rmtree(path)
            print("removed", tag)
        except OSError as e:
            print("kept", tag, e.strerror)


if __name__ == "__main__":
    main(*sys.argv[1:])
