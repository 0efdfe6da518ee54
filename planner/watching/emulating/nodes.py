"""A command once on each of several emulated nodes: `python -S -E nodes.py VARIABLES COMMAND…`.

VARIABLES is a list, in JSON, of what the environment of each node has beside this one's.
The first to fail ends the others, which would wait for it; all end when this process does, as its
supervisor sees to that. It needs the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time

LOOK_SECONDS = 0.05


def main(variables: list[dict[str, str]], command: list[str]) -> int:
    nodes = [subprocess.Popen(command, env={**os.environ, **own}) for own in variables]
    with contextlib.suppress(KeyboardInterrupt):
        while any(node.poll() is None for node in nodes) and not any(n.poll() for n in nodes):
            time.sleep(LOOK_SECONDS)
    failed = next((status for node in nodes if (status := node.poll())), 0)
    return failed if failed >= 0 else 128 - failed


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
