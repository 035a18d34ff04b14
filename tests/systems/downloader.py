"""The dev server's downloader: brings builds from an archive and unpacks them.

A build is ARCHIVE/<board>/<version>/: its files are copied while the caller
waits; its *.tar are unpacked by tar(1) in a background thread, which has the
lock until then. A build that fails anywhere is destroyed, so that it can be
tried again.

    downloader.py STATIC ARCHIVE    and then, on standard input:

    download TAG            says "staging", and later "staged" or "destroyed"
    download TAG force      stages it anew, even if it is there
    touch TAG               notes that the build is in use
"""

import os
import shutil
import subprocess
import sys
import threading

import devserver
import steps

TIMESTAMP = "staged.timestamp"  # touched by all who use the build
COMPLETE = ".complete"


def Touch(build_dir):
    """Notes that a build is in use, which needs no lock."""
    with open(os.path.join(build_dir, TIMESTAMP), "a"):
        os.utime(os.path.join(build_dir, TIMESTAMP))


class Downloader:
    """Stages builds of one archive in one static directory."""

    def __init__(self, static_dir, archive_dir):
        self.static_dir = static_dir
        self.archive_dir = archive_dir

    def Download(self, tag, force=False):
        """Stages a build; what is said is how it went."""
        build_dir = devserver.BuildDir(self.static_dir, tag)
        if force and os.path.isdir(build_dir):
            devserver.AcquireLock(self.static_dir, tag, create_once=False)
            devserver.ReleaseLock(self.static_dir, tag, destroy=True)
        elif os.path.exists(os.path.join(build_dir, COMPLETE)):
            Touch(build_dir)
            steps.say("there", tag)
            return
        devserver.AcquireLock(self.static_dir, tag)
        try:
            tars = self._Foreground(tag, build_dir)
        except OSError as e:
            self._Destroy(tag, e)
            return
        steps.say("staging", tag)
        threading.Thread(target=self._Background, args=(tag, build_dir, tars)).start()

    def _Foreground(self, tag, build_dir):
        Touch(build_dir)
        steps.at("foreground")
        archive = os.path.join(self.archive_dir, tag)
        names = sorted(os.listdir(archive))
        tars = [os.path.join(archive, n) for n in names if n.endswith(".tar")]
        for name in names:
            if not name.endswith(".tar"):
                shutil.copy(os.path.join(archive, name), build_dir)
        return tars

    def _Background(self, tag, build_dir, tars):
        try:
            steps.at("background")
            for path in tars:
                tar = subprocess.Popen(["tar", "-x", "-f", path, "-C", build_dir])
                steps.say("unpacking", tag, tar.pid)
                if tar.wait() != 0:
                    raise OSError("tar ended with status %d" % tar.returncode)
            with open(os.path.join(build_dir, COMPLETE), "w"):
                Touch(build_dir)
        except OSError as e:
            self._Destroy(tag, e)
            return
        devserver.ReleaseLock(self.static_dir, tag)
        steps.say("staged", tag)

    def _Destroy(self, tag, why):
        try:
            devserver.ReleaseLock(self.static_dir, tag, destroy=True)
            steps.say("destroyed", tag, why)
        except devserver.DevServerError as e:
            steps.say("refused", tag, e)


def main(static_dir, archive_dir):
    downloader = Downloader(static_dir, archive_dir)

    def download(tag, how=""):
        try:
            downloader.Download(tag, force=how == "force")
        except (devserver.DevServerError, OSError) as e:
            steps.say("refused", tag, e)

    def touch(tag):
        try:
            Touch(devserver.BuildDir(static_dir, tag))
            steps.say("touched", tag)
        except OSError as e:
            steps.say("refused", tag, e)

    steps.say("serving", static_dir)
    steps.serve({"download": download, "touch": touch})


if __name__ == "__main__":
    main(*sys.argv[1:])
