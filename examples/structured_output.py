"""Answers that follow a JSON schema, a regex or a grammar.

python examples/structured_output.py        # the small model nano, on this machine
"""

from __future__ import annotations

import sys

from deepinfer import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "temperature": {"type": "integer", "minimum": -40, "maximum": 50},
        "sky": {"enum": ["clear", "cloudy", "rain"]},
    },
    "required": ["city", "temperature", "sky"],
    "additionalProperties": False,
}
GRAMMARS = {
    "JSON schema": {"schema_type": "json", "schema": SCHEMA},
    "regex": {"schema_type": "regex", "schema": r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"},
    "EBNF": {"schema_type": "ebnf", "schema": 'root ::= term (" + " term)* " = " number\nterm ::= number\nnumber ::= [0-9]+'},
}


def main() -> int:
    """Print an answer for each kind of grammar; returns the exit code."""
    llm = LLM("nano", max_num_seqs=len(GRAMMARS), max_model_len=1024)
    params = [SamplingParams(temperature=0.7, max_tokens=200, seq_seed=1, so_args=args) for args in GRAMMARS.values()]
    texts = llm.generate(["The weather report:"] * len(params), params)
    llm.close()
    for kind, text in zip(GRAMMARS, texts, strict=True):
        sys.stdout.write(f"{kind}: {text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
