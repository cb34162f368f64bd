"""Machines as network namespaces: each with an address and a host name of its own. Needs root.

They hang on a bridge, which is this machine's way to them as well, or on a switch with a delay
(`tap_relay`). All is taken away by `close`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

_PREFIX = f"mn{os.getpid() % 100_000}"  # names of devices have 15 letters at most
# Runs a command as if on a machine: nsenter, then its own name and /etc/hosts. The process stays
# the same one through all of it, so that who kills it kills the command.
_ENTER = 'hostname "$0"; mount --bind "$MOENS_HOSTS" /etc/hosts; exec "$@"'


def why_not() -> str | None:
    """The reason for which there can be no namespaces here."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    for tool in ("ip", "nsenter", "unshare", "mount", "hostname"):
        if shutil.which(tool) is None:
            return f"needs {tool}"
    try:
        _ip("netns", "add", f"{_PREFIX}t")
        _ip("netns", "del", f"{_PREFIX}t")
        _ip("link", "add", f"{_PREFIX}t", "type", "bridge")
        _ip("link", "del", f"{_PREFIX}t")
    except subprocess.CalledProcessError as error:
        return f"this kernel or container does not allow it: {error.stderr.strip()}"
    return None


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Machines:
    """num machines, each at `address(i)` with the name `name(i)`; this one is at `outer`."""

    def __init__(self, num: int, tmp: Path, delay: float = 0.0) -> None:
        """delay: seconds on each way between any two (and to this machine)."""
        self.num = num
        self._relay: subprocess.Popen[str] | None = None
        self._net = f"10.{160 + os.getpid() % 40}.{os.getpid() // 40 % 250}"
        self.outer = f"{self._net}.254"
        self.hosts = tmp / "hosts"
        names = "".join(f"{self.address(i)} {self.name(i)}\n" for i in range(num))
        self.hosts.write_text(f"127.0.0.1 localhost\n{names}")
        try:
            self._make(delay)
        except BaseException:
            self.close()
            raise

    def name(self, i: int) -> str:
        return f"{_PREFIX}h{i}"

    def address(self, i: int) -> str:
        return f"{self._net}.{10 + i}"

    def _make(self, delay: float) -> None:
        link = f"{_PREFIX}b"
        for i in range(self.num):
            _ip("netns", "add", self.name(i))
            _ip("-n", self.name(i), "link", "set", "lo", "up")
        if delay:
            names = [self.name(i) for i in range(self.num)]
            script = Path(__file__).with_name("tap_relay.py")
            self._relay = subprocess.Popen(
                [sys.executable, str(script), str(delay), "eth0", *names, "--", link],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert self._relay.stdout is not None and self._relay.stdout.readline() == "up\n"
        else:
            _ip("link", "add", link, "type", "bridge")
            for i in range(self.num):
                veth = f"{_PREFIX}v{i}"
                _ip("link", "add", veth, "type", "veth", "peer", "eth0", "netns", self.name(i))
                _ip("link", "set", veth, "master", link, "up")
        for i in range(self.num):
            _ip("-n", self.name(i), "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
            _ip("-n", self.name(i), "link", "set", "eth0", "up")
        _ip("addr", "add", f"{self.outer}/24", "dev", link)
        _ip("link", "set", link, "up")

    def command(self, i: int, *command: str) -> list[str]:
        """For `launched.Running` and its like, which put our Python in front."""
        enter = ["nsenter", f"--net=/run/netns/{self.name(i)}", "unshare", "--uts", "--mount"]
        shell = [*enter, "sh", "-c", _ENTER, self.name(i), sys.executable, *command]
        return ["-c", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])", *shell]

    @property
    def env(self) -> dict[str, str]:
        return {"MOENS_HOSTS": str(self.hosts)}

    def close(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        for i in range(self.num):
            # A namespace's devices go with it, but later: the next one's would find the name taken.
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("link", "del", f"{_PREFIX}v{i}")
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", self.name(i))
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", f"{_PREFIX}b")
