"""A real `quire serve` process on a free port, for tests."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time

import httpx

START_TIMEOUT_S = 120
NUM_BLOCKS = 512


class LoggedProcess:
    """Starts a command, keeps what it logs, and ends it."""

    patience_s = START_TIMEOUT_S

    def __init__(self, command, **options):
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)
        self.log = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.log.append(line)

    def wait_for_log(self, pattern):
        return self.wait_for(lambda: next((found for line in list(self.log) if (found := re.search(pattern, line))), None))

    def wait_for(self, condition, timeout_s=None):
        """Return what `condition` returns as soon as it is true; a process that ends meanwhile is a failure."""
        begin = time.monotonic()
        while (waited_s := time.monotonic() - begin) < (timeout_s or self.patience_s):
            found = condition()
            if found:
                return found
            if self.process.poll() is not None and self.process.returncode != 0:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.last_words()}")
            time.sleep(0.02 if waited_s < 1 else 0.05)  # who asks takes the processor from who is waited for
        raise AssertionError(f"waited in vain:\n{self.last_words()}")

    def whole_log(self):
        """Return all that a process logged that has ended."""
        self._reader.join(60)
        return "".join(self.log)

    def last_words(self):
        """Return the end of the log, without the questions that tests ask all the time."""
        return "".join([line for line in list(self.log) if "INFO GET" not in line][-30:])

    def stop(self, number=signal.SIGTERM, timeout_s=60):
        """Send a signal and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout_s)
        finally:
            self.kill()

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)
        self.process.stderr.close()


class ServerProcess(LoggedProcess):
    """A server. `port` is known when it listens.

    prelude   Python code that the process runs before the command
    """

    def __init__(self, *options, model="demo", env=None, key=None, preexec=None, prelude=None):
        pool = ("--num-kv-blocks", str(NUM_BLOCKS))
        program = (
            ["-m", "quire"]
            if prelude is None
            else ["-c", f"{prelude}\nfrom quire.cli.main import main\nraise SystemExit(main())"]
        )
        command = [sys.executable, *program, "serve", model, "--port", "0", *pool, *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        super().__init__(command, env=environment, preexec_fn=preexec)
        self.headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.port = int(self.wait_for_log(r"listening on http://127\.0\.0\.1:(\d+)")[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def get(self, path, **options):
        return httpx.get(self.url + path, **{"timeout": 30, "headers": self.headers, **options})

    def post(self, path, body, **options):
        return httpx.post(self.url + path, json=body, **{"timeout": 60, "headers": self.headers, **options})

    def put(self, path, body, **options):
        return httpx.put(self.url + path, json=body, **{"timeout": 60, "headers": self.headers, **options})

    def post_bytes(self, path, data, media_type, **options):
        headers = {**self.headers, "content-type": media_type}
        return httpx.post(self.url + path, content=data, headers=headers, **{"timeout": 60, **options})

    def is_ready(self):
        with contextlib.suppress(httpx.TransportError):
            return self.get("/ready").status_code == 200
        return False

    def wait_ready(self):
        self.wait_for(self.is_ready)
        return self

    def engine_pids(self):
        """Return the ids of the engines' processes, in ascending order; the server has other children, such as its sandbox."""
        command = ["pgrep", "-P", str(self.process.pid), "-f", "quire.serving.engine_client.process"]
        return sorted(map(int, subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()))

    def engine_pid(self):
        """Return the id of the engine's process; None where there is none."""
        return next(iter(self.engine_pids()), None)

    def kill_engine(self):
        os.kill(self.engine_pid(), signal.SIGKILL)

    @contextlib.contextmanager
    def frozen_engine(self):
        """Hold the engine's process still: what is in flight stays so, however long the test takes."""
        pid = self.engine_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def metric(self, name, **labels):
        """Return the sum of a metric over the series that have the labels."""
        return self.metrics(name, **labels)[0]

    def metrics(self, *names, **labels):
        """Return the sums of several metrics at one moment."""
        totals = dict.fromkeys(names, 0.0)
        for line in self.get("/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            name = series.split("{")[0]
            if name in totals and all(f'{key}="{wanted}"' in series for key, wanted in labels.items()):
                totals[name] += float(value)
        return [totals[name] for name in names]

    def is_idle(self):
        """Whether nothing runs or waits, and no sequence holds a block."""
        return not any(self.metrics("quire:num_requests_running", "quire:num_requests_waiting", "quire:kv_cache_usage_perc"))


@contextlib.contextmanager
def serving(*options, **more):
    """Yield a ready server and stop it."""
    server = ServerProcess(*options, **more)
    try:
        yield server.wait_ready()
    finally:
        server.kill()
