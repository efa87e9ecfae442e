"""The kit's own process that is killed, and what its command started."""

import subprocess
import sys
from pathlib import Path

import psutil

#: Starts a subject that stands still, prints its process id, and stands still too.
KIT = """
import sys, time
from pathlib import Path
from halfmoon_conform.subject.subject import SubjectProcess

subject = SubjectProcess([sys.executable, "-c", "import time; time.sleep(3600)"], {}, Path("log"))
subject.start()
print(subject._process.pid, flush=True)
time.sleep(3600)
"""


def test_a_subject_ends_with_the_kit_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KIT], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as kit:
        assert kit.stdout is not None
        subject = psutil.Process(int(kit.stdout.readline()))
        kit.kill()
        assert not psutil.wait_procs([subject], 60)[1]
