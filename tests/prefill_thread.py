"""PrefillThread: a prefill engine that runs in a thread of the test's process."""

import select
import threading

from quire.engine.llm_engine import LLMEngine


class PrefillThread:
    """Steps an engine, of role "prefill" without another, whenever a peer wants something; a context, which closes it."""

    def __init__(self, **options):
        self.engine = LLMEngine(**{"role": "prefill", **options})
        self.address = str(self.engine.prefill.server.address)
        self.is_paused = threading.Event()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._is_ending:
            select.select([self.engine.prefill.wake_fd], [], [], 0.05)
            while self.engine.has_unfinished_requests() and not self.is_paused.is_set() and not self._is_ending:
                self.engine.step()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._is_ending = True
        self._thread.join()
        self.engine.close()
