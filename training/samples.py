"""Samples for the model card: ``python -m training.samples [--model nano]`` prints greedy outputs as Markdown.

The prompts are fixed: questions that anybody may ask, beginnings of texts, and the first held-out task of some kinds.  No
prompt is chosen by its answer.
"""

from __future__ import annotations

import argparse

from deepinfer import LLM, SamplingParams
from deepinfer.bench.quality import SEED
from deepinfer.bench.tasks.sides import held_out_tasks
from deepinfer.bench.tasks.task import Task
from deepinfer.engine.chat import Message, encode, render, reply_text

QUESTIONS = (
    "What is 23 + 45?",
    "What is the capital of France?",
    "Tell me a short story about Anna and a fox.",
    "Sort these numbers from smallest to largest: 12, 5, 40, 33",
    "What does the word garden mean?",
    "What day comes 3 days after Monday?",
    "Who wrote Hamlet?",
    "Explain how a CPU works.",
    'Translate "good morning" into French.',
)
BEGINNINGS = (
    "To install the package, ",
    "It is a truth universally acknowledged, that",
    "def read_lines(path):\n",
    "A list in Python is",
)
KINDS = ("json", "tool", "extract", "date", "dialogue", "edit", "reason")
_SHOWN_CHARS = 400


def _fenced(*lines: str) -> str:
    """Texts in a block that Markdown shows as they are."""
    return "\n".join(["```text", *lines, "```"])


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]} […]"


def _of_task(task: Task) -> str:
    conversation = [f"{each.role}: {each.content}" for each in task.messages]
    tools = [f"tools: {', '.join(each['name'] for each in task.tools)}"] if task.tools else []
    return "\n".join([*tools, *conversation])


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano", help="checkpoint directory, or nano")
    args = parser.parse_args()
    llm = LLM(args.model, progress=False, num_drafts=0)
    tokenizer = llm.get_tokenizer()
    tasks = [held_out_tasks(SEED, 1)[kind][0] for kind in KINDS]
    shown = [*(f"user: {each}" for each in QUESTIONS), *(f"text: {each}" for each in BEGINNINGS), *map(_of_task, tasks)]
    known = [""] * (len(QUESTIONS) + len(BEGINNINGS)) + [reply_text(each.answer, effort=each.effort) for each in tasks]
    prompts = [encode(tokenizer, render([Message("user", each)])) for each in QUESTIONS]
    prompts += [llm.prompt_ids(each) for each in BEGINNINGS]
    prompts += [encode(tokenizer, each.prompt()) for each in tasks]
    params = SamplingParams(temperature=0, max_tokens=80)
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    llm.close()
    for prompt, output, answer in zip(shown, outputs, known, strict=True):
        assert isinstance(output, str), "the model returns texts"
        lines = [_shown(prompt), f"nano: {_shown(output.strip())}"]
        if answer:
            lines.append(f"known answer: {_shown(answer.removesuffix(tokenizer.decode([tokenizer.eos_id])).strip())}")
        print(_fenced(*lines), end="\n\n")  # noqa: T201


if __name__ == "__main__":
    main()
