"""The sandbox: what a command in it sees, what it may not do, what it leaves, and that it ends when it has to."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from copy import copy
from pathlib import Path

import pytest

from rl import sandbox
from rl.sandbox import Ran, Sandbox, discard, read_answer, workspace

REPO = Path(__file__).parents[1]
PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module")
def box() -> Sandbox:
    try:
        return Sandbox(seconds=3, memory_mb=256, processes=12, file_mb=1, output_chars=2000)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture
def folder() -> Iterator[Path]:
    with workspace() as made:
        yield made


def sh(box: Sandbox, folder: Path, script: str, text: str = "") -> Ran:
    return box.run(["sh", "-c", script], folder, text)


def python(box: Sandbox, folder: Path, script: str) -> Ran:
    if not Path(PYTHON).exists():
        pytest.skip(f"there is no {PYTHON}, which a sandbox could run")
    return box.run([PYTHON, "-c", script], folder)


def test_the_machine_is_not_there(box: Sandbox, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No home, checkout, keys, settings or files of others; nothing to write to but /work and /tmp."""
    monkeypatch.setenv("SECRET_KEY", "s3cret")
    (tmp_path / "secret").write_text("s3cret")
    names = [
        str(tmp_path / "secret"),
        str(REPO),
        str(Path.home() / ".ssh"),
        "/etc/shadow",
        "/root",
        "/home",
        "/sys",
        "/var",
        "/run",
    ]
    assert sh(box, folder, f"for name in {' '.join(names)}; do [ -e $name ] && echo $name; done; exit 0") == Ran(0, "")
    assert "s3cret" not in sh(box, folder, "env; cat /proc/*/environ; cat /proc/self/mountinfo; set").output
    roots = sh(box, folder, "ls /").output.split()
    assert set(roots) <= {"bin", "sbin", "lib", "lib32", "lib64", "usr", "etc", "proc", "dev", "tmp", "work"}
    assert set(sh(box, folder, "ls /dev").output.split()) == {"null", "zero", "urandom"}
    wrote = "for at in / /usr /usr/bin /etc /dev /bin /lib; do touch $at/x 2>/dev/null && echo $at; done; "
    assert sh(box, folder, wrote + "echo 1 2>/dev/null > /proc/sys/kernel/hostname && echo proc; exit 0").output == ""
    assert sh(box, folder, "touch /work/x /tmp/x && ls -a /tmp").output.split() == [".", "..", "x"]
    assert sh(box, folder, "ls -a /tmp /work").output.split() == ["/tmp:", ".", "..", "/work:", ".", "..", "x"]


def test_nothing_can_be_reached(box: Sandbox, folder: Path) -> None:
    """No network, no other processes, no capabilities, no way to get any."""
    ran = python(
        box,
        folder,
        "import os, socket\n"
        "inet, unix = socket.AF_INET, socket.AF_UNIX\n"
        "for family, at in ((inet, ('1.1.1.1', 80)), (inet, ('127.0.0.1', 22)), (unix, '/run/x')):\n"
        "    try: socket.socket(family).connect(at); print('connected', at)\n"
        "    except OSError: pass\n"
        "print([name for _, name in socket.if_nameindex()])\n"
        "print(len([p for p in os.listdir('/proc') if p.isdigit()]) < 8)",
    )
    assert ran == Ran(0, "['lo']\nTrue\n")
    ids = sh(box, folder, "grep -E '^(Cap...|NoNewPrivs)' /proc/self/status").output.split()
    assert dict(zip(ids[::2], ids[1::2], strict=True)) == {
        **{f"Cap{kind}:": "0" * 16 for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")},
        "NoNewPrivs:": "1",
    }
    tries = ("unshare --user true", "mount -t tmpfs x /tmp", "chroot /tmp true", "mknod /tmp/disk b 254 0", "umount /usr")
    ran = sh(box, folder, "; ".join(f"{one} 2>/dev/null && echo '{one}'" for one in tries) + "; exit 0")
    assert ran == Ran(0, "")
    outside = subprocess.Popen(["sleep", "60"])
    try:
        sh(box, folder, f"kill -9 1 {outside.pid}; kill -9 -1")
        assert sh(box, folder, "kill -9 1; echo there").output.endswith("there\n")
        assert outside.poll() is None
    finally:
        outside.kill()
        outside.wait()


def test_limits(box: Sandbox, folder: Path) -> None:
    ran = python(box, folder, "try: bytearray(2**30)\nexcept MemoryError: print('none')")
    assert ran == Ran(0, "none\n")
    ran = python(box, folder, "try: open('big', 'wb').write(bytes(2**22))\nexcept OSError: print('none')")
    assert ran == Ran(0, "none\n") and (folder / "big").stat().st_size <= 2**20
    assert sh(box, folder, "head -c 4000000 /dev/zero > /tmp/big").code != 0
    ran = python(
        box,
        folder,
        "import os, time\n"
        "made = 0\n"
        "try:\n"
        "    while made < 1000:\n"
        "        if not os.fork(): time.sleep(60)\n"
        "        made += 1\n"
        "except OSError: print(made)",
    )
    assert ran.code == 0 and 2 <= int(ran.output) <= 12


def test_output(box: Sandbox, folder: Path) -> None:
    ran = sh(box, folder, "echo begin; yes | head -c 50000000; echo end >&2")
    assert ran.code == 0 and ran.output.startswith("begin\ny\n") and ran.output.endswith("y\nend\n")
    assert len(ran.output) < 2100 and "\n[49998010 bytes are left out]\n" in ran.output
    assert sh(box, folder, r"printf '\303\251\377'").output == "é\ufffd"
    assert sh(box, folder, "cat; cat", "é in\nput") == Ran(0, "é in\nput")
    assert sh(box, folder, "exit 3", "x" * 10**7) == Ran(3, "")  # nobody reads it
    assert sh(box, folder, "kill -9 $$").code == 137


@pytest.mark.parametrize(
    "script",
    [
        "sleep 60",
        "exec setsid sleep 60",
        "exec >&- 2>&- <&-; sleep 60",
        "trap '' TERM INT HUP; while :; do sleep 60; done",
        "nohup setsid sleep 60 & while :; do :; done",
        "yes",
    ],
)
def test_time_is_up(folder: Path, box: Sandbox, script: str) -> None:
    short = copy(box)
    object.__setattr__(short, "seconds", 0.5)  # without a probe more
    started = time.monotonic()
    ran = sh(short, folder, script, "x" * 10**6)
    assert ran.code is None
    assert time.monotonic() - started < 5


def test_nothing_goes_on_when_a_command_has_ended(box: Sandbox, folder: Path) -> None:
    """Not even what has left its group and session and holds its output open."""
    ran = sh(box, folder, "(while :; do date +%N >> still; sleep 0.05; done) & sleep 0.3; setsid sleep 61 & exit 4")
    assert ran.code == 4
    before = (folder / "still").read_text()
    time.sleep(0.3)
    assert before and (folder / "still").read_text() == before
    assert "sleep\x0061" not in "".join(_commands())


def _commands() -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield process.read_text()
        except OSError:  # it has ended
            continue


def test_what_is_left_behind(box: Sandbox, folder: Path, tmp_path: Path) -> None:
    """Links lead out of the folder only for who follows them; odd files are no answers; all of it can be removed."""
    (tmp_path / "secret").write_text("s3cret")
    owner = (tmp_path / "secret").stat().st_uid
    sh(
        box,
        folder,
        f"ln -s {tmp_path}/secret link; ln -s {tmp_path} out; mkfifo pipe; mkdir dir; echo 1 > good; printf 123456789 > nine",
    )
    sh(box, folder, "cat link > copy; ln good hard; ln link other; touch out/x; ls -l out/ > listed")
    assert read_answer(folder, "good") == b"1\n" and read_answer(folder, "nine", 9) == b"123456789"
    assert [read_answer(folder, name) for name in ("link", "pipe", "dir", "out", "none")] == [None] * 5
    assert read_answer(folder, "nine", 8) is None and read_answer(folder, "copy") == b""
    assert [path.name for path in tmp_path.iterdir()] == ["secret"] and (tmp_path / "secret").stat().st_uid == owner
    deep = "import os\nfor _ in range(1100): os.mkdir('aaaa'); os.chdir('aaaa')"
    assert python(box, folder, deep) == Ran(0, "")
    assert sh(box, folder, "echo on").output == "on\n"
    sh(box, folder, "mkdir closed; touch closed/x; chmod 0 closed/x closed good; chmod 500 .")
    discard(folder)
    assert not folder.exists()
    folder.mkdir()


def test_the_folder_is_the_commands(box: Sandbox, folder: Path) -> None:
    """What the host puts there is its own, before each command; whose it was before is forgotten."""
    for content in ("first", "second"):
        (folder / "given").write_text(content)
        assert (
            sh(box, folder, "cat given && echo more >> given && chmod 700 given && cat given").output
            == f"{content}{content}more\n"
        )
    ids = sh(box, folder, "id -u; stat -c %u given .").output.split()
    assert len(set(ids)) == 1
    if os.getuid() == 0:
        assert folder.stat().st_uid == int(ids[0]) in sandbox.STRANGERS


def test_more_can_be_made_readable(folder: Path, box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("read me")
    tmp_path.chmod(0o755)
    reader = Sandbox(readable=(str(tmp_path),))
    ran = sh(reader, folder, f"cat {tmp_path}/note; touch {tmp_path}/x 2>/dev/null || echo no")
    assert ran == Ran(0, "read meno\n") and [path.name for path in tmp_path.iterdir()] == ["note"]


def test_what_cannot_be_set_up_is_the_machines_fault(box: Sandbox, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An OSError, never a result of the command; and a machine that does not isolate is refused."""
    gone = folder / "gone"
    with pytest.raises(OSError, match="gone"):
        box.run(["true"], gone)
    assert sh(box, folder, "no-such-command").code == 127
    assert box.run(["no-such-command"], folder).code == 127
    monkeypatch.setattr(sandbox, "JAIL", "exit 0\n")
    with pytest.raises(OSError, match="sandbox: could not be set up"):
        box.run(["true"], folder)
    with pytest.raises(ValueError, match="sandbox: this machine does not isolate.*nothing is run without it"):
        Sandbox()
    no_jail = 'echo {stands} >&2; exec 2>&1; exec setpriv {user} --no-new-privs -- "$@"\n'
    monkeypatch.setattr(sandbox, "JAIL", no_jail)
    with pytest.raises(ValueError, match=r"sandbox: this machine does not isolate \(/\S* can be written\)"):
        Sandbox()


def test_refusals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sandbox.memory_mb: must be above 0, got 0"):
        Sandbox(memory_mb=0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"sandbox: needs Linux and unshare, .*nothing is run without it"):
        Sandbox()


OTHER = """
import sys
sys.path.insert(0, sys.argv[1])
import os, sandbox
box = sandbox.Sandbox(seconds=3)
with sandbox.workspace() as folder:
    (folder / "given").write_text("1")
    checks = "id -u; unshare --user true 2>/dev/null && echo userns; grep -E '^CapEff' /proc/self/status; kill -9 1; echo on"
    print(box.run(["sh", "-c", "cat given; echo 2 > made; ls /root /home " + sys.argv[1] + " 2>/dev/null; " + checks], folder))
    print(sandbox.read_answer(folder, "made"))
    box.run(["sh", "-c", "mkdir -p closed/in; touch closed/in/x; chmod 0 closed/in closed made"], folder)
    print(box.run(["python3", "-c", "import os, time; os.setsid(); time.sleep(60)"], folder).code)
    print(sandbox.read_answer(folder, "made"))
print(os.getuid(), folder.exists())
"""


def test_as_another_user(box: Sandbox, tmp_path: Path) -> None:
    """Who is not root uses a user namespace."""
    if os.getuid() or not Path(PYTHON).exists():
        pytest.skip(f"needs root, to become another user, and {PYTHON}, which others can run")
    with workspace() as shared:
        shared.chmod(0o755)
        shutil.copy(sandbox.__file__, shared / "sandbox.py")
        command = ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups", PYTHON, "-B", "-c", OTHER, str(shared)]
        done = subprocess.run(command, capture_output=True, text=True, env={"PATH": os.environ["PATH"]}, timeout=60)
    if "does not isolate" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    ran, made, late, closed, last = done.stdout.splitlines()
    assert ran == repr(Ran(0, f"10\nCapEff:\t{'0' * 16}\non\n")), ran
    assert (made, late, closed, last) == (repr(b"2\n"), "None", "None", "1234 False")
