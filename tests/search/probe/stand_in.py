"""What a fork server imports so that a worker does what `PLANNER_TEST_CODE` says, in place of a
training. It speaks as a worker does, and imports no torch."""

import json
import os
import subprocess
import sys
from typing import Any

from search.probe.parent import ProbeServer

CODE = "PLANNER_TEST_CODE"
MODULES = ("tests.search.probe.stand_in",)
# A child in a session of its own that ignores SIGTERM, and a grandchild.
SLEEPER = "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.fork(); time.sleep(600)"


class StandIn(ProbeServer):
    work = "tests.search.probe.stand_in:work"


def work(channel: int, given: str) -> None:
    rank = (json.loads(given)["place"] or {"rank": 0})["rank"]

    def say(**fields: Any) -> None:
        os.write(channel, json.dumps({"rank": rank, **fields}).encode())

    def answer() -> None:
        say(type="outcome", status="measured", step_seconds=[1.0])

    def leave() -> None:
        subprocess.Popen([sys.executable, "-S", "-c", SLEEPER], start_new_session=True)

    exec(os.environ[CODE], {**globals(), **locals()})
    os._exit(0)
