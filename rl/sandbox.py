"""Runs what models write, shut in: no network, a read-only system, no other processes in sight, limits on everything.

A command runs in Linux namespaces of its own (mount, process, network, IPC, host name) with no capability, in a root of its
own that holds `/usr` and what belongs to it, read-only, `/tmp` in memory, and `/work`: the folder that a task's files are in.
Files of the machine that are not named here are not there: no home folders, no keys, no checkout. Of root's it runs as a user
that nobody is, drawn anew each time, who then owns the folder; of anybody else's in a user namespace. It stands in a root
changed once more, where the kernel grants no user namespaces, and below a first process that is not its own, with which all
of it ends. Needs util-linux and a kernel that lets this user make namespaces. Where that is not so it is refused, never
weakened.

It is no virtual machine: a fault in the kernel is a way out. Memory is limited for each process, so that all of a command may
take `processes` times `memory_mb`, and as much again in files without a name; files in `/work` are on the machine's disk,
limited one by one. What a command leaves there is its own: read it with `read_answer`, which follows no links, and keep the
folder in a `workspace`.
"""

import os
import secrets
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

RELAY = """
import asyncio, sys
async def copy(source, sink):
    try:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    except OSError:
        pass
    finally:
        sink.close()
async def serve(reader, writer):
    inner, outer = await asyncio.open_unix_connection("/gate")
    await asyncio.gather(copy(reader, outer), copy(inner, writer))
async def main():
    async with await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1])):
        process = await asyncio.create_subprocess_exec(*sys.argv[2:])
        return await process.wait()
sys.exit(asyncio.run(main()))
"""
"""runs a command, and gives it what answers at a socket as a port of its own"""
PORT = 8000
TOOLS = ("unshare", "mount", "umount", "pivot_root", "chroot", "env", "setpriv", "prlimit")
NAMESPACES = ("--mount", "--pid", "--fork", "--net", "--ipc", "--uts", "--kill-child")
NONE: Mapping[str, str] = MappingProxyType({})
STRANGERS = range(2**30, 2**31 - 1)
"""ids of users that no machine has"""
ENV = {"PATH": "/usr/local/bin:/usr/bin:/usr/sbin:/bin", "HOME": "/work", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
JAIL = """
set -e
bind_ro() {{ mount --rbind "$1" "$2"; mount -o remount,bind,ro,nosuid "$2"; }}
mount -t tmpfs -o size=16m,mode=755 jail {root}
cd {root}
mkdir old jail
for name in usr bin sbin lib lib32 lib64 etc proc dev; do ln -s jail/$name $name; done
cd jail
mkdir usr proc dev tmp work etc
for name in bin sbin lib lib32 lib64; do
    if [ -L /$name ]; then cp -P /$name $name; elif [ -d /$name ]; then mkdir $name; bind_ro /$name $name; fi
done
bind_ro /usr usr
for name in ld.so.cache ld.so.conf passwd group nsswitch.conf alternatives; do
    if [ -f /etc/$name ]; then cp -L /etc/$name etc/$name; fi
    if [ -d /etc/$name ]; then cp -R /etc/$name etc/$name; fi
done
{gate}
for name in null zero urandom; do touch dev/$name; mount --bind /dev/$name dev/$name; done
mount -t proc -o ro,nosuid,nodev,noexec proc proc
mount -t tmpfs -o size={tmp_mb}m,mode=1777,nosuid,nodev tmp tmp
for path in {readable}; do mkdir -p ".$path"; bind_ro "$path" ".$path"; done
mount --bind {folder} work
mount -o remount,bind,nosuid,nodev work
cd ..
pivot_root . old
umount -l /old
rmdir /old
mount -o remount,bind,ro,nosuid /
echo {stands} >&2
exec 2>&1
chroot /jail env -C /work setpriv {user} --no-new-privs --inh-caps=-all --bounding-set=-all prlimit {limits} -- "$@" && exit 0
exit $?
"""
"""The shell stays, as first process: it dies with `unshare`, which the command, were it the first, could forbid."""
STANDS = "the jail stands"
"""the last that is written to standard error before it is the command's"""
SET_UP_SECONDS = 30.0


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int | None
    """exit status, 128 and more for a signal; None: it took too long and was ended"""
    output: str
    """what it wrote to standard output and error; the middle is left out where it is too much"""


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Limits of each command.

    Raises:
        ValueError: this machine cannot isolate; it says what to install or to allow.
    """

    seconds: float = 10.0
    memory_mb: int = 512
    """of each process"""
    processes: int = 32
    file_mb: int = 16
    """longest file, and all of /tmp"""
    output_chars: int = 10_000
    readable: tuple[str, ...] = ()
    """more folders that a command may read, at their own paths"""

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_mb", "processes", "file_mb", "output_chars"):
            if getattr(self, name) <= 0:
                raise ValueError(f"sandbox.{name}: must be above 0, got {getattr(self, name)}")
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if not sys.platform.startswith("linux") or missing:
            raise ValueError(f"sandbox: needs Linux and {', '.join(missing or TOOLS)} (util-linux); nothing is run without it")
        try:
            with workspace() as folder:
                ran = self.run(["sh", "-c", PROBE], folder)
            found = "" if ran.output == "isolated\n" else ran.output.strip() or f"the probe ended with {ran.code}"
        except OSError as error:
            found = str(error)
        if found:
            raise ValueError(
                f"sandbox: this machine does not isolate ({found}); let this user make namespaces "
                f"(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns); nothing is run without it"
            )

    def run(
        self, command: Sequence[str], folder: Path, text: str = "", *, gate: Path | None = None, env: Mapping[str, str] = NONE
    ) -> Ran:
        """Runs a command in the folder, which it sees as /work.

        Args:
            text: for its standard input.
            gate: a Unix socket, the one thing outside that it can reach: as http://127.0.0.1:8000. Needs python3 and ip.
            env: more variables of its environment.

        Raises:
            OSError: the command could not be started; nothing that it did itself.
        """
        user, own = "", ["--user", "--map-root-user"]
        if os.getuid() == 0:
            stranger, own = secrets.choice(STRANGERS), []
            user = f"--reuid={stranger} --regid={stranger} --clear-groups"
            # chown, as folders may be deeper than Python goes
            _on_host("chown", "-hR", f"{stranger}:{stranger}", "--", str(folder))
        if gate is not None:
            command = ["python3", "-c", RELAY, str(PORT), *command]
        with (
            tempfile.TemporaryDirectory() as root,
            subprocess.Popen(
                ["unshare", *own, *NAMESPACES, "sh", "-c", self._script(root, folder, user, gate), "sh", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**ENV, **env},
                start_new_session=True,
            ) as process,
        ):
            try:
                with _at_most(process, SET_UP_SECONDS):
                    _stands(process)
                with _at_most(process, self.seconds) as ended:
                    output = self._talk(process, text)
                    code = process.wait()
            finally:
                _kill(process)
        return Ran(None if ended.is_set() else code, output)

    def _talk(self, process: "subprocess.Popen[bytes]", text: str) -> str:
        """Feeds a process and reads all that it writes, but keeps no more than the limit."""
        assert process.stdin is not None and process.stdout is not None
        feeder = threading.Thread(target=_feed, args=(process.stdin, text.encode(errors="replace")), daemon=True)
        feeder.start()
        half = self.output_chars // 2
        first, last, length = b"", b"", 0
        with process.stdout:
            while piece := os.read(process.stdout.fileno(), 2**16):
                length += len(piece)
                room = max(0, half - len(first))
                first, last = first + piece[:room], (last + piece[room:])[-half:]
        feeder.join()
        left_out = length - len(first) - len(last)
        middle = f"\n[{left_out} bytes are left out]\n".encode() if left_out else b""
        return (first + middle + last).decode(errors="replace")

    def _script(self, root: str, folder: Path, user: str, gate: Path | None) -> str:
        limits = {
            "as": self.memory_mb * 2**20,
            "nproc": self.processes,
            "fsize": self.file_mb * 2**20,
            "cpu": max(1, round(self.seconds)),
            "core": 0,
            "nofile": 256,
        }
        return JAIL.format(
            root=shlex.quote(root),
            stands=shlex.quote(STANDS),
            user=user,
            gate="" if gate is None else f"ip link set lo up; touch gate; mount --bind {shlex.quote(str(gate))} gate",
            folder=shlex.quote(str(folder.resolve())),
            readable=" ".join(map(shlex.quote, self.readable)),
            tmp_mb=self.file_mb,
            limits=" ".join(f"--{name}={value}" for name, value in limits.items()),
        )


PROBE = """
if touch /usr/x /x /etc/x 2>/dev/null; then echo "the system can be written"; exit; fi
while read -r _ _ _ _ place how _; do
    case "$place $how" in
        "/work rw"* | "/tmp rw"* | /dev/*) ;;
        *" rw"*) echo "$place can be written"; exit ;;
    esac
done < /proc/self/mountinfo
if [ "$(tail -n +3 /proc/net/dev | grep -vc 'lo:')" != 0 ]; then echo "there is a network"; exit; fi
if [ "$(ls /proc | grep -c '^[0-9]')" -gt 8 ]; then echo "other processes are in sight"; exit; fi
if ! touch /work/x; then echo "the folder cannot be written"; exit; fi
if mount -t tmpfs x /tmp 2>/dev/null; then echo "it has capabilities"; exit; fi
if unshare --user true 2>/dev/null; then echo "it can get capabilities"; exit; fi
echo isolated
"""


@contextmanager
def workspace() -> Iterator[Path]:
    """A new folder for a task's files, which goes with all that commands have left in it."""
    folder = Path(tempfile.mkdtemp(prefix="twinax-work-"))
    try:
        yield folder
    finally:
        discard(folder)


def discard(folder: Path) -> None:
    """Removes a folder of a sandbox, however deep and closed it is."""
    if os.getuid():
        _on_host("chmod", "-R", "u+rwX", "--", str(folder))
    _on_host("rm", "-rf", "--one-file-system", "--", str(folder))


def read_answer(folder: Path, name: str, most: int = 2**20) -> bytes | None:
    """A file that a command has left at the top of its folder; None where there is none, or it is no plain file of at most
    `most` bytes. No command may run there meanwhile."""
    assert os.sep not in name
    try:
        # a pipe would be waited for without O_NONBLOCK
        file = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # the command's doing, whatever it is
        return None
    try:
        about = os.fstat(file)
        plain = stat.S_ISREG(about.st_mode) and about.st_size <= most
        return os.read(file, most) if plain else None
    finally:
        os.close(file)


def _on_host(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=ENV)
    if done.returncode:
        raise OSError(f"sandbox: {command[0]}: {done.stderr.strip()}")


def _feed(pipe: IO[bytes], data: bytes) -> None:
    with suppress(BrokenPipeError), pipe:  # it need not read all of it
        pipe.write(data)


def _stands(process: "subprocess.Popen[bytes]") -> None:
    """Waits for the jail. OSError: it does not stand; with what was said of it."""
    assert process.stderr is not None
    said = b""
    with process.stderr:
        for line in process.stderr:
            if line.decode(errors="replace").strip() == STANDS:
                return
            said += line
    raise OSError(f"sandbox: could not be set up: {said.decode(errors='replace').strip() or 'it took too long'}")


@contextmanager
def _at_most(process: "subprocess.Popen[bytes]", seconds: float) -> Iterator[threading.Event]:
    """Kills a process that takes longer; then the event is set."""
    late = threading.Event()

    def end() -> None:
        if process.poll() is None:
            late.set()
            _kill(process)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
        timer.join()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Ends all of a command, if it runs: with the first process of a process namespace go the others."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
