"""Generate text without a server.

python examples/offline_inference.py                    # the small model nano, on this machine
DEEPINFER_HF_MODEL_DIR=/path/to/checkpoint python examples/offline_inference.py --ep 8
"""

from __future__ import annotations

import argparse
import sys

from deepinfer import LLM, SamplingParams
from deepinfer.config import environment
from deepinfer.errors import EngineError

PROMPTS = (
    "The engine plans a step while the device",
    "A page holds the keys of",
    "Once upon a time",
    "Tokens that were computed before",
)


def main(arguments: list[str] | None = None) -> int:
    """Print a continuation of every prompt; returns the exit code."""
    parser = argparse.ArgumentParser(description="Generate text without a server.")
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="ranks that share the experts (default 1)")
    parser.add_argument("--dp", type=int, default=0, metavar="N", help="ranks that serve separate requests (default: ep / cp)")
    parser.add_argument("--cp", type=int, default=1, metavar="N", help="ranks that share a prompt (default 1)")
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="most tokens to generate (default 32)")
    options = parser.parse_args(arguments)
    try:
        llm = LLM(
            environment().hf_model_dir or "nano",
            expert_parallel_size=options.ep,
            data_parallel_size=options.dp,
            context_parallel_size=options.cp,
            max_num_seqs=len(PROMPTS),
        )
        texts = llm.generate(list(PROMPTS), SamplingParams(temperature=0.0, max_tokens=options.max_tokens))
        llm.close()
    except EngineError as error:
        sys.stderr.write(f"Error: {error}\n")
        return 2
    for prompt, text in zip(PROMPTS, texts, strict=True):
        sys.stdout.write(f"{prompt!r}\n    {text!r}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
