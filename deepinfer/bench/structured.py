"""Benchmarks of structured outputs: which schemas compile and how fast, whether invalid instances are accepted, and masks.

Grammars are compiled for the byte tokenizer: what a grammar accepts does not depend on the tokens.
"""

from __future__ import annotations

import json
import statistics
import tarfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from tabulate import tabulate

from deepinfer.errors import ConfigError, EngineError, GrammarFailed, RequestError, reason
from deepinfer.grammar.compiler import GrammarCompiler, compile_grammar
from deepinfer.grammar.matcher import FillJob, MaskFiller, Matcher
from deepinfer.grammar.vocabulary import Vocabulary
from deepinfer.request import StructuredOutput
from deepinfer.tokenizer import Tokenizer, byte_tokenizer

TIMEOUT_S: Final = 20.0
_DRAFTS: Final = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
"""Folder of the suite -> the value of ``$schema`` that its schemas mean."""
_ANNOTATIONS: Final = ("contentMediaType", "contentEncoding", "contentSchema")
_ENFORCED_FORMATS: Final = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")

Rows = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaReport:
    """What became of a collection of schemas; the rows are for tables.

    Attributes:
        groups: group, schemas, compiled, share in percent, median, 99th percentile and maximum of the compile time in ms.
        reasons: why schemas were refused, and how many; the most frequent reason first.
        share: compiled schemas among all, 0 to 1.
        num_timeouts: schemas that exceeded their time limit.
    """

    groups: Rows
    reasons: Rows
    share: float
    num_timeouts: int

    GROUP_HEADERS = ("group", "schemas", "compiled", "%", "p50 ms", "p99 ms", "max ms")
    REASON_HEADERS = ("schemas", "refused because")


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteReport:
    """What a test suite of JSON Schema showed; the rows are for tables.

    Attributes:
        counts: what was counted, and how often.
        accepted: invalid instances that a grammar accepted; there should be none.
        refused: valid instances that a grammar does not accept.
    """

    counts: Rows
    accepted: Rows
    refused: Rows

    INSTANCE_HEADERS = ("file", "schema", "instance")


@dataclass(slots=True)
class _Group:
    num_schemas: int = 0
    compile_ms: list[float] = field(default_factory=list)


def measure_schemas(path: Path, *, timeout_s: float = TIMEOUT_S) -> SchemaReport:
    """Compile every schema of an archive ``data/GROUP/NAME.json``, one after another.

    Raises:
        ConfigError: the archive cannot be read.
    """
    tokenizer = byte_tokenizer()
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size)
    compiler = GrammarCompiler(lambda: vocabulary, timeout_s=timeout_s, num_threads=1, cache_bytes=0)
    groups: defaultdict[str, _Group] = defaultdict(_Group)
    reasons: Counter[str] = Counter()
    try:
        for name, text in _files(path):
            group = groups[name.split("/")[-2]]
            group.num_schemas += 1
            start = time.perf_counter()
            try:
                args = StructuredOutput.read({"schema_type": "json", "schema": text})
                compiler.submit(args, b"").result(timeout_s + 5)
                group.compile_ms.append((time.perf_counter() - start) * 1e3)
            except EngineError as error:
                reasons[_reason(str(error))] += 1
    finally:
        compiler.close()
    num_schemas = sum(each.num_schemas for each in groups.values())
    rows = [(name, *_row(each)) for name, each in sorted(groups.items())]
    whole = _Group(num_schemas, [each for group in groups.values() for each in group.compile_ms])
    return SchemaReport(
        groups=[*rows, ("all", *_row(whole))],
        reasons=[(count, text) for text, count in reasons.most_common()],
        share=len(whole.compile_ms) / max(num_schemas, 1),
        num_timeouts=compiler.counts().num_timeouts,
    )


def render_schemas(path: Path) -> str:
    """The tables of :func:`measure_schemas`."""
    report = measure_schemas(path)
    groups = tabulate(report.groups, headers=SchemaReport.GROUP_HEADERS, floatfmt=".1f")
    reasons = tabulate(report.reasons, headers=SchemaReport.REASON_HEADERS)
    return f"{groups}\n\ncompiled {100 * report.share:.1f} %, over the time limit {report.num_timeouts}\n\n{reasons}"


def render_suite(path: Path) -> str:
    """The tables of :func:`measure_suite`."""
    report = measure_suite(path)
    tables = [tabulate(report.counts)]
    for title, rows in (("invalid and accepted", report.accepted), ("valid and refused", report.refused)):
        tables.append(f"{title}: {len(rows)}\n{tabulate(rows, headers=SuiteReport.INSTANCE_HEADERS) if rows else ''}")
    return "\n\n".join(tables)


def _row(group: _Group) -> tuple[Any, ...]:
    times = np.array(group.compile_ms) if group.compile_ms else np.full(1, np.nan)
    share = 100 * len(group.compile_ms) / max(group.num_schemas, 1)
    return group.num_schemas, len(group.compile_ms), share, *np.percentile(times, [50, 99, 100]).tolist()


def _reason(message: str) -> str:
    """A message without what differs between schemas: places, names and numbers after the first words."""
    text = message.removeprefix("the JSON schema cannot be compiled: ")
    for mark in (" at #", " (at #", ": json-schema", " while processing", " '", " /"):
        text = text.split(mark)[0]
    return text


def measure_suite(path: Path) -> SuiteReport:
    """Try every instance of the JSON Schema Test Suite.

    A schema without ``$schema`` gets that of its folder.  Instances of schemas with annotations, such as unknown formats, are
    counted apart.

    Raises:
        ConfigError: the archive cannot be read.
    """
    tokenizer = byte_tokenizer()
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size)
    counts: Counter[str] = Counter()
    accepted: Rows = []
    refused: Rows = []
    for name, text in _files(path):
        draft = next((each for each in _DRAFTS if f"/{each}/" in f"/{name}"), None)
        for case in json.loads(text):
            schema = case["schema"]
            if isinstance(schema, dict) and draft is not None:
                schema = {"$schema": _DRAFTS[draft], **schema}
            try:
                args = StructuredOutput.read({"schema_type": "json", "schema": schema})
                start = Matcher(compile_grammar(args, vocabulary), args)
            except RequestError:
                counts["schemas refused"] += 1
                continue
            counts["schemas compiled"] += 1
            for test in case["tests"]:
                is_accepted = _accepts(start, tokenizer, json.dumps(test["data"], ensure_ascii=False))
                row = (name, case["description"], test["description"])
                if _is_annotation(schema):
                    counts["instances of annotations"] += 1
                elif is_accepted and not test["valid"]:
                    accepted.append(row)
                elif test["valid"] and not is_accepted:
                    refused.append(row)
                else:
                    counts[f"{'valid' if test['valid'] else 'invalid'} instances judged right"] += 1
    counts["invalid instances accepted"] = len(accepted)
    counts["valid instances refused"] = len(refused)
    return SuiteReport(counts=sorted(counts.items()), accepted=accepted, refused=refused)


def _is_annotation(schema: object) -> bool:
    """Whether a schema of the suite has an annotation that its tests treat as a constraint."""
    if not isinstance(schema, dict):
        return False
    has_format = "format" in schema and schema["format"] not in _ENFORCED_FORMATS
    return has_format or any(key in schema for key in _ANNOTATIONS)


def _accepts(start: Matcher, tokenizer: Tokenizer, text: str) -> bool:
    try:
        ids = tokenizer.encode(text)
    except RequestError:  # a lone surrogate, which no token can write
        return False
    matcher = start.copy()
    try:
        matcher.advance(ids)
    except GrammarFailed:
        return False
    return matcher.is_accepting


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskReport:
    """Times of masks.

    Attributes:
        row_us: median and 99th percentile of one answer's rows, divided by their number, in µs.
        batch_ms: median and 99th percentile of a whole batch in ms.
        tokens_a_run: forced tokens of a run, averaged.
    """

    row_us: tuple[float, float]
    batch_ms: tuple[float, float]
    tokens_a_run: float


def measure_masks(
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
    *,
    schema: Mapping[str, Any],
    instance: object,
    num_matchers: int = 64,
    num_drafts: int = 5,
    num_threads: int = 4,
) -> MaskReport:
    """Time masks along right drafts: answers in a batch are at different places of ``instance``."""
    args = StructuredOutput.read({"schema_type": "json", "schema": schema})
    compiled = compile_grammar(args, vocabulary)
    ids = [*tokenizer.encode(json.dumps(instance, ensure_ascii=False)), vocabulary.eos_token_id]
    filler = MaskFiller(num_threads)
    masks = np.empty((num_matchers * (num_drafts + 1), vocabulary.num_words), dtype=np.int32)
    single_us: list[float] = []
    batch_ms: list[float] = []
    runs: list[int] = []
    for turn in range(len(ids)):
        jobs = []
        for number in range(num_matchers):
            at = (turn + number) % len(ids)
            matcher = Matcher(compiled, args)
            matcher.advance(ids[:at])
            drafts = (ids[at : at + num_drafts] + [-1] * num_drafts)[:num_drafts]
            jobs.append(FillJob(matcher=matcher, first_row=number * (num_drafts + 1), draft_ids=drafts))
        start = time.perf_counter()
        results = filler.fill(jobs, masks)
        batch_ms.append((time.perf_counter() - start) * 1e3)
        for result in results:
            if isinstance(result, GrammarFailed):
                raise result
            if result is not None:
                runs.append(len(result.token_ids))
        start = time.perf_counter()
        jobs[0].matcher.fill(jobs[0].draft_ids, masks[: num_drafts + 1])
        single_us.append((time.perf_counter() - start) * 1e6 / (num_drafts + 1))
    return MaskReport(row_us=_spread(single_us), batch_ms=_spread(batch_ms), tokens_a_run=statistics.fmean(runs or [0]))


def _spread(values: list[float]) -> tuple[float, float]:
    median, last = np.percentile(values, [50, 99])
    return float(median), float(last)


def _files(path: Path) -> Iterator[tuple[str, str]]:
    """Names and texts of the JSON files of an archive, in its order."""
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.name.endswith(".json") else None
                if content is not None:
                    yield member.name, content.read().decode("utf-8")
    except (OSError, tarfile.TarError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {reason(error)}; give an archive of JSON files") from error
