"""Starting, failing and stopping: exit statuses, last lines, and nothing left behind."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import orjson
import psutil
import pytest
from fake_scheduler import RELEASE, Seed
from live_server import WAIT_S, WATCHDOG_S, LiveServer, wait_for

from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.entrypoints import supervisor
from fenceline.entrypoints.supervisor import bind_socket, listen, serve_until_stopped
from fenceline.ipc.io_struct import BatchStrOut, ShutdownReq, encode
from fenceline.ipc.mailbox import Outbox

LOCALHOST = "127.0.0.1"
HANGING = {"input_ids": [5, 6], "sampling_params": {"seed": Seed.HANG}}
HELD = {"input_ids": [5, 6], "sampling_params": {"seed": Seed.HELD, "max_new_tokens": 100}}


@pytest.fixture
def sockets_dir() -> Iterator[Path]:
    """The servers' TMPDIR, short enough for socket paths."""
    folder = Path(tempfile.mkdtemp(prefix="fl", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def start(
    sockets_dir: Path, entry: str = "run_fake_scheduler", *flags: str, under: Sequence[str] = (), cold: bool = False
) -> LiveServer:
    return LiveServer.fake(*flags, entry=entry, env={"TMPDIR": str(sockets_dir)}, under=under, cold=cold)


def socket_folders(sockets_dir: Path) -> list[Path]:
    """The folders of running servers. (The flight recorder's stays: dumps are for afterwards.)"""
    return [path for path in sockets_dir.glob("fenceline-*") if "flight-recorder" not in path.name]


def assert_all_gone(children: list[psutil.Process], sockets_dir: Path) -> None:
    _, alive = psutil.wait_procs(children, timeout=WAIT_S)
    assert alive == []
    wait_for(lambda: not socket_folders(sockets_dir))


def num_retransmitted(sock: socket.socket) -> int:
    """Packets of this connection that had to be sent again (Linux's tcp_info.tcpi_total_retrans)."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int.from_bytes(info[100:104], sys.byteorder)


def wait_running(server: LiveServer, num: int = 1) -> None:
    with server.client() as client:
        wait_for(lambda: client.get("/server_info").json()["internal_states"][0]["num_running_reqs"] == num)


def skip_if_ignored(number: int) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("this is run by nohup, under which a server outlives its terminal")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_idle_server_stops_cleanly(sockets_dir: Path, number: int) -> None:
    skip_if_ignored(number)
    with start(sockets_dir, cold=True) as server:
        children = server.wait_ready().engine_processes()
        assert socket_folders(sockets_dir)
        server.signal(number)
        assert server.wait_exit() == 0
        assert_all_gone(children, sockets_dir)
        assert "Traceback" not in server.output
        assert "error" not in server.output.lower()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the limit and the retransmissions as Linux gives them")
def test_a_burst_of_connections_waits_for_its_turn(sockets_dir: Path) -> None:
    """While the event loop is busy the kernel takes as many connections as it may, and drops none of their packets: a
    dropped one comes again a second later."""
    most = int(Path("/proc/sys/net/core/somaxconn").read_text())
    with start(sockets_dir) as server, ExitStack() as stack:
        server.wait_ready()
        server.signal(signal.SIGSTOP)
        stack.callback(server.signal, signal.SIGCONT)
        host, port = server.base_url.removeprefix("http://").split(":")
        clients = [stack.enter_context(socket.socket()) for _ in range(min(most, 3000))]
        for client in clients:
            client.setblocking(False)
            client.connect_ex((host, int(port)))
        poll = select.poll()
        for client in clients:
            poll.register(client, select.POLLOUT)

        def num_sent_again() -> int:
            return sum(num_retransmitted(client) for client in clients)

        wait_for(lambda: len(poll.poll(0)) == len(clients) or num_sent_again() > 0)
        assert num_sent_again() == 0


@pytest.mark.long
def test_signal_to_the_whole_group_drains_too(sockets_dir: Path) -> None:
    """Ctrl-C reaches the children as well, and so does a service manager's SIGTERM."""
    skip_if_ignored(signal.SIGHUP)
    with start(sockets_dir) as server:
        children = server.wait_ready().engine_processes()
        answer = server.post_in_thread(HELD)
        wait_running(server)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            for child in children:
                child.send_signal(number)
        server.signal(signal.SIGHUP)
        wait_for(lambda: "finishing 1 requests" in server.output)
        children[0].send_signal(RELEASE)
        assert server.wait_exit() == 0
        assert answer.result(WAIT_S).json()["meta_info"]["completion_tokens"] == 100
        assert_all_gone(children, sockets_dir)


def test_a_server_under_nohup_outlives_its_terminal(sockets_dir: Path) -> None:
    with start(sockets_dir, under=("nohup",)) as server, server.wait_ready().client() as client:
        server.signal(signal.SIGHUP)
        assert client.get("/health_generate").status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert "SIGTERM" in server.last_lines(1)


def test_signals_do_not_hurt_children_that_are_still_starting(sockets_dir: Path) -> None:
    with start(sockets_dir, cold=True) as server:
        wait_for(lambda: len(server.children()) == 3)
        children = server.engine_processes()
        for child in children:
            child.send_signal(signal.SIGINT)
            child.send_signal(signal.SIGTERM)
        with server.wait_ready().client() as client:
            assert client.get("/health_generate").status_code == 200
        assert [child.is_running() for child in children] == [True, True]


def test_sigterm_finishes_streams_and_refuses_new_requests(sockets_dir: Path) -> None:
    with start(sockets_dir) as server, server.wait_ready().client() as client:
        children = server.engine_processes()
        with client.stream("POST", "/generate", json={**HELD, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.signal(signal.SIGTERM)
            with server.client() as other:
                wait_for(lambda: other.get("/health").status_code == 503)
                refused = other.post("/generate", json=HELD)
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "shutting_down"
            children[0].send_signal(RELEASE)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert orjson.loads(rest[-2][6:])["meta_info"]["completion_tokens"] == 100
        assert server.wait_exit() == 0
        assert_all_gone(children, sockets_dir)


def test_who_does_not_end_in_time_is_aborted(sockets_dir: Path) -> None:
    with start(sockets_dir, "run_fake_scheduler", "--shutdown-timeout", "0.1") as server:
        answer = server.wait_ready().post_in_thread(HANGING)
        wait_running(server)
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert answer.result(WAIT_S).status_code == 503
        assert "1 requests have not ended within 0.1 s and are aborted (--shutdown-timeout)" in server.output


def test_second_signal_stops_now(sockets_dir: Path) -> None:
    with start(sockets_dir) as server:
        children = server.wait_ready().engine_processes()
        answer = server.post_in_thread(HANGING)
        wait_running(server)
        server.signal(signal.SIGTERM)
        wait_for(lambda: "finishing 1 requests" in server.output)
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 128 + signal.SIGTERM
        assert answer.result(WAIT_S).status_code == 503
        assert_all_gone(children, sockets_dir)


@pytest.mark.parametrize(
    ("seed", "reason"),
    [
        (Seed.RAISE, "FakeFailure: as the request asked"),
        (Seed.DIE, "scheduler process ended unexpectedly (exit status 77)"),
    ],
)  # fmt: skip
def test_scheduler_failure_takes_the_server_down(sockets_dir: Path, seed: int, reason: str) -> None:
    with start(sockets_dir) as server, server.wait_ready().client() as client:
        children = server.engine_processes()
        answer = server.post_in_thread(HANGING)
        wait_running(server)
        with client.stream("POST", "/generate", json={**HANGING, "stream": True}) as stream:
            server.post_in_thread({"input_ids": [1], "sampling_params": {"seed": seed}})
            lines = [line for line in stream.iter_lines() if line]
        assert server.wait_exit() == 1
        assert reason in server.last_lines()
        assert reason in answer.result(WAIT_S).json()["error"]["message"]
        assert answer.result(WAIT_S).status_code == 503
        assert reason in orjson.loads(lines[-2][6:])["error"]["message"]
        assert lines[-1] == "data: [DONE]"
        assert_all_gone(children, sockets_dir)


def test_a_killed_detokenizer_takes_the_server_down(sockets_dir: Path) -> None:
    with start(sockets_dir) as server:
        children = server.wait_ready().engine_processes()
        children[1].kill()
        assert server.wait_exit() == 1
        assert "the detokenizer process ended unexpectedly (killed by SIGKILL" in server.last_lines()
        assert_all_gone(children, sockets_dir)


@pytest.mark.long
def test_a_stopped_child_takes_the_server_down(sockets_dir: Path) -> None:
    """Each of the two kinds, in a server of its own; both wait for their watchdogs at the same time."""
    flags = ("run_fake_scheduler", "--watchdog-timeout", str(WATCHDOG_S))
    with start(sockets_dir, *flags) as first, start(sockets_dir, *flags) as second:
        servers = {"scheduler": first, "detokenizer": second}
        children = {name: server.wait_ready().engine_processes() for name, server in servers.items()}
        answers = {name: server.post_in_thread(HANGING) for name, server in servers.items()}
        for which, (name, server) in enumerate(servers.items()):
            wait_running(server)
            children[name][which].send_signal(signal.SIGSTOP)
        for name, server in servers.items():
            assert server.wait_exit() == 1
            reason = f"the {name} process has not run for {WATCHDOG_S} s (--watchdog-timeout)"
            assert reason in server.last_lines()
            assert answers[name].result(WAIT_S).status_code == 503
        assert_all_gone([child for both in children.values() for child in both], sockets_dir)


@pytest.mark.long
def test_a_server_that_was_stopped_as_a_whole_goes_on(sockets_dir: Path) -> None:
    """A shell's Ctrl-Z and fg, or a container that is paused: nobody is ill."""
    with start(sockets_dir, "run_fake_scheduler", "--watchdog-timeout", str(WATCHDOG_S)) as server:
        children = server.wait_ready().engine_processes()
        everybody = [psutil.Process(server.pid), *children]
        for process in everybody:
            process.send_signal(signal.SIGSTOP)
        resumed_at = time.monotonic() + 2.5 * WATCHDOG_S  # what is tested is time
        wait_for(lambda: time.monotonic() > resumed_at)
        for process in everybody:
            process.send_signal(signal.SIGCONT)
        with server.client() as client:
            assert client.get("/health_generate").status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert "has not run" not in server.output


def test_connections_beyond_the_descriptors_get_503(sockets_dir: Path) -> None:
    """400 clients that never finish their heads, where the system allows 200 descriptors."""
    few = ("sh", "-c", 'ulimit -n 200; exec "$@"', "sh")
    with start(sockets_dir, under=few) as server, ExitStack() as stack:
        port = int(server.wait_ready().base_url.rpartition(":")[2])
        for _ in range(400):
            half = stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
            with suppress(OSError):
                half.sendall(b"POST /generate HTTP/1.1\r\nX: ")
        assert half.recv(100).startswith(b"HTTP/1.1 503")
        stack.close()
        with server.client() as client:
            wait_for(lambda: client.get("/health").status_code == 200)
            assert client.post("/generate", json={"text": "Hello"}).status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert "Too many open files" not in server.output


def test_garbage_on_the_sockets_ends_nothing(sockets_dir: Path) -> None:
    with start(sockets_dir) as server, server.wait_ready().client() as client:
        (folder,) = socket_folders(sockets_dir)
        shutdown, texts = ShutdownReq(), BatchStrOut(outs=[])
        wrong = {"scheduler": [texts, texts], "detokenizer": [texts, texts], "tokenizer": [shutdown]}
        for name, messages in wrong.items():
            endpoint = f"ipc://{folder}/{name}"
            outbox = Outbox(endpoint)
            for garbage in (b"", b"\xc1", b"\x91" * 100_000, b"{}", os.urandom(1000), *map(encode, messages)):
                outbox.send(endpoint, garbage)
            outbox.send(endpoint, *[b"\x00"] * 100)
            outbox.close()
        wait_for(lambda: all(f"The {name}'s socket" in server.output for name in wrong))
        assert client.post("/generate", json={"text": "Hello"}).status_code == 200
        wait_for(lambda: all("dropped, 64 so far" in "".join(of(server, name)) for name in wrong))
        assert all(len(of(server, name)) == 7 for name in wrong), "1, 2, 4 and so on"


def of(server: LiveServer, name: str) -> list[str]:
    return [line for line in server.lines if f"The {name}'s socket" in line]


def test_children_follow_a_killed_server(sockets_dir: Path) -> None:
    with start(sockets_dir, cold=True) as server:
        children = server.wait_ready().engine_processes()
        server.signal(signal.SIGKILL)
        assert server.wait_exit() == -signal.SIGKILL
        assert_all_gone(children, sockets_dir)


def test_scheduler_that_dies_while_loading(sockets_dir: Path) -> None:
    with start(sockets_dir, "run_stillborn_scheduler") as server:
        assert server.wait_exit() == 1
        assert "scheduler process ended unexpectedly (exit status 3)" in server.last_lines(1)
        assert_all_gone([], sockets_dir)


def test_signal_while_loading(sockets_dir: Path) -> None:
    with start(sockets_dir, "run_never_ready_scheduler", cold=True) as server:
        wait_for(lambda: len(server.children()) == 3)
        children = server.children()
        wait_for(lambda: bool(list(sockets_dir.glob("fenceline-*/tokenizer"))))
        server.signal(signal.SIGINT)
        assert server.wait_exit() in (0, 128 + signal.SIGINT)
        assert_all_gone(children, sockets_dir)


def test_nobody_takes_the_port_between_bind_and_listen() -> None:
    with bind_socket(LOCALHOST, 0) as own, socket.socket() as other:
        port = own.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} on 127.0.0.1 is in use"):
            bind_socket(LOCALHOST, port)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind((LOCALHOST, port))
        listen(own, 8)
        socket.create_connection((LOCALHOST, port)).close()


def test_a_restart_takes_the_port_of_ended_connections() -> None:
    with bind_socket(LOCALHOST, 0) as first:
        port = first.getsockname()[1]
        listen(first, 8)
        with socket.create_connection((LOCALHOST, port)) as client:
            first.accept()[0].close()  # this side closes first, so its end stays in TIME_WAIT
            assert client.recv(1) == b""
    for _ in range(2):
        with bind_socket(LOCALHOST, port) as again:
            listen(again, 8)


def test_a_port_that_is_lost_before_listen_is_one_line() -> None:
    """Two servers that both had to share the port with connections in TIME_WAIT."""
    with socket.socket() as first, socket.socket() as second:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind((LOCALHOST, 0))
        second.bind(first.getsockname())
        second.listen()
        with pytest.raises(ValueError, match="is in use: stop the other server or choose another with"):
            listen(first, 8)


def test_busy_port_is_refused_in_one_line(sockets_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with start(sockets_dir, "run_fake_scheduler", "--port", str(port)) as server:
            assert server.wait_exit() == 1
            assert server.output.count("\n") == 1
            assert f"port {port} on 127.0.0.1 is in use" in server.output
            assert "--port" in server.output
    assert socket_folders(sockets_dir) == []


def test_threads_beside_the_event_loop_have_short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a thread writes logprobs, the loop waits for its turn several times for each answer."""
    for name in ("setup_logging", "raise_descriptor_limit"):  # of the process, which here is the tests'
        monkeypatch.setattr(supervisor, name, lambda *_: None)
    before = sys.getswitchinterval()
    try:
        with bind_socket(LOCALHOST, 0) as taken:
            port = taken.getsockname()[1]
            assert serve_until_stopped(resolve(ServerArgs(model_path="demo", device="cpu", port=port))) == 1
        assert sys.getswitchinterval() <= 0.0005
    finally:
        sys.setswitchinterval(before)
