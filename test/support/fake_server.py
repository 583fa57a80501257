"""The real server over a scheduler for tests: ``python fake_server.py ENTRY [launch_server flags]``."""

from __future__ import annotations

import sys

# The server's spawned children run this file too, and imports outside this block would take each of them a second.
if __name__ == "__main__":
    import broken_scheduler
    import fake_scheduler

    from fenceline.config.engine_config import resolve
    from fenceline.config.server_args import parse_args
    from fenceline.entrypoints.supervisor import serve_until_stopped

    module = fake_scheduler if hasattr(fake_scheduler, sys.argv[1]) else broken_scheduler
    try:
        sys.exit(serve_until_stopped(resolve(parse_args(sys.argv[2:])), getattr(module, sys.argv[1])))
    except KeyboardInterrupt:  # it came before the server handles signals; launch_server does the same
        sys.exit(130)
