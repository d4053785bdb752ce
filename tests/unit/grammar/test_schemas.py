"""The JSON schema sample and the standard's own suite: nothing invalid gets through, and nearly all that is valid does."""

import json
from pathlib import Path

import jsonschema
import pytest

pytest.importorskip("llguidance")

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.base.errors import RequestError
from quire.contracts.constraint import Constraint
from tests.unit.grammar.byte_vocabulary import accepts

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "schemas"
SAMPLE, SUITE = DATA / "jsonschemabench_100.jsonl", DATA / "json-schema-test-suite-draft2020-12"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data/schemas is not beside the checkout")

NUM_OUTPUTS = 1


def sample_rows():
    return [json.loads(line) for line in SAMPLE.read_text().splitlines()]


def compile_all(compiler, schemas):
    """Return the grammar of each schema, None for those that are refused, which is said to be the schema's fault."""
    started = [compiler.start(Constraint(kind="json_schema", source=json.dumps(schema), param="here")) for schema in schemas]
    found, refusals = [], []
    for compilation in started:
        try:
            found.append(compilation.result())
        except RequestError as error:
            refusals.append(str(error))
            found.append(None)
    assert all(refusal.startswith("here: ") for refusal in refusals)
    return found


def count(grammar, tests):
    """Return how many valid instances there are, how many are accepted, and the invalid ones that are."""
    valid = [test["data"] for test in tests if test["valid"]]
    invalid = [test["data"] for test in tests if not test["valid"]]
    taken = [accepts(grammar, json.dumps(data, ensure_ascii=False)) for data in valid]
    return len(valid), sum(taken), [data for data in invalid if accepts(grammar, json.dumps(data, ensure_ascii=False))]


@pytest.mark.slow
def test_sample_is_enforced_but_for_a_few_schemas_that_are_refused(compiler):
    rows = sample_rows()
    grammars = compile_all(compiler, [row["schema"] for row in rows])
    assert sum(grammar is not None for grammar in grammars) >= 96
    counts = [count(grammar, row["tests"]) for grammar, row in zip(grammars, rows, strict=True) if grammar is not None]
    assert [mistakes for *_, mistakes in counts if mistakes] == []
    assert sum(taken for _, taken, _ in counts) >= 0.99 * sum(num_valid for num_valid, *_ in counts)


@pytest.mark.slow
def test_suite_of_the_standard_has_nothing_that_gets_through_wrongly(compiler):
    groups = [(path.name, group) for path in sorted(SUITE.glob("*.json")) for group in json.loads(path.read_text())]
    grammars = compile_all(compiler, [group["schema"] for _, group in groups])
    kept = [(grammar, *group) for grammar, group in zip(grammars, groups, strict=True) if grammar is not None]
    assert len(kept) >= 195
    pairs = [(grammar, group) for grammar, _, group in kept]
    mistakes = [(group["description"], count(grammar, group["tests"])[2]) for grammar, group in pairs]
    wrong = [mistake for mistake in mistakes if mistake[1]]
    assert not wrong, "\n".join(map(str, wrong))
    # What is not accepted though valid is stricter than the standard: another order, 1.0 for 1. Its tests of formats take any
    # text.
    counts = [count(grammar, group["tests"]) for grammar, name, group in kept if name != "format.json"]
    assert sum(taken for _, taken, _ in counts) >= 0.96 * sum(num_valid for num_valid, *_ in counts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "options"),
    [(0, {}), (1, {"max_open_length": 12, "disable_any_whitespace": True, "disable_additional_properties": True})],
    ids=["open", "closed"],
)
def test_outputs_of_the_demo_model_are_valid_when_they_end_by_themselves(first, options):
    llm = LLM("demo", max_num_seqs=64, max_model_len=640, complete_json_within_max_tokens=True)
    try:
        schemas, params = [], []
        for row in sample_rows()[first::4]:
            asked = StructuredOutputsParams(json=row["schema"], **options)
            try:
                llm.llm_engine.grammars.start(asked.constraint()).result()
            except RequestError:
                continue
            schemas.append(row["schema"])
            params.append(SamplingParams(structured_outputs=asked, n=NUM_OUTPUTS, max_tokens=512, seed=len(params)))
        outputs = llm.generate(["As JSON: "] * len(params), params, use_tqdm=False)
    finally:
        llm.close()
    ended, num_outputs = 0, 0
    for schema, output in zip(schemas, outputs, strict=True):
        validator = jsonschema.validators.validator_for(schema)(schema)
        assert output.error is None, output.error
        for choice in output.outputs:
            num_outputs += 1
            if choice.finish_reason == "stop":
                ended += 1
                validator.validate(json.loads(choice.text))
    print(f"{options}: {ended} of {num_outputs} outputs of {len(schemas)} schemas ended by themselves")
    assert ended >= 0.85 * num_outputs
