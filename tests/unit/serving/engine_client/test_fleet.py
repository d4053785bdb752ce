"""EngineFleet with fake engine processes: routing of requests, and their end when a replica ends."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.engine.replica_setup import ReplicaSetup
from quire.serving.engine_client.client import EngineClient
from quire.serving.engine_client.fleet import EngineFleet, open_engine
from quire.serving.engine_client.supervisor import LinkOptions
from quire.serving.errors import ApiError
from tests.unit.serving.engine_client import fake_engine as fake
from tests.unit.serving.engine_client.test_client_faults import read as read_deltas
from tests.unit.serving.http.shell import until

COMMAND = (sys.executable, "-m", "tests.unit.serving.engine_client.fake_engine")
LINK = {"command": COMMAND, "first_delay_s": 0.02, "log_level": "WARNING", "watchdog_timeout_s": 60.0}


def setups(*models, **environment):
    return [ReplicaSetup(EngineConfig(model=model), environment) for model in models]


def request(name, token_ids=(5, 6, 7), max_tokens=3, **changes):
    return Request(
        request_id=name,
        prompt_token_ids=tuple(token_ids),
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        **changes,
    )


async def read(subscription):
    return [token_id for delta in await read_deltas(subscription) for choice in delta.choices for token_id in choice.token_ids]


def run(scenario, *models, **link):
    async def main():
        fleet = EngineFleet(setups(*(models or ("fake", "fake"))), LinkOptions(**{**LINK, **link}))
        try:
            await fleet.start()
            return await scenario(fleet)
        finally:
            await fleet.close()
            assert fleet.state == "closed"
            assert fleet.num_unfinished == 0

    return asyncio.run(main())


def test_requests_are_divided_and_answered_and_reports_name_their_replica():
    async def scenario(fleet):
        seen = []
        fleet.on_step.append(lambda outputs: seen.append(outputs.replica))
        answers = await asyncio.gather(*(read(fleet.submit(request(f"r{n}", [n, 1, 2]))) for n in range(8)))
        assert answers == [[1, 2, 3]] * 8
        assert set(seen) == {0, 1}
        assert fleet.info.max_num_seqs == 16
        assert fleet.info.num_kv_blocks == 200
        assert not fleet.has_work()

    run(scenario)


def test_an_abort_goes_where_the_request_is():
    async def scenario(fleet):
        held = [fleet.submit(request(f"r{n}", [fake.NO_PROGRESS, n], 100)) for n in range(4)]
        assert [replica.num_unfinished for replica in fleet.replicas] == [2, 2]
        for n in range(4):
            fleet.abort(f"r{n}")
            assert await read(held[n]) == []
        fleet.abort("r0")
        assert fleet.num_unfinished == 0

    run(scenario)


def test_a_killed_replica_costs_its_own_requests_and_takes_requests_when_it_is_back():
    async def scenario(fleet):
        states = []
        fleet.on_state.append(states.append)
        held = {f"r{n}": fleet.submit(request(f"r{n}", [fake.NO_PROGRESS, n], 100)) for n in range(6)}
        own = {name for name in held if fleet.replica_of(name) == 1}
        assert len(own) == 3
        os.kill(fleet.replicas[1].pid, signal.SIGKILL)
        for name in own:
            with pytest.raises(ApiError, match="killed by SIGKILL") as error:
                await held[name].next()
            assert (error.value.status, error.value.code) == (503, "engine_error")
        assert fleet.state == "ready"
        assert "replica 1: " in fleet.last_error
        assert fleet.info.max_num_seqs == 8
        assert await read(fleet.submit(request("meanwhile"))) == [1, 2, 3]
        await until(lambda: fleet.replicas[1].state == "ready")
        assert fleet.num_restarts == 1
        assert fleet.info.max_num_seqs == 16
        assert set(states) == {"ready"}
        again = fleet.submit(request("again"))
        assert fleet.replica_of("again") == 1  # the other one has three
        assert await read(again) == [1, 2, 3]
        assert [replica.num_unfinished for replica in fleet.replicas] == [3, 0]
        for name in held.keys() - own:
            fleet.abort(name)
            assert await read(held[name]) == []

    run(scenario)


def test_all_replicas_gone_is_said_and_the_state_is_not_ready():
    async def scenario(fleet):
        for replica in fleet.replicas:
            os.kill(replica.pid, signal.SIGKILL)
        await until(lambda: fleet.state == "restarting")
        with pytest.raises(ApiError) as error:
            fleet.submit(request("a"))
        assert error.value.status == 503
        await until(lambda: fleet.state == "ready")
        assert await read(fleet.submit(request("a"))) == [1, 2, 3]

    run(scenario)


def test_a_replica_that_is_given_up_leaves_the_rest_and_all_given_up_is_failed():
    async def scenario(fleet):
        for index in (0, 1):
            os.kill(fleet.replicas[index].pid, signal.SIGKILL)
            await until(lambda index=index: fleet.replicas[index].state == "failed")
            assert fleet.state == ("ready", "failed")[index]

    run(scenario, max_restarts=0)


def test_a_repeated_prefix_goes_to_the_replica_that_has_it():
    async def scenario(fleet):
        talks = [[n + 10] * 41 for n in range(4)]
        homes = []
        for n, talk in enumerate(talks):
            subscription = fleet.submit(request(f"a{n}", talk))
            homes.append(fleet.replica_of(f"a{n}"))
            await read(subscription)
        assert sorted(homes) == [0, 0, 1, 1]
        for n, talk in enumerate(talks):
            subscription = fleet.submit(request(f"b{n}", [*talk, 1, 2]))
            assert fleet.replica_of(f"b{n}") == homes[n]
            await read(subscription)

    run(scenario)


def test_a_replica_that_cannot_start_is_named_and_the_others_are_ended():
    async def scenario(fleet):
        raise AssertionError("it started")

    with pytest.raises(ConfigError, match="replica 1 of 2: max_model_len is wrong"):
        run(scenario, "fake", "fail-config")


def test_every_replica_has_the_environment_of_its_own():
    async def main():
        gpus = [ReplicaSetup(EngineConfig(model="fake"), {"CUDA_VISIBLE_DEVICES": name}) for name in ("4", "6")]
        fleet = EngineFleet(gpus, LinkOptions(**LINK))
        try:
            await fleet.start()
            found = [Path(f"/proc/{replica.pid}/environ").read_bytes().split(b"\0") for replica in fleet.replicas]
            assert [b"CUDA_VISIBLE_DEVICES=4" in found[0], b"CUDA_VISIBLE_DEVICES=6" in found[1]] == [True, True]
        finally:
            await fleet.close()

    asyncio.run(main())


def test_one_replica_is_a_client_and_several_are_a_fleet():
    one = open_engine(EngineConfig(model="demo"), LinkOptions())
    assert isinstance(one, EngineClient)
    assert one.replicas == (one,)
    two = open_engine(EngineConfig(model="demo", data_parallel_size=2, device="cpu"), LinkOptions())
    assert isinstance(two, EngineFleet)
    assert len(two.replicas) == 2
