"""The trained model in the package: its files, and the text that it writes."""

import json
from pathlib import Path

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.engine.builtin import NANO_DIRECTORY
from deepinfer.engine.chat import Message, encode, render
from deepinfer.engine.loader import model_directory

RECORDED = json.loads((Path(__file__).parent / "nano_outputs.json").read_text(encoding="utf-8"))
MAX_TOKENS = 24
CLOSE = 0.25
"""Two best tokens this near in log-probability may change places on another processor."""


@pytest.fixture(scope="module")
def nano():
    llm = LLM("nano", device="cpu", progress=False, max_num_seqs=20, max_model_len=512, num_drafts=0)
    yield llm
    llm.close()


def prompts(llm):
    """Token ids of the recorded prompts: texts, and questions in the chat format."""
    for each in RECORDED:
        if "text" in each:
            yield llm.prompt_ids(each["text"])
        else:
            yield encode(llm.get_tokenizer(), render([Message("user", each["question"])]))


def record(llm):
    """The greedy outputs of the recorded prompts: token ids, and how far the second best token is away."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, top_logprobs=2)
    llm.decode_sequence = False
    answers = llm.generate(prompt_token_ids=list(prompts(llm)), sampling_params=params, use_tqdm=False)
    for each, records in zip(RECORDED, answers, strict=True):
        ids = [one.token_id for one in records]
        gaps = [round(one.top_logprobs[0] - one.top_logprobs[1], 3) for one in records]
        yield {key: each[key] for key in ("text", "question") if key in each} | {
            "output": llm.text(records),
            "ids": ids,
            "gaps": gaps,
        }


def test_the_files_are_small_and_need_no_cache(monkeypatch):
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", "/nonexistent")
    assert model_directory("nano") == NANO_DIRECTORY
    sizes = {each.name: each.stat().st_size for each in NANO_DIRECTORY.iterdir()}
    assert sum(sizes.values()) <= 48_000_000
    assert max(sizes.values()) <= 16 << 20
    assert sizes["tokenizer.json"] <= 600_000


def test_greedy_outputs_are_the_recorded_ones(nano):
    num_compared = 0
    for was, now in zip(RECORDED, record(nano), strict=True):
        for number, (token_id, gap) in enumerate(zip(was["ids"], was["gaps"], strict=True)):
            if number >= len(now["ids"]) or now["ids"][number] != token_id:
                assert gap < CLOSE, f"{was} differs at token {number}: {now['ids']}"
                break
            num_compared += 1
    assert num_compared > 0.6 * sum(len(each["ids"]) for each in RECORDED), "too few tokens agree to show anything"


def test_simple_sums_are_right(nano):
    llm, right = nano, 0
    sums = [(12, 30), (45, 23), (7, 8), (60, 15), (34, 51), (19, 5)]
    questions = [encode(llm.get_tokenizer(), render([Message("user", f"What is {a} + {b}?")])) for a, b in sums]
    llm.decode_sequence = True
    texts = llm.generate(prompt_token_ids=questions, sampling_params=SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    right = sum(str(a + b) in text for (a, b), text in zip(sums, texts, strict=True))
    assert right >= 5, texts


if __name__ == "__main__":  # writes the recorded outputs anew, after a training
    made = LLM("nano", device="cpu", progress=False, max_num_seqs=20, max_model_len=512, num_drafts=0)
    found = list(record(made))
    lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in found)
    (Path(__file__).parent / "nano_outputs.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
