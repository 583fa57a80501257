"""The real server over the fake scheduler: ``python fake_server.py ENTRY [launch_server flags]``."""

from __future__ import annotations

import sys

import fake_scheduler

from fenceline.config.server_args import parse_args, resolve
from fenceline.entrypoints.supervisor import serve_until_stopped

if __name__ == "__main__":
    sys.exit(serve_until_stopped(resolve(parse_args(sys.argv[2:])), getattr(fake_scheduler, sys.argv[1])))
