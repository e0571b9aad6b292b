"""The quality benchmark: what its keys hold, what its judges accept, and that its comparisons compare what they say."""

import json
import math
import random

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tqdm import tqdm

from deepinfer.bench import approximations, quality
from deepinfer.bench.approximations import Fit, Sample, choosing, every, fit_each, recent, unfiltered, unrounded_records
from deepinfer.bench.passes import Runner
from deepinfer.bench.quality import Data, as_json, choose_tasks, judge, measure, render, sample_of, write_json
from deepinfer.bench.tasks.numbers import sums
from deepinfer.bench.tasks.sides import HELD_OUT_TASKS, held_out_tasks, is_held_out
from deepinfer.bench.texts import held_out_texts
from deepinfer.cli import main
from deepinfer.config import load_config
from deepinfer.engine.builtin import NANO_DIRECTORY
from deepinfer.engine.chat import Call, Mark, Message, reply_text
from deepinfer.model.checkpoint.reader import read_checkpoint
from deepinfer.model.flash import Flash
from deepinfer.ops import op
from deepinfer.ops.attention import compress, entries, index_topk, index_topk_within, sparse_attention
from deepinfer.ops.norm import qkv_norm, window_keys
from deepinfer.ops.quant import decode_main, decode_window, encode_main, encode_window
from deepinfer.tokenizer import Tokenizer, byte_tokenizer
from tests.ops.invariance import running

KEYS = ["bits_per_byte", "tasks", "accepted_length", "calibration_error", "expert_load", "approximations"]
SHORT, LONG = 96, 400


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_dir(NANO_DIRECTORY)


def prose_of(tokenizer):
    samples = [sample_of(tokenizer, each.segments) for each in held_out_texts() if each.kind == "prose"]
    return [each for each in samples if len(each.ids) >= LONG][:2]


@pytest.fixture(scope="module")
def prose(tokenizer):
    return prose_of(tokenizer)


def new_runner(tokenizer):
    config = load_config(NANO_DIRECTORY)
    tensors = read_checkpoint(NANO_DIRECTORY, config, progress=False)
    compression = torch.from_numpy(tokenizer.compression_map())
    return Runner(Flash(config, tensors, compression, device=torch.device("cpu")), 1024)


@pytest.fixture(scope="module")
def runner(tokenizer):
    with torch.inference_mode():
        yield new_runner(tokenizer)


@pytest.fixture(scope="module")
def report(tokenizer):
    prose, tasks = prose_of(tokenizer), held_out_tasks(1, 3)
    short = min(tasks["json"], key=lambda task: len(task.answer.content))
    sample = Data(
        tasks={"fact": tasks["fact"], "copy": tasks["copy"][:2], "json": [short]},
        texts={"prose": [each.cut(SHORT) for each in prose]},
        beginnings={"prose": [prose[0].cut(16)]},
        long=[prose[0].cut(LONG)],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quality, "_CONTINUED_TOKENS", 8)  # the longest answer decides the time
        return measure("nano", sample, device="cpu")


def test_the_keys_are_there_and_the_values_are_possible(report, tmp_path):
    write_json(report, tmp_path / "quality.json")
    found = json.loads((tmp_path / "quality.json").read_text())
    assert list(found) == KEYS
    assert 0.5 < found["bits_per_byte"]["prose"]["bits_per_byte"] < 3
    assert all(0 <= share <= 1 for each in found["tasks"].values() for name, share in each.items() if name != "count")
    assert set(found["accepted_length"]) == set(found["calibration_error"]) == {"0", "1"}
    for temperature, errors in found["calibration_error"].items():
        assert 1 <= found["accepted_length"][temperature]["all"]["length"] <= 6
        assert all(0 <= error <= 1 for error in errors)
    load = found["expert_load"]
    assert len(load["max_over_mean"]) == len(load["never_used"]) == 12
    assert all(1 <= each <= 16 for each in load["max_over_mean"])
    assert all(abs(each["cost"]) < 0.5 for each in found["approximations"])


def test_tables_hold_what_was_found(report):
    text = render(report)
    for part in (
        "bits per byte",
        "valid",
        "accepted length",
        "Calibration error",
        "never used",
        "entries of the indexer",
        "fp64",
    ):
        assert part in text
    assert [each["name"] for each in as_json(report)["approximations"]] == [each.name for each in report.comparisons]


def test_a_trained_model_answers_and_a_random_one_does_not(report, monkeypatch):
    monkeypatch.setattr(quality, "_SPARE_TOKENS", 4)
    prose = prose_of(byte_tokenizer())[0].cut(SHORT)
    short = [task for task in held_out_tasks(1, 8)["fact"] if len(task.answer.content) < 12 and task.effort is None]
    sample = Data(tasks={"fact": short[:2]}, texts={"prose": [prose]}, beginnings={}, long=[])
    nothing = measure("random", sample, device="cpu")
    assert nothing.tasks["fact"].count > 0
    assert nothing.tasks["fact"].shares["right"] == 0
    assert nothing.bits["prose"].bits_per_byte > 7
    assert nothing.comparisons == []
    assert sum(each.shares["right"] for each in report.tasks.values()) > 1.5


# ---------------------------------------------------------------------------------------------------------------- data and judges


def test_held_out_texts_have_every_kind_and_are_small():
    texts = list(held_out_texts())
    assert {each.kind for each in texts} == {"prose", "code", "math", "definition"}
    assert any(isinstance(segment, Mark) for each in texts for segment in each.segments)


def test_chosen_tasks_are_held_out_and_of_every_kind(tokenizer):
    tasks = choose_tasks(tokenizer, 4, 4_096)
    assert {"json", "tool", "result", "dialogue", "sum, two digits", "needle, 4k tokens"} <= set(tasks)
    long = tasks["needle, 4k tokens"]
    assert all(is_held_out(task.key, HELD_OUT_TASKS) for kind in tasks for task in tasks[kind] if task not in long)
    assert all(len(sample_of(tokenizer, task.segments()).ids) > 3_600 for task in long)
    assert all(len(str(number)) == 2 for task in tasks["sum, two digits"] for number in task.key[4:].split("+"))
    assert [task.key for task in choose_tasks(tokenizer, 2, 4_096)["json"]] == [task.key for task in tasks["json"][:2]]


def test_judges_accept_right_answers_and_refuse_wrong_ones():
    tasks = held_out_tasks(1, 6)
    for kind, several in tasks.items():
        right = judge(several, [reply_text(task.answer, effort=task.effort) for task in several])
        assert all(share == 1 for share in right.shares.values()), kind
        assert judge(several, [""] * len(several)).shares["right"] == 0, kind


def test_the_measures_of_json_and_tools_are_told_apart():
    tasks = held_out_tasks(1, 6)
    form = next(task for task in tasks["json"] if task.effort is None)
    other = json.loads(form.answer.content) | {"no_such_key": 1}
    assert form.judge(json.dumps(other)) == {"valid": False, "right": False}
    called = next(task for task in tasks["tool"] if task.answer.calls and task.effort is None)
    renamed = tuple(Call("no_such_tool", each.arguments) for each in called.answer.calls)
    assert called.judge(reply_text(Message("assistant", "", calls=renamed), effort=None)) == {
        "form": True,
        "tool": False,
        "right": False,
    }
    wrong = tuple(Call(each.name, {"no_such_argument": 1}) for each in called.answer.calls)
    assert called.judge(reply_text(Message("assistant", "", calls=wrong), effort=None))["tool"]
    total = sums(random.Random("judge"))
    assert not total.judge("The answer is 99999.")["right"]


def test_special_tokens_count_no_bytes(tokenizer):
    chat = next(each for each in held_out_texts() if isinstance(each.segments[0], Mark))
    sample = sample_of(tokenizer, chat.segments)
    assert sample.num_bytes.sum() == sum(len(each.encode()) for each in chat.segments if not isinstance(each, Mark))
    fit = Fit.of([torch.tensor([-math.log(2), -1.0])], [np.array([4, 0])])
    assert (fit.num_tokens, fit.num_bytes) == (1, 4)
    assert fit.bits_per_byte == pytest.approx(0.25)
    assert fit.perplexity == pytest.approx(2)


# ------------------------------------------------------------------------------------------------------------------- comparisons


def likelihoods(runner, sample):
    return runner.log_likelihoods([sample.ids])[0]


def test_texts_of_one_step_are_the_texts_alone(runner, prose):
    texts = [each.cut(SHORT).ids for each in prose]
    together = runner.log_likelihoods(texts)
    assert all(torch.equal(each, runner.log_likelihoods([text])[0]) for each, text in zip(together, texts, strict=True))


def test_choices_are_the_same_where_all_entries_are_chosen(runner, prose):
    sample = prose[0].cut(SHORT)
    usual = likelihoods(runner, sample)
    for replaced in (choosing(recent), unfiltered()):
        with replaced:
            assert torch.equal(likelihoods(runner, sample), usual)
    with choosing(every):  # as many keys, in tables of other widths
        assert float(likelihoods(runner, sample).mean()) == pytest.approx(float(usual.mean()), rel=0.01)


def test_other_choices_change_long_texts(runner, prose):
    sample = prose[0].cut(LONG)
    usual = likelihoods(runner, sample)
    for replaced in (choosing(every), choosing(recent), unrounded_records()):
        with replaced:
            assert not torch.allclose(likelihoods(runner, sample), usual, atol=0.05)
    assert torch.equal(likelihoods(runner, sample), usual)


@torch.inference_mode()
def test_keys_beside_the_records_are_the_keys_of_the_records(tokenizer, prose, monkeypatch):
    """If the keys are rounded as the records are, reading the one or the other is the same, bit for bit, in the reference."""

    def rounded_keys(*arguments):
        keys = window_keys(*arguments)
        return decode_window(encode_window(keys), keys.shape[1], torch.float32)

    def rounded_entries(*arguments):
        main, index = entries(*arguments)
        return decode_main(encode_main(main), main.shape[1], torch.float32), index

    sample = prose[0].cut(LONG)
    with running(op.REFERENCE):
        runner = new_runner(tokenizer)
        usual = likelihoods(runner, sample)
        monkeypatch.setattr(approximations.norm, "window_keys", rounded_keys)
        monkeypatch.setattr(approximations.attention, "entries", rounded_entries)
        with unrounded_records():
            assert torch.equal(likelihoods(runner, sample), usual)


def test_operators_are_bound_as_before_after_a_comparison(runner, prose):
    operators = (index_topk, index_topk_within, compress, sparse_attention, qkv_norm)
    before = [each._bound for each in operators]
    with pytest.raises(KeyError), choosing(recent), unrounded_records():
        raise KeyError
    assert [each._bound for each in operators] == before
    assert fit_each(runner, [Sample(ids=prose[0].ids[:8], num_bytes=prose[0].num_bytes[:8])], tqdm(disable=True)).num_tokens == 7


def test_help_names_the_options():
    result = CliRunner().invoke(main, ["bench", "quality", "--help"])
    assert result.exit_code == 0
    assert all(each in result.output for each in ("--model", "--device", "--samples", "--json"))
