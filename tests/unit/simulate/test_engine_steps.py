"""The simulator makes the very steps that the engine makes, whatever they take."""

from quire import EngineConfig, SamplingParams
from quire.bench.serving.arrivals import Arrivals
from quire.bench.serving.workload import Dataset
from quire.engine.llm_engine import LLMEngine
from quire.simulate.replica import SimulatedReplica
from quire.simulate.run import SimulateOptions, simulate
from quire.simulate.workload import make_load
from tests.unit.simulate.test_run import PlainTime

DATASET = Dataset(num_prompts=20, input_len=40, output_len=20, range_ratio=0.9, seed=5)


def engine_steps(engine):
    engine.is_recording = True
    for request in make_load(DATASET, Arrivals()).requests:
        params = SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
        prompt = [(7 * request.index + place) % 290 for place in range(request.num_input_tokens)]
        engine.add_request(str(request.index), {"prompt_token_ids": prompt}, params)
    steps = []
    while engine.has_unfinished_requests():
        engine.step()
        record = engine.last_step
        steps.append([(share.request_id, share.num_tokens) for share in record.shares])
    return steps


def simulated_steps(config, monkeypatch):
    steps = []
    original = SimulatedReplica.spans

    def note(self, plan):
        find = self.scheduler.sequence
        steps.append([(find(key).request.request_id, count) for key, count in plan.num_scheduled_tokens.items()])
        return original(self, plan)

    monkeypatch.setattr(SimulatedReplica, "spans", note)
    monkeypatch.setattr("quire.simulate.replica._MAX_DECODE_RUN", 1)
    simulate(
        SimulateOptions(
            model="tiny",
            machine="none",
            scheduler=config,
            times=PlainTime(),
            windows=(None,),
            dataset=DATASET,
            arrivals=Arrivals(),
        )
    )
    return steps


def test_steps_are_those_of_the_engine_with_chunks_and_preemptions(tiny_model, monkeypatch):
    engine = LLMEngine(
        EngineConfig(
            model=str(tiny_model),
            device="cpu",
            num_threads=1,
            max_num_seqs=6,
            max_num_batched_tokens=50,
            num_kv_blocks=20,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )
    )
    config = engine.scheduler.config
    real = engine_steps(engine)
    num_preemptions = engine.scheduler.num_preemptions
    engine.close()
    assert num_preemptions > 0
    assert simulated_steps(config, monkeypatch) == real
