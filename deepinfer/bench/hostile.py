"""Grammars that mean harm, and what they do to an engine: each ends within its limit, and other requests do not notice."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from tabulate import tabulate

from deepinfer.config import EngineArgs
from deepinfer.engine.core import EngineCore
from deepinfer.engine.loader import load
from deepinfer.errors import RequestError
from deepinfer.model.progress import progress_bar
from deepinfer.request import FinishReason, Request, SamplingParams

Schema = dict[str, Any]
_MAX_TURNS = 200
"""Turns that an answer to a hostile grammar gets; then it is aborted."""


def _chain(num_levels: int, link: Callable[[Schema, int], Schema], last: Schema) -> Schema:
    """A schema that refers to a schema, and so on."""
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}, i) for i in range(num_levels)}
    return {"$defs": definitions | {f"d{num_levels}": last}, "$ref": "#/$defs/d0"}


def _mutual(num_rules: int, num_options: int) -> str:
    """Rules that begin with each other."""
    options = {i: " | ".join(f"a{(i * 7 + j * 13) % num_rules}" for j in range(num_options)) for i in range(num_rules)}
    return "root ::= a0\n" + "".join(f"a{i} ::= {options[i]} | 'c{i}'\n" for i in range(num_rules))


HOSTILE: dict[str, tuple[str, object]] = {
    "nested counts": ("regex", "((a{1,100}){1,100}){1,100}"),
    "exponential alternatives": ("regex", "((a|aa|aaa|b?){1,50}(a|ab|b?){1,50}){1,50}c"),
    "overlapping counts": ("regex", "(a?b?){1,1000}(b?a?){1,1000}"),
    "any character": ("regex", "(?s:.{1,100000}x){1,10}"),
    "depth": ("json", "[" * 100_000),
    "depth of arrays": ("json", {"items": {"items": {"items": {"$ref": "#"}}}}),
    "enum": ("json", {"enum": [f"value {i}" for i in range(15_000)]}),
    "bounds": ("json", {"type": "string", "minLength": 999_999, "maxLength": 1_000_000}),
    "counts": ("json", {"type": "array", "minItems": 900_000, "items": {"type": "integer", "maximum": 10**17}}),
    "numbers": ("json", {"type": "number", "minimum": 1e-300, "multipleOf": 1e-9}),
    "self-reference": ("json", {"$ref": "#"}),
    "endless": ("json", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    "references": ("json", _chain(1_900, lambda ref, i: {"properties": {"a": ref}}, {})),
    "combinations": ("json", _chain(3_000, lambda ref, i: {"allOf": [ref, {"required": [f"x{i}"]}]}, {})),
    "products": ("json", {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(6)]} for i in range(8)]}),
    "patterns": ("json", {"patternProperties": {f"^{'a?' * 50}x{i}$": {} for i in range(50)}}),
    "alternatives": ("json", {"anyOf": [{"properties": {f"p{i}": {}}, "required": [f"p{i}"]} for i in range(1_900)]}),
    "megabyte": ("lark", "start: " + '"a" ' * 250_000),
    "rules": ("lark", "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(1_900)) + 'r1900: "b"\n'),
    "too many rules": ("lark", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(15_000)) + 'r15000: "b"\n'),
    "too many alternatives": ("lark", "start: " + " | ".join(f'"a{i}" start' for i in range(10_000)) + ' | "b"\n'),
    "groups": ("lark", "start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "negations": ("lark", "start: T\nT: " + "~" * 10_000 + '"a"\n'),
    "ambiguity": ("ebnf", "root ::= s\ns ::= s s | s s s | 'a' | ''"),
    "loops": ("ebnf", "root ::= " + " ".join(["(root | 'a')*"] * 10)),
    "mutual rules": ("ebnf", _mutual(300, 40)),
    "fewer mutual rules": ("ebnf", _mutual(60, 25)),
    "doubling rules": ("ebnf", "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1} a{i + 1}\n" for i in range(100)) + "a100 ::= 'x'"),
    "classes": ("ebnf", "root ::= '(' root ')' | " + " ".join(f"[{chr(300 + i)}-{chr(5000 + i)}]*" for i in range(500))),
}
"""Name -> language and grammar."""


def _others(count: int, bos_id: int) -> list[Request]:
    """Requests without grammars that decode to the end of the measurement."""
    params = SamplingParams(temperature=1.0, max_tokens=3_000, ignore_eos=True, seq_seed=0)
    return [
        Request(request_id=f"other {number}", prompt_token_ids=(bos_id, 100 + number), params=params) for number in range(count)
    ]


def _turn(core: EngineCore, name: str) -> tuple[float, str | None]:
    """One turn: its time in ms, and how the hostile request ended, if it did."""
    start = time.perf_counter()
    outputs = core.step()
    took = 1e3 * (time.perf_counter() - start)
    for output in outputs:
        if output.request_id == name and output.finished:
            return took, "answered" if output.finish_reason != FinishReason.GRAMMAR_ERROR else "refused"
    return took, None


def run_hostile(model: str, *, device: str = "auto", num_others: int = 4) -> str:
    """Run each hostile grammar beside ``num_others`` requests without grammars, and render a table."""
    args = EngineArgs(
        model=model, device=device, max_num_seqs=num_others + 1, max_model_len=4096, enable_prefix_cache=False, num_drafts=0
    )
    loaded = load(args)
    core, bos_id = loaded.core, loaded.tokenizer.bos_id
    for each in _others(num_others, bos_id):
        core.add(each)
    plain = [_turn(core, "")[0] for _ in range(60)][20:]
    median = statistics.median(plain)
    lines = []
    with progress_bar(len(HOSTILE), unit="grammar", desc="measuring") as bar:
        for name, (kind, schema) in HOSTILE.items():
            turns: list[float] = []
            ending, start = None, time.monotonic()
            try:
                params = SamplingParams(temperature=1.0, max_tokens=50, so_args={"schema_type": kind, "schema": schema})
                core.add(Request(request_id=name, prompt_token_ids=(bos_id,), params=params))
                while ending is None and len(turns) < _MAX_TURNS:
                    took, ending = _turn(core, name)
                    turns.append(took)
            except RequestError:
                ending = "refused at once"
            core.abort([name])
            lines.append((name, ending or "aborted", time.monotonic() - start, max(turns, default=0.0) / median))
            bar.update()
    core.abort([f"other {number}" for number in range(num_others)])
    while not core.is_idle:
        core.step()
    core.close()
    worst = max(line[3] for line in lines)
    table = tabulate(lines, headers=("grammar", "ended", "after s", "slowest step / median"), floatfmt=".2f")
    title = f"{num_others} other requests; steps without grammars: median {median:.1f} ms, slowest {max(plain) / median:.2f} x"
    return f"{title}\n\n{table}\n\nslowest step beside a hostile grammar: {worst:.2f} x the median"
