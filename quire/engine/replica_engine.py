"""ReplicaEngine: several engine processes with the part of LLMEngine's interface that LLM needs."""

from __future__ import annotations

import heapq
import itertools
import socket
import subprocess
import sys
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from quire.base.environment import environment_with_quire
from quire.base.errors import (
    ConfigError,
    InvariantError,
    ModelFormatError,
    QuireError,
    RequestError,
    UnsupportedError,
    WorkerError,
)
from quire.base.logging import get_logger
from quire.contracts.config import EngineConfig
from quire.contracts.lora import LoRARequest
from quire.contracts.outputs import EmbeddingRequestOutput, RequestOutput
from quire.contracts.pooling_params import PoolingParams
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.contracts.sleep import SleepLevel, check_sleep_arguments
from quire.engine.compiling import grammar_use
from quire.engine.embedding_output import EmbeddingStream
from quire.engine.interrupts import Interrupts
from quire.engine.output import OutputStream
from quire.engine.replica_messages import (
    AdapterAnswer,
    AdapterCommand,
    Command,
    Loaded,
    LoadFailed,
    SleepAnswer,
    SleepCommand,
    send_start,
)
from quire.engine.replica_router import ReplicaRouter
from quire.engine.replica_setup import ReplicaSetup, replica_setups
from quire.engine.request_factory import PromptLike, RequestFactory, RequestRules
from quire.engine.scheduling.admission import check_servable
from quire.grammar.compiler import Compilation, GrammarCompiler
from quire.grammar.vocabulary import Vocabulary, read_vocabulary
from quire.text.tokenizer import Tokenizer, load_tokenizer

logger = get_logger(__name__)

EngineOutput = RequestOutput | EmbeddingRequestOutput

_COMMAND = (sys.executable, "-P", "-m", "quire.engine.replica_process")
_MAX_RESTARTS = 3
_WAIT_S = 0.1
_STOP_S = 5.0
_KINDS = (ConfigError, ModelFormatError, UnsupportedError)


class _Replica:
    """One engine process; `loaded` is None while it loads, and `is_gone` after it ended and was not started again."""

    def __init__(self, setup: ReplicaSetup) -> None:
        self._setup = setup
        self.requests: dict[str, Request] = {}
        self.loaded: Loaded | None = None
        self.num_restarts = 0
        self.answer: AdapterAnswer | None = None
        self.start()

    def start(self) -> None:
        """Start the process. Raises OSError."""
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        with theirs:
            variables = {**environment_with_quire(), **self._setup.environment}
            command = (*_COMMAND, str(theirs.fileno()))
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=variables, pass_fds=(theirs.fileno(),))
        self.loaded = None
        self.is_gone = False
        send_start(self.connection, self._setup.config)

    def send(self, command: Command) -> None:
        """Send a command; the end of a process is noticed where its outputs are read."""
        try:
            self.connection.send(command)
        except OSError as error:
            logger.debug("a command was not taken: %s", error)

    def close(self) -> None:
        """Ask the process to end, and kill it after a timeout."""
        self.is_gone = True
        self.connection.close()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ReplicaEngine:
    """Starts a process for each replica and sends each request to the one with the least predicted wait, when it has room.

    When a replica ends, its requests end with an error, and it is restarted, a few times at most.
    Raises the error of a replica that fails to load.
    """

    def __init__(self, config: EngineConfig) -> None:
        setups = replica_setups(config)
        self.config = setups[0].config
        self.interrupts = Interrupts()
        self._indices, self._places = itertools.count(), itertools.count()
        self._waiting: list[tuple[int, int, Request]] = []
        self._outputs: list[EngineOutput] = []
        self._request_ids: set[str] = set()
        self._is_closed = False
        self._level: SleepLevel | None = None
        self._router = ReplicaRouter([float(setup.config.num_threads or 1) for setup in setups])
        self._replicas: list[_Replica] = []
        try:
            for setup in setups:
                self._replicas.append(_Replica(setup))
            loaded = [self._wait_loaded(index) for index in range(len(setups))]
            self.report, self._limits = loaded[0].report, loaded[0].limits
            has_tokenizer = not config.skip_tokenizer_init
            folder, template = self.report.tokenizer_folder, config.chat_template
            self.tokenizer: Tokenizer | None = load_tokenizer(folder, template) if has_tokenizer else None
        except BaseException:
            self._close_replicas()
            raise
        self._factory = RequestFactory(RequestRules.of(self.report, self.config), self.tokenizer)
        self.grammars = GrammarCompiler(self._read_vocabulary)

    @property
    def pids(self) -> list[int]:
        """The ids of the replicas' processes."""
        return [replica.process.pid for replica in self._replicas]

    def prompt_limit(self, params: PoolingParams) -> int | None:
        """Return how many tokens of a prompt truncate_prompt_tokens keeps, None: all. Raises RequestError."""
        return self._factory.prompt_limit(params.truncate_prompt_tokens)

    def make_request(
        self,
        request_id: str,
        prompt: PromptLike,
        params: SamplingParams | PoolingParams | None,
        lora_request: LoRARequest | None = None,
    ) -> Request:
        """Tokenise and validate; raises RequestError."""
        params = self.default_sampling_params() if params is None else params
        return self._factory.make(request_id, next(self._indices), prompt, params, lora_request)

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """Return the checkpoint's recommended SamplingParams, changed by `overrides`."""
        return SamplingParams(**{**self.report.generation_defaults, **overrides})

    def start_compilation(self, request: Request) -> Compilation | None:
        """Start to compile a request's constraint, to find errors, and return the task; None without a constraint.

        The replica that runs the request compiles the constraint again.
        """
        params = request.params
        if params.constraint is None and not params.bad_words:
            return None
        use = grammar_use(request, self.config, self._limits.max_model_len)
        return self.grammars.start(params.constraint, tuple(params.bad_words or ()), use)

    def submit(self, request: Request, output_kind: str = "final") -> None:
        """Queue a request. Raises RequestError if it can never fit into a replica, and WorkerError if the engine is closed."""
        if self._is_closed:
            raise WorkerError("the engine has been closed")
        if self._level is not None:
            raise WorkerError("the engine is asleep: call wake_up first")
        if output_kind != "final":
            raise UnsupportedError(f"replicas return the last output of a request only, not {output_kind!r}")
        check_servable(request, self._limits)
        # This queue must have the same order as a replica's scheduler under its policy.
        priority = request.priority if self.config.scheduling_policy == "priority" else 0
        heapq.heappush(self._waiting, (priority, next(self._places), request))
        self._request_ids.add(request.request_id)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter in every replica; return False if all had it. A replica that restarts loads it for the first
        request that names it.

        Raises RequestError, where it is then in no replica, and ConfigError while the engine is asleep.
        """
        if self._level is not None:
            raise ConfigError(f"the engine is asleep (level {self._level}): call wake_up first")
        self._factory.check_lora(lora_request)
        answers = self.ask(AdapterCommand("add", lora_request))
        errors = [answer.error for answer in answers if answer.error is not None]
        if errors:
            if any(answer.is_changed for answer in answers):
                self.ask(AdapterCommand("remove", lora_int_id=lora_request.lora_int_id))
            raise errors[0]
        return any(answer.is_changed for answer in answers)

    def remove_lora(self, lora_int_id: int) -> bool:
        """Unload a LoRA adapter from every replica, as soon as no request uses it; return whether any had it."""
        return any(answer.is_changed for answer in self.ask(AdapterCommand("remove", lora_int_id=lora_int_id)))

    def list_loras(self) -> set[int]:
        """Return the numbers of the LoRA adapters that are in memory of any replica."""
        return {number for answer in self.ask(AdapterCommand("list")) for number in answer.loaded}

    def ask(self, command: AdapterCommand) -> list[AdapterAnswer]:
        """Send a command to every loaded replica and return the answers of those that do not end. Outputs that arrive
        meanwhile are kept for `step`."""
        if self._is_closed:
            raise WorkerError("the engine has been closed")
        with self.interrupts.deferred():
            asked = [index for index, one in enumerate(self._replicas) if one.loaded is not None and not one.is_gone]
            processes = {index: self._replicas[index].process for index in asked}
            for index in asked:
                self._replicas[index].answer = None
                self._replicas[index].send(command)
            waiting = set(asked)
            while waiting:
                ready = wait([self._replicas[index].connection for index in sorted(waiting)], _WAIT_S)
                for index in sorted(waiting):
                    if self._replicas[index].connection in ready:
                        self._receive(index)
                    has_ended = self._replicas[index].process is not processes[index] or self._replicas[index].is_gone
                    if has_ended or self._replicas[index].answer is not None:
                        waiting.discard(index)
            return [answer for index in asked if (answer := self._replicas[index].answer) is not None]

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has any work left."""
        return bool(self._request_ids)

    def step(self) -> list[EngineOutput]:
        """Send requests to replicas with room, wait briefly for outputs, and return those that arrived.

        Raises WorkerError if no replica is left.
        """
        with self.interrupts.deferred():
            self._dispatch()
        ready = [] if self._outputs else wait([one.connection for one in self._replicas if not one.is_gone], _WAIT_S)
        with self.interrupts.deferred():
            for index, replica in enumerate(self._replicas):
                if replica.connection in ready:
                    self._receive(index)
        outputs, self._outputs = self._outputs, []
        self._request_ids -= {output.request_id for output in outputs}
        return outputs

    def abort_request(self, request_id: str) -> None:
        """Remove a request, and abort it in its replica."""
        if request_id not in self._request_ids:
            return
        self._request_ids.discard(request_id)
        self._waiting = [entry for entry in self._waiting if entry[2].request_id != request_id]
        heapq.heapify(self._waiting)
        for replica in self._replicas:
            if replica.requests.pop(request_id, None) is not None:
                replica.send(request_id)
        self._router.end(request_id, is_complete=False)
        self._outputs = [output for output in self._outputs if output.request_id != request_id]

    @property
    def is_sleeping(self) -> bool:
        """Whether the replicas are asleep."""
        return self._level is not None

    def begin_sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Put all replicas to sleep, see LLMEngine.begin_sleep; they are asleep when this returns.

        Raises InvariantError while requests are unfinished, and what a replica fails with; the others are awake then.
        """
        wanted, _ = check_sleep_arguments(level, mode)
        if wanted <= (self._level or 0):
            return
        if self._request_ids:
            raise InvariantError(f"replicas are put to sleep while {len(self._request_ids)} requests are unfinished")
        error = self._send_to_all(SleepCommand(wanted))
        if error is None:
            self._level = wanted
            return
        self._level = None
        self._send_to_all(SleepCommand(None))
        raise error

    def wake_up(self) -> None:
        """Wake all replicas up. Raises what a replica fails with; they are then asleep, as far as requests are concerned."""
        if self._level is None:
            return
        error = self._send_to_all(SleepCommand(None))
        if error is not None:
            raise error
        self._level = None

    def _send_to_all(self, command: SleepCommand) -> QuireError | None:
        """Send a command to all replicas, wait for their answers, and return the error of the first that has one."""
        errors: list[QuireError] = []
        told: list[int] = []
        for index, replica in enumerate(self._replicas):
            if replica.loaded is None and not replica.is_gone:
                self._wait_loaded(index)
            if not replica.is_gone:
                replica.send(command)
                told.append(index)
        for index in told:
            replica = self._replicas[index]
            try:
                answer: object = None
                while not isinstance(answer, SleepAnswer):  # outputs of requests that were aborted may come first
                    answer = replica.connection.recv()
            except (EOFError, OSError):
                reason = f"its process ended with status {replica.process.wait()}"
                self._on_end(index, reason)
                errors.append(WorkerError(f"replica {index}: {reason}"))
                continue
            if answer.error is not None:
                errors.append(answer.error)
        return errors[0] if errors else None

    def close(self) -> None:
        """End all processes. May be called again."""
        self._waiting.clear()
        self._request_ids.clear()
        if not self._is_closed:
            self._is_closed = True
            self.grammars.close()
            self._close_replicas()

    def _close_replicas(self) -> None:
        for replica in self._replicas:  # ask all to end before waiting for any
            if not replica.is_gone:
                replica.connection.close()
        for replica in self._replicas:
            replica.close()

    def _wait_loaded(self, index: int) -> Loaded:
        replica = self._replicas[index]
        try:
            message = replica.connection.recv()
        except (EOFError, OSError):
            status = replica.process.wait()
            message = LoadFailed(None, f"its process ended with status {status} while it loaded the model")
        if isinstance(message, LoadFailed):
            kind = next((kind for kind in _KINDS if isinstance(message.error, kind)), WorkerError)
            said = message.message if message.error is None else str(message.error)
            raise kind(f"replica {index} of {len(self._replicas)}: {said}")
        self._take_loaded(index, message)
        return message

    def _take_loaded(self, index: int, loaded: Loaded) -> None:
        self._replicas[index].loaded = loaded
        limits = loaded.limits
        self._router.open(
            index,
            max_num_seqs=limits.max_num_seqs,
            block_size=limits.block_size,
            num_kv_blocks=limits.num_kv_blocks if limits.enable_prefix_caching else 0,
        )

    def _dispatch(self) -> None:
        """Send waiting requests to replicas with room."""
        while self._waiting:
            request = self._waiting[0][2]
            loaded = [index for index, one in enumerate(self._replicas) if one.loaded is not None and not one.is_gone]
            if not loaded and all(one.is_gone for one in self._replicas):
                raise WorkerError(f"all {len(self._replicas)} replicas have ended; the log says why")
            roomy = [index for index in loaded if self._router.has_room(index, request)]
            if not roomy:
                return
            heapq.heappop(self._waiting)
            route = self._router.choose(request, roomy)
            self._router.add(request, route)
            self._replicas[route.replica].requests[request.request_id] = request
            self._replicas[route.replica].send(_as_sent(request))

    def _receive(self, index: int) -> None:
        """Handle the messages of a replica, or its end."""
        replica = self._replicas[index]
        try:
            while not replica.is_gone and replica.connection.poll():
                self._take(index, replica.connection.recv())
        except (EOFError, OSError):
            self._on_end(index, f"its process ended with status {replica.process.wait()}")

    def _take(self, index: int, message: object) -> None:
        if isinstance(message, Loaded):
            self._take_loaded(index, message)
            return
        if isinstance(message, LoadFailed):
            self._on_end(index, message.message)
            return
        replica = self._replicas[index]
        if isinstance(message, AdapterAnswer):
            replica.answer = message
            return
        if isinstance(message, RequestOutput | EmbeddingRequestOutput):
            request_id, output = message.request_id, message
            if isinstance(message, RequestOutput):
                self._router.note_output(request_id, sum(len(choice.token_ids) for choice in message.outputs))
        else:
            request_id, error = message  # type: ignore[misc]
            request = replica.requests.get(request_id)
            output = None if request is None else self._failed(request, str(error), error.param)
        if replica.requests.pop(request_id, None) is not None and output is not None:  # otherwise it was aborted
            self._router.end(request_id)
            self._outputs.append(output)

    def _on_end(self, index: int, reason: str) -> None:
        """End the requests of a replica, and restart it."""
        replica = self._replicas[index]
        logger.error("replica %d ended: %s; %d requests are lost", index, reason, len(replica.requests))
        self._router.close(index)
        lost = list(replica.requests.values())
        replica.requests.clear()
        self._outputs += [self._failed(request, f"replica {index} ended: {reason}") for request in lost]
        replica.close()
        if replica.num_restarts < _MAX_RESTARTS:
            replica.num_restarts += 1
            try:
                replica.start()
            except OSError as error:
                replica.connection.close()
                logger.error("replica %d is not started again: %s", index, error)

    def _failed(self, request: Request, error: str, param: str | None = None) -> EngineOutput:
        stream = EmbeddingStream(request) if request.pooling is not None else OutputStream(request, self.tokenizer, "final")
        stream.fail(error, param)
        output = stream.take()
        if output is None:
            raise InvariantError(f"request {request.request_id} has failed and has no last output")
        return output

    def _read_vocabulary(self) -> Vocabulary:
        if self.tokenizer is None:
            raise RequestError("constraints on outputs need a tokenizer, and the model has none", "structured_outputs")
        return read_vocabulary(self.tokenizer, self.report.spec.vocab_size)


def _as_sent(request: Request) -> Request:
    """Return a request without its compiled grammar, which belongs to this process."""
    return request if request.grammar is None else replace(request, grammar=None)
