"""The Python client against a server named by E2B_API_URL; one JSON line per feature."""

import json
import shutil
import sys
import threading
import time
import traceback

from e2b import CommandExitException, Sandbox, SandboxQuery, TimeoutException
from e2b.exceptions import NotFoundException

template = sys.argv[1]
failed = False


def feature(group, name):
    def run(work):
        global failed
        row = {"group": group, "feature": name}
        try:
            work()
        except Exception as error:  # every failure is a row
            failed = True
            row["error"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        print(json.dumps(row), flush=True)

    return run


def outcome_of(work, **arguments):
    try:
        return work(**arguments)
    except Exception as error:
        return error


box = Sandbox.create(template, timeout=600)


@feature("Sandbox", "create with metadata, environment, timeout")
def _():
    made = Sandbox.create(template, timeout=300, metadata={"k 1": "v&=%✓"}, envs={"COLOUR": "blue"})
    assert made.commands.run("echo $COLOUR").stdout == "blue\n"
    info = made.get_info()
    assert info.metadata == {"k 1": "v&=%✓"}, info
    found = Sandbox.list(query=SandboxQuery(metadata={"k 1": "v&=%✓"})).next_items()
    assert [item.sandbox_id for item in found] == [made.sandbox_id], found
    made.kill()


@feature("Sandbox", "create from an unknown template is refused")
def _():
    try:
        Sandbox.create("no-such-template")
    except Exception as error:
        assert "404" in str(error), error
    else:
        raise AssertionError("it was created")


@feature("Sandbox", "connect")
def _():
    other = Sandbox.connect(box.sandbox_id)
    other.files.write("/tmp/py-connected", "yes")
    assert box.files.read("/tmp/py-connected") == "yes"
    try:
        Sandbox.connect("01936f8e-72f5-7000-8000-000000000000")
    except NotFoundException:
        pass
    else:
        raise AssertionError("it connected")


@feature("Sandbox", "isRunning, before and after kill")
def _():
    made = Sandbox.create(template, timeout=300)
    assert made.is_running()
    assert made.kill()
    assert not made.is_running()


@feature("Sandbox", "kill, twice")
def _():
    made = Sandbox.create(template, timeout=300)
    assert made.kill() is True
    assert made.kill() is False


@feature("Sandbox", "pause, twice, and resume by connect")
def _():
    made = Sandbox.create(template, timeout=300)
    made.files.write("/root/kept", "on disk")
    made.pause()
    state = Sandbox.get_info(made.sandbox_id).state
    assert getattr(state, "value", state) == "paused", state
    again = Sandbox.connect(made.sandbox_id, timeout=300)
    assert again.files.read("/root/kept") == "on disk"
    again.kill()


@feature("Sandbox", "setTimeout, and the deadline kills")
def _():
    made = Sandbox.create(template, timeout=300)
    made.set_timeout(1)
    for _ in range(300):
        if not made.is_running():
            return
        time.sleep(0.1)
    raise AssertionError("it runs on")


@feature("Sandbox", "metrics")
def _():
    for _ in range(60):
        points = box.get_metrics()
        if points:
            assert points[-1].mem_total > 256 * 2**20
            return
        time.sleep(0.5)
    raise AssertionError("no point within 30 s")


@feature("Sandbox", "fork: children with the source's memory and files, ids of their own")
def _():
    box.files.write("/root/py-forked", "before")
    children = box.fork(count=2)
    for child in children:
        if isinstance(child, Exception):
            raise child
    assert len({box.sandbox_id, *(child.sandbox_id for child in children)}) == 3
    children[0].files.write("/root/py-forked", "mine")
    assert children[1].files.read("/root/py-forked") == "before"
    for child in children:
        child.kill()


@feature("Sandbox", "snapshot: the source runs on, a new sandbox starts from it")
def _():
    box.files.write("/root/py-snapped", "in it")
    snapshot = box.create_snapshot()
    assert box.commands.run("echo on").stdout == "on\n"
    clone = Sandbox.create(snapshot.snapshot_id, timeout=300)
    assert clone.files.read("/root/py-snapped") == "in it"
    clone.kill()
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) is True
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) is False


@feature("Commands", "foreground: output, errors, exit code, directory, environment, user")
def _():
    result = box.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)
    try:
        box.commands.run("echo partial; exit 7")
    except CommandExitException as error:
        assert (error.exit_code, error.stdout) == (7, "partial\n")
    else:
        raise AssertionError("no error")
    placed = box.commands.run("pwd; echo $V; id -un", cwd="/tmp", envs={"V": "v"}, user="user")
    assert placed.stdout == "/tmp\nv\nuser\n", placed


@feature("Commands", "streaming callbacks")
def _():
    # Each line is written when the one before has been seen.
    seen = []

    def on_stdout(text):
        seen.append(text)
        box.files.write(f"/tmp/py-seen-{text.strip()}", "")

    box.commands.run(
        "for i in 1 2 3; do echo $i; until [ -e /tmp/py-seen-$i ]; do sleep 0.05; done; done",
        on_stdout=on_stdout,
    )
    assert seen == ["1\n", "2\n", "3\n"], seen


@feature("Commands", "background, connect, kill")
def _():
    sleep = box.commands.run("sleep 600", background=True, timeout=0)
    assert sleep.pid in [entry.pid for entry in box.commands.list()]
    assert sleep.kill()
    assert box.commands.kill(sleep.pid) is False


@feature("Commands", "standard input, and its end")
def _():
    cat = box.commands.run("cat", background=True, stdin=True)
    box.commands.send_stdin(cat.pid, "to cat\n")
    box.commands.close_stdin(cat.pid)
    assert cat.wait().stdout == "to cat\n"


@feature("Commands", "timeout")
def _():
    try:
        box.commands.run("sleep 30", timeout=0.5)
    except TimeoutException:
        return
    raise AssertionError("no timeout")


@feature("Commands", "terminal: input, size, resize, exit code")
def _():
    from e2b import PtySize

    text = []
    pty = box.pty.create(PtySize(rows=30, cols=100), timeout=60)
    box.pty.send_stdin(pty.pid, b"stty size; exit 0\n")
    pty.wait(on_pty=lambda data: text.append(bytes(data)))
    assert b"30 100" in b"".join(text), text


@feature("Files", "write and read: text, bytes, blob, stream, several, empty")
def _():
    data = bytes(i * 7 & 255 for i in range(300_000))
    box.files.write("/tmp/py/a.txt", "text")
    box.files.write("/tmp/py/b.bin", data)
    box.files.write("/tmp/py/empty", "")
    assert box.files.read("/tmp/py/a.txt") == "text"
    assert bytes(box.files.read("/tmp/py/b.bin", format="bytes")) == data
    assert b"".join(box.files.read("/tmp/py/b.bin", format="stream")) == data
    assert box.files.read("/tmp/py/empty") == ""


@feature("Files", "list, exists, info")
def _():
    assert "b.bin" in [entry.name for entry in box.files.list("/tmp/py")]
    assert box.files.exists("/tmp/py/a.txt") and not box.files.exists("/tmp/py/none")
    assert box.files.get_info("/tmp/py/b.bin").size == 300_000


@feature("Files", "make directory, rename, remove")
def _():
    assert box.files.make_dir("/tmp/py/sub") is True
    assert box.files.make_dir("/tmp/py/sub") is False
    assert box.files.rename("/tmp/py/a.txt", "/tmp/py/c.txt").path == "/tmp/py/c.txt"
    box.files.remove("/tmp/py/c.txt")
    assert not box.files.exists("/tmp/py/c.txt")


@feature("Files", "watch")
def _():
    handle = box.files.watch_dir("/tmp/py")
    box.files.write("/tmp/py/new", "x")
    for _ in range(100):
        if any(event.name == "new" for event in handle.get_new_events()):
            handle.stop()
            return
        time.sleep(0.1)
    raise AssertionError("no event")


@feature("Commands", "terminal: a second client, kill")
def _():
    from e2b import PtySize

    pty = box.pty.create(PtySize(rows=24, cols=80), timeout=60)
    joined = box.pty.connect(pty.pid)
    text = []
    reader = threading.Thread(
        target=lambda: outcome_of(joined.wait, on_pty=lambda data: text.append(bytes(data)))
    )
    reader.start()
    box.pty.send_stdin(pty.pid, b"echo seen-$((40 + 2))\n")
    for _ in range(150):
        if b"seen-42" in b"".join(text):
            break
        time.sleep(0.1)
    else:
        raise AssertionError(text)
    assert box.pty.kill(pty.pid) is True
    assert isinstance(outcome_of(pty.wait), CommandExitException)
    reader.join(20)
    assert box.pty.kill(pty.pid) is False


@feature("Files", "metadata, gzip and octet-stream uploads, downloads in gzip")
def _():
    text = "the same again, " * 5000
    written = box.files.write("/tmp/py/zipped", text, gzip=True, metadata={"Owner": "me"})
    assert written.metadata == {"owner": "me"}, written
    assert box.files.read("/tmp/py/zipped", gzip=True) == text
    assert box.files.get_info("/tmp/py/zipped").metadata == {"owner": "me"}
    box.files.write("/tmp/py/zipped", "raw", use_octet_stream=True)
    assert box.files.read("/tmp/py/zipped") == "raw"
    assert not box.files.get_info("/tmp/py/zipped").metadata


@feature("Files", "watch with entries, in directories made later, on network mounts if asked")
def _():
    handle = box.files.watch_dir("/tmp/py", recursive=True, include_entry=True, allow_network_mounts=True)
    box.files.write("/tmp/py/later/deep/file", "12345")
    for _ in range(150):
        for event in handle.get_new_events():
            if event.name == "later/deep/file" and event.entry and event.entry.size == 5:
                handle.stop()
                return
        time.sleep(0.1)
    raise AssertionError("no event with an entry")


@feature("Git", "init, configure, add, commit, status, branches")
def _():
    with open(shutil.which("git"), "rb") as program:
        box.files.write("/usr/local/bin/git", program.read())
    box.commands.run("chmod 755 /usr/local/bin/git && git --version")
    box.git.init("/tmp/pyrepo", initial_branch="main")
    box.git.configure_user("Tester", "tester@example.com", scope="local", path="/tmp/pyrepo")
    box.files.write("/tmp/pyrepo/file", "content")
    assert box.git.status("/tmp/pyrepo").has_untracked
    box.git.add("/tmp/pyrepo")
    box.git.commit("/tmp/pyrepo", "first")
    box.git.create_branch("/tmp/pyrepo", "next")
    assert sorted(box.git.branches("/tmp/pyrepo").branches) == ["main", "next"]
    assert box.git.status("/tmp/pyrepo").is_clean


@feature("Sandbox", "kill ends a running command with the right error")
def _():
    made = Sandbox.create(template, timeout=300)
    threading.Timer(1, lambda: Sandbox.kill(made.sandbox_id)).start()
    try:
        made.commands.run("sleep 600", timeout=0)
    except TimeoutException:
        return
    raise AssertionError("no error")


@feature("Traffic", "signed download and upload URLs without headers; tampered and expired ones")
def _():
    from urllib.error import HTTPError
    from urllib.request import urlopen

    box.files.write("/tmp/py-signed.txt", "signed content")
    url = box.download_url("/tmp/py-signed.txt", use_signature_expiration=60)
    assert urlopen(url).read() == b"signed content"
    short = box.download_url("/tmp/py-signed.txt", use_signature_expiration=1)
    time.sleep(2.1)
    for bad in (url.replace("py-signed", "other"), short):
        try:
            urlopen(bad)
        except HTTPError as error:
            assert error.code == 401, error
        else:
            raise AssertionError(f"{bad} was answered")


box.kill()
sys.exit(1 if failed else 0)
