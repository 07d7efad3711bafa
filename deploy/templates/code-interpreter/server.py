"""
Runs code for the E2B code interpreter clients (`@e2b/code-interpreter`, `e2b-code-interpreter`): HTTP on port
49999, needs nothing but Python 3.9. With IPython in the image the kernels are IPython shells (magics, `!command`,
rich display, top-level await); without it plain Python with the same results for plain code.

    POST   /execute                {code, context_id?, language?, env_vars?} -> one JSON object per line
    GET    /contexts               [{id, language, cwd}]
    POST   /contexts               {language?, cwd?} -> {id, language, cwd}
    DELETE /contexts/ID            204
    POST   /contexts/ID/restart    204, with its state gone
    GET    /health                 200 once the default kernel takes code

Lines of an execution: {type: "stdout" | "stderr", text}, {type: "result", is_main_result, text, html, png, ...},
{type: "error", name, value, traceback}, {type: "number_of_executions", execution_count}, {type: "end_of_execution"}.

A kernel is a process of its own: this program again with `--kernel FD`, requests on its standard input, events on
that descriptor, one JSON object per line each way.
"""

import argparse
import ast
import base64
import builtins
import codecs
import contextlib
import io
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAX_BODY_BYTES = 64 << 20
MAX_TEXT_BYTES = 8 << 20  # of one result in one format
START_SECONDS = 120
GATHER_SECONDS = 0.03
GATHERED_CHARACTERS = 1 << 16
INTERRUPT_SECONDS = 5
FORMATS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "text/latex": "latex",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "application/json": "json",
    "application/javascript": "javascript",
}
REPRESENTATIONS = {
    "_repr_html_": "html",
    "_repr_markdown_": "markdown",
    "_repr_latex_": "latex",
    "_repr_svg_": "svg",
    "_repr_png_": "png",
    "_repr_jpeg_": "jpeg",
    "_repr_pdf_": "pdf",
    "_repr_json_": "json",
    "_repr_javascript_": "javascript",
}

# ---- kernel --------------------------------------------------------------------------------------


class Events:
    """Where the kernel tells what happens. Text is gathered for a moment: `print` writes in pieces."""

    def __init__(self, fd):
        self._file = os.fdopen(fd, "w", encoding="utf-8")
        self._changed = threading.Condition(threading.RLock())
        self._kind, self._pending, self._size = None, [], 0
        threading.Thread(target=self._flush_now_and_then, daemon=True).start()

    def _write(self, event):
        self._file.write(json.dumps(event, default=str) + "\n")
        self._file.flush()

    def flush(self):
        with self._changed:
            if self._pending:
                text, self._pending, self._size = "".join(self._pending), [], 0
                self._write({"type": self._kind, "text": text})

    def send(self, event):
        with self._changed:
            self.flush()
            self._write(event)

    def text(self, kind, text):
        with self._changed:
            if kind != self._kind:
                self.flush()
            self._kind = kind
            self._pending.append(text)
            self._size += len(text)
            if self._size > GATHERED_CHARACTERS:
                self.flush()
            self._changed.notify()

    def _flush_now_and_then(self):
        while True:
            with self._changed:
                while not self._pending:
                    self._changed.wait()
            time.sleep(GATHER_SECONDS)
            self.flush()


class Stream(io.TextIOBase):
    """`sys.stdout` and `sys.stderr` of user code: in order with the results, without waiting for a newline."""

    def __init__(self, events, kind, fd):
        self._events, self._kind, self._fd = events, kind, fd

    encoding = "utf-8"

    def writable(self):
        return True

    def fileno(self):
        return self._fd  # of programs it starts

    def write(self, text):
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if text:
            self._events.text(self._kind, text)
        return len(text)

    def flush(self):
        pass  # within GATHER_SECONDS anyway


def encoded(value):
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode("ascii")
    return value


def short(value):
    if isinstance(value, str) and len(value) > MAX_TEXT_BYTES:
        return value[:MAX_TEXT_BYTES] + f"\n... {len(value) - MAX_TEXT_BYTES} more characters"
    return value


def formats_of(value):
    found = {"text": short(repr(value))}
    if isinstance(value, type):
        return found  # the methods are its instances'
    for method, name in REPRESENTATIONS.items():
        if not callable(getattr(value, method, None)):
            continue
        try:
            data = getattr(value, method)()
        except Exception:
            traceback.print_exc()
            continue
        if isinstance(data, tuple):
            data = data[0]
        if data is not None:
            found[name] = short(encoded(data))
    return found


class PlainShell:
    """Python without IPython: a namespace, the value of a last expression, `display`."""

    def __init__(self, result):
        self._result = result
        self.namespace = {"__name__": "__main__", "__builtins__": builtins, "display": self.display}
        self._count = 0

    def display(self, *values):
        for value in values:
            self._result(formats_of(value), False)

    def run(self, code):
        """Undefined when it went well, else (name, value, traceback)."""
        self._count += 1
        name = f"<cell {self._count}>"
        import linecache

        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        try:
            tree = ast.parse(code, name)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            self._eval(compile(tree, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
            if last is not None and not code.rstrip().endswith(";"):
                expression = ast.Expression(last.value)
                value = self._eval(compile(expression, name, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
                if value is not None:
                    self.namespace["_"] = value
                    self._result(formats_of(value), True)
            elif last is not None:
                self._eval(compile(ast.Expression(last.value), name, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
        except BaseException as error:  # also SystemExit and KeyboardInterrupt of the code
            kind, value, trace = sys.exc_info()
            while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
                trace = trace.tb_next
            if isinstance(error, SyntaxError) and trace is not None and trace.tb_frame.f_code is ast.parse.__code__:
                trace = None
            text = "".join(traceback.format_exception(kind, value, trace))
            return kind.__name__, str(error), text
        return None

    def _eval(self, compiled):
        value = eval(compiled, self.namespace)
        if compiled.co_flags & 0x80:  # CO_COROUTINE
            import asyncio

            return asyncio.run(value)
        return value


def ipython_shell(result):
    """An IPython shell with the same face as PlainShell; None when IPython is not in the image."""
    try:
        from IPython.core.displayhook import DisplayHook
        from IPython.core.displaypub import DisplayPublisher
        from IPython.core.interactiveshell import InteractiveShell
    except ImportError:
        return None

    def send(data, is_main):
        known = {FORMATS[key]: short(encoded(value)) for key, value in data.items() if key in FORMATS}
        extra = {key: short(encoded(value)) for key, value in data.items() if key not in FORMATS}
        result({**known, **extra}, is_main)

    class Publisher(DisplayPublisher):
        def publish(self, data, metadata=None, source=None, *, transient=None, update=False, **kwargs):
            send(data, False)

    class Hook(DisplayHook):
        def write_output_prompt(self):
            pass

        def write_format_data(self, format_dict, md_dict=None):
            send(format_dict, True)

    class Shell(InteractiveShell):
        colors_force = True

        def enable_gui(self, gui=None):
            pass

        def init_io(self):
            pass

        def showtraceback(self, *args, **kwargs):
            pass  # told as an error event

        showsyntaxerror = showtraceback

        def ask_exit(self):
            raise SystemExit(0)

    shell = Shell.instance(display_pub_class=Publisher, displayhook_class=Hook, colors="NoColor", history_load_length=0)
    shell.display_formatter.active_types = list(FORMATS)

    class Adapter:
        def run(self, code):
            done = shell.run_cell(code, store_history=True)
            error = done.error_before_exec or done.error_in_exec
            if error is None:
                return None
            if type(error).__name__ == "_IncompleteInputError":  # Python 3.13's own mark of one that is cut off
                error = SyntaxError(*error.args)
            kind = type(error)
            if isinstance(error, SyntaxError) and done.error_before_exec is not None:
                lines = shell.SyntaxTB.structured_traceback(kind, error, [])
            else:
                # Without the frames of the shell itself.
                lines = shell.InteractiveTB.structured_traceback(kind, error, error.__traceback__, tb_offset=1)
            return kind.__name__, str(error), shell.InteractiveTB.stb2text(lines)

    return Adapter()


def figures(result):
    """What a cell has drawn with matplotlib is shown and closed, as notebooks do."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return
    for number in pyplot.get_fignums():
        figure = pyplot.figure(number)
        out = io.BytesIO()
        figure.savefig(out, format="png", bbox_inches="tight")
        result({"text": repr(figure), "png": encoded(out.getvalue())}, False)
    pyplot.close("all")


@contextlib.contextmanager
def environment(variables):
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def reseed():
    """A kernel that was started before the snapshot would give every sandbox the same random numbers."""
    import random

    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def kernel(events_fd):
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    mark = bytes.fromhex(requests.readline())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.set_inheritable(events_fd, False)
    events = Events(events_fd)
    sys.stdout, sys.stderr = Stream(events, "stdout", 1), Stream(events, "stderr", 2)
    os.environ.setdefault("MPLBACKEND", "agg")
    sys.path.insert(0, "")

    def result(data, is_main):
        events.send({**data, "type": "result", "is_main_result": is_main})

    # User code finds itself as `__main__`, not this program. IPython has seen to that.
    shell = ipython_shell(result)
    if shell is None:
        import types

        shell, main = PlainShell(result), types.ModuleType("__main__")
        main.__dict__.update(shell.namespace)
        shell.namespace = main.__dict__
        sys.modules["__main__"] = main
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    events.send({"type": "ready"})
    for count, line in enumerate(requests, 1):
        request = json.loads(line)
        if count == 1:
            reseed()
        failed = None
        try:
            with environment(request["env"]):
                signal.signal(signal.SIGINT, signal.default_int_handler)
                try:
                    failed = shell.run(request["code"])
                    figures(result)
                finally:
                    signal.signal(signal.SIGINT, signal.SIG_IGN)
        except KeyboardInterrupt as error:
            failed = ("KeyboardInterrupt", str(error), traceback.format_exc())
        except Exception as error:
            failed = (type(error).__name__, str(error), traceback.format_exc())
        if failed is not None:
            name, value, trace = failed
            events.send({"type": "error", "name": name, "value": value, "traceback": trace})
        events.send({"type": "number_of_executions", "execution_count": count})
        events.flush()
        # What programs have written comes another way: the marks tell that it is all there.
        for fd in (1, 2):
            os.write(fd, mark)
        events.send({"type": "end_of_execution"})


# ---- contexts ------------------------------------------------------------------------------------


class Refused(Exception):
    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


def died(text):
    return {"type": "error", "name": "KernelDied", "value": text, "traceback": text}


class Context:
    """One kernel and the order in which it is given code."""

    def __init__(self, context_id, cwd):
        if not os.path.isdir(cwd):
            raise Refused(400, f"the directory {cwd} does not exist")
        self.id, self.cwd = context_id, cwd
        self.turn = threading.Lock()
        self._guard = threading.Lock()  # of the two below: no kernel is started once it is closed
        self._closed, self._child = False, None
        self._start()

    def describe(self):
        return {"id": self.id, "language": "python", "cwd": self.cwd}

    def _start(self):
        self._events = queue.Queue()
        mark = b"\0" + os.urandom(16) + b"\0"
        with self._guard:
            if self._closed:
                raise self._removed()
            events_in, events_out = os.pipe()
            try:
                self._child = subprocess.Popen(
                    [sys.executable, os.path.abspath(__file__), "--kernel", str(events_out)],
                    cwd=self.cwd,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=[events_out],
                    start_new_session=True,
                )
            except OSError as error:
                os.close(events_in)
                raise Refused(500, f"the kernel cannot be started: {error}") from None
            finally:
                os.close(events_out)
        self._send(mark.hex())
        out = self._events
        threading.Thread(target=self._read_events, args=(events_in, out, self._child), daemon=True).start()
        for kind in ("stdout", "stderr"):
            pipe = getattr(self._child, kind)
            threading.Thread(target=self._read_output, args=(kind, pipe, out, mark), daemon=True).start()
        while True:
            try:
                event = out.get(timeout=START_SECONDS)
            except queue.Empty:
                self.stop()
                raise Refused(500, f"the kernel did not start within {START_SECONDS} s") from None
            if event["type"] == "ready":
                return
            if event["type"] == "exited":
                if self._closed:
                    raise self._removed()
                raise Refused(500, f"the kernel did not start: exit status {event['status']}")

    def _removed(self):
        return Refused(404, f"context {self.id} was removed")

    def _send(self, line):
        # A kernel that has ended meanwhile tells so with its last event.
        with contextlib.suppress(OSError):
            self._child.stdin.write(line.encode() + b"\n")
            self._child.stdin.flush()

    @staticmethod
    def _read_events(fd, out, child):
        with os.fdopen(fd, "r", encoding="utf-8", errors="replace") as events:
            for line in events:
                out.put(json.loads(line))
        out.put({"type": "exited", "status": child.wait()})

    @staticmethod
    def _read_output(kind, pipe, out, mark):
        """What programs started by user code write; a mark ends what belongs to one execution."""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        held = b""
        while True:
            data = os.read(pipe.fileno(), 65536)
            *whole, held = (held + data).split(mark)
            for part in whole:
                text = decode(part, True)
                if text:
                    out.put({"type": kind, "text": text})
                out.put({"type": "mark"})
            # The beginning of a mark waits for its rest.
            start = held.rfind(mark[:1], max(0, len(held) - len(mark) + 1)) if data else -1
            if start < 0 or not mark.startswith(held[start:]):
                start = len(held)
            text, held = decode(held[:start], not data), held[start:]
            if text:
                out.put({"type": kind, "text": text})
            if not data:
                return

    def execute(self, code, env, emit, gone):
        """Emits the events of one cell. When nobody listens any more the code is interrupted."""
        with self.turn:
            while not self._events.empty():
                self._events.get_nowait()  # late output of what ran before
            # After that: whether it ends later is among the events to come.
            if self._child.poll() is not None:
                self._start()
            if self._closed:
                raise self._removed()
            self._send(json.dumps({"code": code, "env": env}))
            left, marks = None, 0
            while True:
                try:
                    event = self._events.get(timeout=0.5)
                except queue.Empty:
                    event = None
                if left is None and gone():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self._child.pid, signal.SIGINT)
                    left = INTERRUPT_SECONDS * 2
                elif left is not None and event is None:
                    left -= 1
                    if left <= 0:
                        self.restart_now()
                        return
                if event is None:
                    continue
                if event["type"] == "exited":
                    if self._closed:
                        raise self._removed()
                    text = f"the kernel ended with status {event['status']}; it is started again without its state"
                    emit(died(text))
                    emit({"type": "end_of_execution"})
                    with contextlib.suppress(Refused):  # then the next execution tries, and tells
                        self._start()
                    return
                if event["type"] == "mark":
                    marks += 1
                elif event["type"] == "end_of_execution":
                    marks += 1
                elif left is None:
                    emit(event)
                if marks == 3:
                    if left is None:
                        emit({"type": "end_of_execution"})
                    return

    def restart_now(self):
        self.stop()
        self._start()

    def close(self):
        """Its kernel ends and none follows, whatever runs."""
        with self._guard:
            self._closed = True
        self.stop()

    def restart(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)  # what runs ends first
        with self.turn:
            self.restart_now()

    def stop(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()


class Contexts:
    def __init__(self, cwd):
        self._cwd = cwd
        self._lock = threading.Lock()
        self._all = {}
        self._default = self.create(None, None).id

    def create(self, language, cwd):
        if language not in (None, "", "python"):
            raise Refused(400, f"the language {language} is not supported: this template runs python")
        context = Context(str(uuid.uuid4()), cwd or self._cwd)
        with self._lock:
            self._all[context.id] = context
        return context

    def get(self, context_id, language=None):
        if language not in (None, "", "python"):
            raise Refused(400, f"the language {language} is not supported: this template runs python")
        with self._lock:
            found = self._all.get(context_id or self._default)
        if found is None:
            raise Refused(404, f"context {context_id} was not found")
        return found

    def list(self):
        with self._lock:
            return [context.describe() for context in self._all.values()]

    def remove(self, context_id):
        context = self.get(context_id)
        if context.id == self._default:
            raise Refused(400, "the default context cannot be removed")
        with self._lock:
            self._all.pop(context.id, None)
        context.close()


# ---- HTTP ----------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    contexts = None

    def log_message(self, *args):
        pass

    def _json(self, status, value=None):
        body = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        if value is not None:
            self.send_header("Content-Type", "application/json")
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self):
        length = int(self.headers.get("Content-Length") or 0)
        if length > MAX_BODY_BYTES:
            self.close_connection = True
            raise Refused(413, f"the request is larger than {MAX_BODY_BYTES} bytes")
        try:
            body = json.loads(self.rfile.read(length) or b"{}")
        except ValueError as error:
            raise Refused(400, f"the request is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise Refused(400, "the request is not a JSON object")
        return body

    def _answer(self, work):
        try:
            work()
        except Refused as error:
            self._json(error.status, {"code": error.status, "message": str(error)})
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _parts(self):
        return [part for part in self.path.split("?", 1)[0].split("/") if part]

    def do_GET(self):
        parts = self._parts()
        if parts == ["health"]:
            self._json(200, {"status": "ok"})
        elif parts == ["contexts"]:
            self._json(200, self.contexts.list())
        else:
            self._json(404, {"code": 404, "message": f"no such path: {self.path}"})

    def do_DELETE(self):
        parts = self._parts()

        def work():
            if len(parts) != 2 or parts[0] != "contexts":
                raise Refused(404, f"no such path: {self.path}")
            self.contexts.remove(parts[1])
            self._json(204)

        self._answer(work)

    def do_POST(self):
        parts = self._parts()

        def work():
            body = self._body()
            if parts == ["execute"]:
                self._execute(body)
            elif parts == ["contexts"]:
                self._json(200, self.contexts.create(body.get("language"), body.get("cwd")).describe())
            elif len(parts) == 3 and parts[0] == "contexts" and parts[2] == "restart":
                self.contexts.get(parts[1]).restart()
                self._json(204)
            else:
                raise Refused(404, f"no such path: {self.path}")

        self._answer(work)

    def _client_is_gone(self):
        try:
            ready, _, _ = select.select([self.connection], [], [], 0)
            return bool(ready) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def _execute(self, body):
        code, env = body.get("code"), body.get("env_vars") or {}
        if not isinstance(code, str):
            raise Refused(400, "code must be a string")
        if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
            raise Refused(400, "env_vars must be an object of strings")
        context = self.contexts.get(body.get("context_id"), body.get("language"))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        broken = []

        def emit(event):
            line = json.dumps(event).encode() + b"\n"
            try:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.flush()
            except OSError:
                broken.append(True)

        try:
            context.execute(code, env, emit, lambda: bool(broken) or self._client_is_gone())
        except Refused as error:  # the answer has begun
            emit(died(str(error)))
            emit({"type": "end_of_execution"})
        if broken:
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


def main():
    arguments = argparse.ArgumentParser(description="code interpreter server")
    arguments.add_argument("--address", default="0.0.0.0")
    arguments.add_argument("--port", type=int, default=49999)
    arguments.add_argument("--cwd", default=os.getcwd(), help="working directory of contexts")
    arguments.add_argument("--kernel", type=int, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.kernel is not None:
        kernel(options.kernel)
        return
    Handler.contexts = Contexts(options.cwd)
    server = Server((options.address, options.port), Handler)
    print(f"listening on port {server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
