"""The figures of a sample of schemas: what is refused, what ends, and that what ends is valid."""

import json

import pytest

pytest.importorskip("llguidance")

from quire.bench.schemas import SchemaTrial, Spread, measure_schemas
from quire.cli.main import main
from quire.contracts.config import EngineConfig

SHORT = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
SCHEMAS = (SHORT, {"not": {"maxLength": 9}}, {"type": "array", "items": {"type": "boolean"}})


@pytest.mark.slow
def test_schemas_are_counted_and_their_outputs_end():
    record = measure_schemas(
        EngineConfig(model="demo", max_num_seqs=4, complete_json_within_max_tokens=True), SchemaTrial(SCHEMAS, 60, 2)
    )
    assert (record.num_schemas, record.num_accepted, len(record.refusals)) == (3, 2, 1)
    assert "not" in record.refusals[0]
    assert (record.num_outputs, record.num_ended) == (4, 4)
    assert record.compile_ms.count == record.look_ms_by_output.count == 2
    assert record.compile_ms.median > 0
    assert "4 of 4 outputs (100.0%)" in record.describe()
    assert json.loads(record.to_json())["vocabulary_size"] == record.vocabulary_size


def test_no_model_is_loaded_when_no_outputs_are_wanted(capsys, tmp_path):
    path = tmp_path / "schemas.jsonl"
    path.write_text("\n".join(json.dumps({"schema": schema}) for schema in SCHEMAS))
    options = ("--num-outputs", "0", "--output-len", "40", "--output-json", str(tmp_path / "out.json"))
    assert main(["bench", "schemas", "--schemas", str(path), *options]) == 0
    assert "accepted: 2 of 3 schemas" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["num_outputs"] == 0


def test_spread_tells_the_high_shares():
    spread = Spread.of(list(range(1, 101)))
    assert (spread.count, spread.median, spread.p90, spread.p99, spread.maximum) == (100, 50.5, 91, 100, 100)


def test_a_sample_is_refused_when_all_of_its_schemas_are(capsys, tmp_path):
    path = tmp_path / "schemas.jsonl"
    path.write_text('{"not": {"minimum": 1}}\n{"uniqueItems": true}')
    assert main(["bench", "schemas", "--schemas", str(path), "--num-outputs", "0", "--log-level", "error"]) == 1
    assert "error: all 2 schemas are refused, the first one so: schema: not cannot be enforced" in capsys.readouterr().err
