"""Pictures are encoded when a chunk needs them, once for all answers; tokens equal those of a run that encodes all at once."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepinfer.config import named_config
from deepinfer.errors import StepFailed
from deepinfer.executor.pictures import Features, Gallery
from deepinfer.images import ImagePlan, Picture
from deepinfer.model.vision import VisionTower
from deepinfer.request import Request, SamplingParams
from tests.devices import no_waits
from tests.engine.harness import build, drain, rng_of, tokens
from tests.model.tiny import CPU, weights

CONFIG = named_config("golden")
SIDE = CONFIG.vision.patch_size * CONFIG.vision.downsample_ratio


class CountingTower(VisionTower):
    """A tower that records which pictures it has encoded."""

    def __init__(self, tensors=None, device=CPU):
        super().__init__(CONFIG, tensors or weights("golden"), device=device)
        self.encoded = []

    def span(self, pixels, tokens_w):
        self.encoded.append(hashlib.sha256(pixels.cpu().numpy().tobytes()).digest())
        return super().span(pixels, tokens_w)


def picture(rng, tokens_w=2, tokens_h=2):
    ratio = CONFIG.vision.downsample_ratio
    plan = ImagePlan(
        width=tokens_w * SIDE,
        height=tokens_h * SIDE,
        patches_w=tokens_w * ratio,
        patches_h=tokens_h * ratio,
        tokens_w=tokens_w,
        tokens_h=tokens_h,
        span_tokens=tokens_h * (tokens_w + 1) + 2,
        stretch=False,
    )
    pixels = rng.uniform(-1, 1, (3, plan.height, plan.width)).astype(np.float32)
    return Picture(plan=plan, pixels=pixels)


def asking(name, texts, pictures, **given):
    """A prompt of text, picture, text, picture, …, text."""
    ids, images = list(texts[0]), {}
    for each, text in zip(pictures, texts[1:], strict=True):
        images[len(ids)] = hashlib.sha256(each.pixels.tobytes()).digest()[:16]
        ids += [CONFIG.image_token_id] * each.plan.span_tokens + list(text)
    params = SamplingParams(**{"max_tokens": 6, "seq_seed": 5, "ignore_eos": True, **given})
    return Request(request_id=name, prompt_token_ids=tuple(ids), params=params, image_hashes=images)


def run(core, request, pictures):
    core.add(request, pictures)
    return by_answer(core)


def by_answer(core):
    found = {}
    while not core.is_idle:
        for output in core.step():
            if output.token_id is not None:
                found.setdefault((output.request_id, output.sample_idx), []).append((output.token_id, output.token_logprobs))
        core.scheduler.check()
    return found


def fresh(request, pictures):
    """The result of a request that runs alone, in one chunk."""
    core = build(tower=CountingTower(), cache=False, spare_slots=0, is_async=False, budget=2000)
    found = run(core, request, pictures)
    core.close()
    return found


def is_empty(core):
    return core.executor.call(lambda: not core.executor.worker._gallery._features)


@pytest.fixture
def rng(seed):
    return rng_of(seed, 1)


@pytest.mark.parametrize("budget", [300, 11])
def test_every_picture_is_encoded_once_whatever_the_answers_and_the_chunks(rng, budget):
    pictures = [picture(rng), picture(rng, 3, 2)]
    texts = [tokens(rng, 20), tokens(rng, 9), tokens(rng, 7)]
    tower = CountingTower()
    core = build(tower=tower, budget=budget, max_num_seqs=5)
    found = run(core, asking("r", texts, pictures, n=4), pictures)
    assert len(found) == 4
    assert len(tower.encoded) == len(set(tower.encoded)) == 2
    assert found == fresh(asking("r", texts, pictures, n=4), pictures)
    assert is_empty(core)
    core.close()


def test_a_picture_before_the_end_of_a_hit_is_not_encoded(rng):
    first, second = picture(rng, 3, 3), picture(rng)
    start, middle, end = tokens(rng, 10), tokens(rng, 60), tokens(rng, 40)
    tower = CountingTower()
    core = build(tower=tower)
    run(core, asking("a", [start, middle], [first]), [first])
    assert len(tower.encoded) == 1
    again = Picture(plan=first.plan, pixels=first.pixels.copy())  # an equal picture in a new object, as a second request has it
    found = run(core, asking("b", [start, middle], [again]), [again])
    assert len(tower.encoded) == 1, "the picture is before the end of the hit"
    assert [len(each) for each in found.values()] == [6]
    run(core, asking("c", [start, middle, end], [again, second]), [again, second])
    assert len(tower.encoded) == 2, "the second one alone is new"
    assert core.stats().num_hit_tokens > 0
    core.close()


def test_a_preempted_request_needs_its_features_again_and_has_them(rng):
    pictures = [picture(rng)]
    tower = CountingTower()
    core = build(tower=tower, num_pages=1 + 6, max_num_seqs=3, cache=False, spare_slots=0)
    work = [asking(f"r{number}", [tokens(rng, 20), tokens(rng, 8)], pictures, max_tokens=14) for number in range(3)]
    for each in work:
        core.add(each, pictures)
    found = by_answer(core)
    assert core.stats().num_preempted > 0
    assert len(tower.encoded) == 1, "requests that were handed one picture share it"
    expected = {}
    for each in work:
        expected |= fresh(each, pictures)
    assert found == expected
    core.close()


def test_a_fork_encodes_nothing(rng):
    pictures = [picture(rng)]
    tower = CountingTower()
    core = build(tower=tower)
    parent = asking("parent", [tokens(rng, 20), tokens(rng, 9)], pictures, max_tokens=10)
    core.add(parent, pictures)
    stem = []
    while len(stem) < 3:
        stem += [output.token_id for output in core.step()]
    params = SamplingParams(max_tokens=4, seq_seed=9, ignore_eos=True)
    child = Request(
        request_id="child",
        prompt_token_ids=parent.prompt_token_ids + tuple(stem),
        params=params,
        image_hashes=parent.image_hashes,
    )
    core.fork("parent", child, [Picture(plan=pictures[0].plan, pixels=pictures[0].pixels.copy())])
    found = by_answer(core)
    assert len(tower.encoded) == 1
    assert found["child", 0] == fresh(child, pictures)["child", 0]
    assert is_empty(core)
    core.close()


def test_a_request_that_is_aborted_before_it_runs_costs_no_run_of_the_tower(rng):
    tower, pictures = CountingTower(), [picture(rng)]
    core = build(tower=tower, max_num_seqs=1)
    core.add(asking("runs", [tokens(rng, 20)], []))
    core.add(asking("waits", [tokens(rng, 9), tokens(rng, 9)], pictures, n=2), pictures)
    core.step()
    core.abort(["waits"])
    drain(core, outputs={"runs": []})
    assert tower.encoded == []
    assert is_empty(core)
    core.close()


def test_a_tower_that_is_not_a_number_fails_the_step(rng):
    name = "vision.norm.weight"
    tower = CountingTower({**weights("golden"), name: weights("golden")[name] * float("nan")})
    core, pictures = build(tower=tower), [picture(rng)]
    core.add(asking("r", [tokens(rng, 9), tokens(rng, 9)], pictures), pictures)
    with pytest.raises(StepFailed, match="logits of 'r' are not finite numbers"):
        by_answer(core)
    core.close()


def test_rows_are_filled_in_picture_by_picture(rng):
    pictures = [picture(rng), picture(rng, 1, 1), picture(rng, 3, 1)]
    tower = CountingTower()
    whole = torch.cat([tower.span(torch.from_numpy(each.pixels), each.plan.tokens_w) for each in pictures])
    ends = np.cumsum([each.plan.span_tokens for each in pictures]).tolist()
    for _ in range(20):
        tower.encoded.clear()
        features, seen = Features(pictures, tower), set()
        for _ in range(3):
            first = int(rng.integers(0, ends[-1]))
            count = int(rng.integers(1, ends[-1] - first + 1))
            rows = features.covering(first, count)
            assert torch.equal(rows[first : first + count], whole[first : first + count])
            starts = [0, *ends[:-1]]
            seen |= {at for at in range(3) if starts[at] < first + count and ends[at] > first}
            assert len(tower.encoded) == len(seen)


def test_nothing_is_kept_without_holders(rng):
    gallery, pictures = Gallery(SimpleNamespace()), [picture(rng)]
    one, two = gallery.take(pictures), gallery.take(list(pictures))
    assert one is two
    gallery.give_back(one)
    assert gallery.take(pictures) is one
    gallery.give_back(one)
    gallery.give_back(one)
    assert not gallery._features


@pytest.mark.gpu
def test_encoding_does_not_wait_for_the_device(rng):
    cuda = torch.device("cuda")
    pictures = [picture(rng, 3, 3), picture(rng)]
    tower = VisionTower(CONFIG, weights("golden"), device=cuda)
    count = sum(each.plan.span_tokens for each in pictures)
    with torch.inference_mode():
        expected = Features(pictures, tower).covering(0, count)
        with no_waits(cuda):
            found = Features(pictures, tower).covering(0, count)
    assert torch.equal(found, expected)
