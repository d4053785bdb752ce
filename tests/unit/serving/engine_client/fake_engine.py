"""An engine process without a model that fails as it is told: at first by the model's name, later by a prompt's first token.

It writes the tokens 1, 2, 3, ... as their digits, one in a step.
"""

import os
import signal
import sys
import time
from array import array
from pathlib import Path

import zmq

from quire.contracts.outputs import RequestMetrics
from quire.serving.engine_client.messages import (
    PROTOCOL_VERSION,
    Abort,
    AttentionKind,
    ChoiceDelta,
    EngineInfo,
    Failed,
    Heartbeat,
    Hello,
    Lost,
    Ready,
    RequestDelta,
    StepOutputs,
    StepReport,
    Stop,
    Submit,
)
from quire.serving.engine_client.port import EnginePort, PeerGoneError
from quire.serving.engine_client.process import die_with_parent, ignore_signals, read_start

RAISED = "no block for 'a secret prompt' in /secret/path.py, asked with sk-secret01"
HANG, NO_PROGRESS, RAISE, GAP, TWICE, GARBAGE, FOREIGN, LOSE_COMMAND, FLOOD, KILL, IGNORE = range(90, 101)
BEAT_S = 0.05


def info(pid):
    return EngineInfo(
        model="fake", architecture="fake", dtype="float32", quantization=None, device="cpu", vocab_size=100, hidden_size=8,
        max_model_len=1000, max_num_seqs=8, max_num_batched_tokens=100, block_size=4, num_kv_blocks=100, eos_token_ids=[0],
        generation_defaults={}, model_folder="/nowhere",
        tokenizer_folder=None, max_logprobs=20, scheduling_policy="fcfs", enable_prefix_caching=True,
        seed=0, num_parameters=1, num_active_parameters=1, weight_bytes=4, kv_bytes_per_token=1, kv_cache_dtype="float32",
        attention=[AttentionKind(None, 1, 1)], load_time_s=0.0, pid=pid,
    )  # fmt: skip


class FakeEngine:
    def __init__(self, port):
        self.port = port
        self.running = {}  # request id -> [tokens so far, max_tokens, text of a token or None]
        self.num_steps = 0
        self.next_beat_s = 0.0

    def run(self):
        while True:
            now = time.monotonic()
            if now >= self.next_beat_s:
                self.next_beat_s = now + BEAT_S
                self.port.send(Heartbeat(self.port.last_empty_s, self.num_steps, len(self.running), self.port.num_commands))
            for command in self.port.receive(0.002 if self.running else BEAT_S):
                if isinstance(command, Stop):
                    return
                self.obey(command)
            self.step()

    def obey(self, command):
        if isinstance(command, Abort):
            for request_id in command.request_ids:
                if self.running.pop(request_id, None) is not None:
                    last = RequestDelta(request_id, [ChoiceDelta(0, "", [], finish_reason="abort")], True)
                    self.port.send(StepOutputs([last]))
        elif isinstance(command, Submit):
            self.submit(command)

    def submit(self, command):
        code = array("i", command.prompt_token_ids)[0]
        text = "x" * 5000 if code == FLOOD else None
        if code == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif code == HANG:
            time.sleep(1000)
        elif code == RAISE:
            raise RuntimeError(RAISED)
        elif code == LOSE_COMMAND:
            self.port.send(Lost(self.port.num_commands - 1, self.port.num_commands - 1))
        elif code == GAP:
            self.port.writer.num_sent += 1
        elif code == TWICE:
            self.port.socket.send(bytes(self.port.writer.frame))
        elif code == GARBAGE:
            frame = self.port.writer.write(StepOutputs([]))
            self.port.socket.send(bytes(frame[:16]) + b"\xc1garbage")
        elif code == FOREIGN:
            self.port.socket.send(b"somebody" + bytes(self.port.writer.frame[8:]))
        if code not in (LOSE_COMMAND, IGNORE):
            self.running[command.request_id] = [0, command.params.get("max_tokens", 16), text, code == NO_PROGRESS]

    def step(self):
        deltas = []
        for request_id, state in list(self.running.items()):
            if state[3]:
                continue
            state[0] += 1
            is_last = state[0] == state[1]
            choice = ChoiceDelta(0, state[2] or f"{state[0]} ", [state[0]], finish_reason="length" if is_last else None)
            metrics = RequestMetrics(0.0) if state[0] == 1 or is_last else None
            deltas.append(RequestDelta(request_id, [choice], is_last, metrics))
            if is_last:
                del self.running[request_id]
        if deltas:
            self.num_steps += 1
            now = time.monotonic()
            report = StepReport(self.num_steps, now, 0.0, 0, len(deltas), [(0, 0)], len(deltas), 0, 0, 0, 0, 0, 0, [])
            self.port.send(StepOutputs(deltas, report))


def load(config, port):
    """Fail as the model's name says; `tokenizer` names a file that exists from the second start on."""
    kind = config["model"]
    if config["tokenizer"] is not None:
        marker = Path(config["tokenizer"])
        kind = kind if marker.exists() else "fake"
        marker.touch()
    if kind == "fail-config":
        port.send(Failed("ConfigError", "max_model_len is wrong", True))
        return False
    if kind == "fail-exit":
        return False
    if kind == "fail-hang":
        time.sleep(1000)
    if kind == "fail-version":
        port.send(Hello(os.getpid(), PROTOCOL_VERSION + 1))
        time.sleep(1000)
    return True


def main():
    ignore_signals()
    lifeline = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
    start = read_start(lifeline)
    die_with_parent(start.parent_pid)
    port = EnginePort(start, lifeline)
    if start.config["model"] != "fail-version":
        port.send(Hello(os.getpid(), PROTOCOL_VERSION))
    if not load(start.config, port):
        port.close()
        return 7
    port.send(Ready(info(os.getpid())))
    try:
        FakeEngine(port).run()
    except PeerGoneError:
        return 3
    except RuntimeError as error:
        port.send(Failed("RuntimeError", str(error), False))
        return 1
    finally:
        port.close()
    return 0


if __name__ == "__main__":
    assert zmq.has("ipc")
    sys.exit(main())
