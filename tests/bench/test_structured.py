"""Benchmarks of structured outputs: on small archives, and on the whole collections where they are at hand."""

import io
import json
import random
import tarfile
from pathlib import Path

import jsonschema
import pytest

from deepinfer.bench.structured import measure_masks, measure_schemas, measure_suite
from deepinfer.errors import ConfigError, RequestError
from deepinfer.grammar.vocabulary import Vocabulary
from deepinfer.tokenizer import byte_tokenizer
from tests.grammar.walks import matcher, random_answer

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.fixture
def archive(tmp_path):
    def make(files):
        path = tmp_path / "files.tar.xz"
        with tarfile.open(path, "w:xz") as made:
            for name, value in files.items():
                content = json.dumps(value).encode()
                info = tarfile.TarInfo(name)
                info.size = len(content)
                made.addfile(info, io.BytesIO(content))
        return path

    return make


def collection(name):
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{name} is not in the folder of shared data")
    return path


def test_schemas_are_counted_by_group_and_by_reason(archive):
    files = {
        "data/a/1.json": {"type": "null"},
        "data/a/2.json": {"not": {}},
        "data/b/3.json": {"items": {"not": {}}},
        "data/b/4.json": {"$ref": "x"},
    }
    report = measure_schemas(archive(files))
    assert [row[:4] for row in report.groups] == [("a", 2, 1, 50.0), ("b", 2, 0, 0.0), ("all", 4, 1, 25.0)]
    assert report.reasons == [(2, "not"), (1, "$ref")]
    assert (report.share, report.num_timeouts) == (0.25, 0)


def test_instances_that_a_grammar_judges_wrong_are_listed(archive):
    def case(schema, **tests):
        return {"description": str(schema), "schema": schema, "tests": [{"description": n, **t} for n, t in tests.items()]}

    cases = [
        case(
            {"type": "integer"},
            one={"data": 1, "valid": True},
            half={"data": 1.5, "valid": False},
            whole={"data": 1.0, "valid": True},
        ),
        case({"type": "null"}, wrong={"data": None, "valid": False}),
        case({"format": "iri"}, any={"data": "x", "valid": False}),
        case({"uniqueItems": True}, any={"data": [], "valid": True}),
        case({"type": "string"}, surrogate={"data": "\ud800", "valid": False}),
    ]
    report = measure_suite(archive({"tests/draft7/x.json": cases}))
    assert report.accepted == [("tests/draft7/x.json", "{'type': 'null'}", "wrong")]
    assert report.refused == [("tests/draft7/x.json", "{'type': 'integer'}", "whole")]
    assert dict(report.counts) == {
        "schemas compiled": 4,
        "schemas refused": 1,
        "instances of annotations": 1,
        "valid instances judged right": 1,
        "invalid instances judged right": 2,
        "invalid instances accepted": 1,
        "valid instances refused": 1,
    }


def test_masks_are_timed_along_an_instance():
    tokenizer = byte_tokenizer()
    schema = {"type": "object", "properties": {"kind": {"enum": ["alpha", "beta"]}}, "required": ["kind"]}
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size)
    report = measure_masks(vocabulary, tokenizer, schema=schema, instance={"kind": "beta"}, num_matchers=3, num_threads=1)
    assert 0 < report.row_us[0] <= report.row_us[1]
    assert 0 < report.batch_ms[0] <= report.batch_ms[1]
    assert report.tokens_a_run > 1


def test_an_archive_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "x").write_text("no archive")
    for measure in (measure_schemas, measure_suite):
        with pytest.raises(ConfigError, match="give an archive of JSON files"):
            measure(tmp_path / "x")


def test_the_suite_has_no_invalid_instance_that_is_accepted():
    report = measure_suite(collection("json-schema-test-suite.tar.xz"))
    assert report.accepted == []
    assert dict(report.counts)["valid instances judged right"] > 1000


@pytest.mark.slow
def test_most_schemas_of_a_large_collection_compile_and_none_exceeds_its_limit():
    report = measure_schemas(collection("jsonschemabench.tar.xz"))
    assert report.share >= 0.88
    assert report.num_timeouts == 0


@pytest.mark.slow
def test_random_answers_to_schemas_of_a_large_collection_satisfy_them(seed):
    tokenizer, rng = byte_tokenizer(), random.Random(seed)
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size)
    with tarfile.open(collection("jsonschemabench.tar.xz")) as archive:
        members = [each for each in archive if each.name.endswith(".json") and each.size < 30_000]
        texts = [archive.extractfile(each).read().decode() for each in rng.sample(members, 400)]
    num_ended = 0
    for text in texts:
        try:
            start = matcher(vocabulary, "json", text)
        except RequestError:
            continue
        schema = json.loads(text)
        judge = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
        for _ in range(2):
            ids, is_ended = random_answer(start, vocabulary, tokenizer, rng, short=20, most=300)
            if is_ended:
                num_ended += 1
                judge.validate(json.loads(tokenizer.decode(ids)))
    assert num_ended > 500
