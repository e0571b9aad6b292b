"""The report of ``deepinfer inspect``: the published numbers, and what the headers of a directory say."""

import pytest

from deepinfer.config import named_config
from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.model.checkpoint.random_weights import hashed_tensors
from deepinfer.model.checkpoint.writer import write_checkpoint
from deepinfer.model.inventory import (
    component_sizes,
    kv_token_bytes,
    rank_memory,
    rank_plans,
    render_directory,
    render_inventory,
    request_bytes,
    verify_directory,
    window_state_bytes,
)

FULL = named_config("full")
GOLDEN = named_config("golden")
GIB = 1 << 30


def test_parameters_are_those_of_the_published_checkpoint():
    sizes = {each.component: each for each in component_sizes(FULL)}
    assert {name: each.num_parameters for name, each in sizes.items()} == {
        "embedding": 661_913_600,
        "head": 661_913_600,
        "norms": 414_720,
        "attention": 5_064_696_320,
        "compressors": 18_352_128,
        "indexers": 43_516_416,
        "router": 78_673_920,
        "routed experts": 543_581_798_400,
        "shared experts": 1_415_577_600,
        "mHC": 39_323_760,
        "Engram projections": 314_654_720,
        "Engram tables": 196_613_849_600,
        "DSpark": 14_225_362_530,
        "vision": 485_268_480,
    }
    assert sum(each.num_parameters for each in sizes.values()) == 763_205_315_794
    assert sum(each.num_parameters for each in sizes.values() if each.is_backbone) == 551_880_835_184
    named = {
        "routed experts": 288_777_830_400,
        "Engram tables": 202_758_032_400,
        "DSpark": 7_932_874_632,
        "vision": 970_536_960,
    }
    assert {name: sizes[name].num_bytes for name in named} == named
    assert sum(each.num_bytes for name, each in sizes.items() if name not in named) == 9_846_748_608
    assert sum(each.num_tensors for each in sizes.values()) == 96_085


def test_state_of_a_request_is_the_known_sum():
    assert kv_token_bytes(FULL) == 890
    assert window_state_bytes(FULL) == 43 * 134 * 528
    assert request_bytes(FULL, 131_072) == 890 * 131_072 + 43 * 134 * 528
    assert request_bytes(FULL, 3) == (3 * 1 + 3) * (288 + 68) + 43 * 134 * 528


def test_state_of_the_golden_model():
    assert kv_token_bytes(GOLDEN) == (36 + 17) * 2
    assert window_state_bytes(GOLDEN) == 15 * 14 * 66


def test_kv_of_a_rank_is_the_known_table():
    for num_requests, expected in ((64, 7.1), (256, 28.5)):
        assert round(num_requests * request_bytes(FULL, 131_072) / GIB, 1) == expected


@pytest.mark.parametrize(
    ("ep_size", "spares", "expected"),
    [
        (8, 0, (33.6, 6.7, 2.5, 1.5, 23.6, 67.9)),
        (8, 32, (36.4, 6.7, 2.5, 1.5, 23.6, 70.7)),
        # 2.345 for the draft; tables that round it to 2.4 have the same sum of 131.6
        (4, 32, (72.8, 6.7, 2.5, 2.3, 47.2, 131.6)),
        (64, 64, (4.9, 6.7, 2.5, 0.8, 3.0, 17.8)),
        (2, 0, (134.5, 6.7, 2.5, 4.0, 94.4, 242.1)),
    ],
)
def test_memory_of_a_rank_is_the_known_table(ep_size, spares, expected):
    memory = rank_memory(FULL, ep_size, spares)
    parts = (memory.experts, memory.dense, memory.embedding_and_head, memory.draft, memory.engram_tables)
    found = [*parts, memory.total - memory.vision]
    assert [round(each / GIB, 1) for each in found] == list(expected)
    assert memory.vision == 970_536_960


def test_memory_of_one_rank_is_the_checkpoint():
    assert rank_memory(FULL, 1).total == 510_286_023_000


@pytest.mark.parametrize(("ep_size", "spares"), [(5, 0), (8, 1), (0, 0), (256, 0)])
def test_uneven_experts_are_refused(ep_size, spares):
    with pytest.raises(ConfigError, match=f"ep_size={ep_size} does not divide"):
        rank_memory(FULL, ep_size, spares)


def test_eight_ranks_fit_on_an_h200_and_four_do_not():
    plans = {plan.ep_size: plan for plan in rank_plans(FULL, num_requests=256, context_tokens=131_072, gpu_gib=139)}
    assert [ep_size for ep_size, plan in plans.items() if plan.is_fitting] == [8, 16, 32, 64]
    assert list(plans) == [1, 2, 4, 8, 16, 32, 64]
    assert plans[1].weights.total == 510_286_023_000


def test_ranks_that_do_not_divide_the_experts_have_no_plan():
    plans = rank_plans(GOLDEN, num_requests=1, context_tokens=0, gpu_gib=9)
    assert [plan.ep_size for plan in plans] == [1, 2, 4]


@pytest.mark.parametrize(
    "change",
    [{"num_requests": -1}, {"context_tokens": -1}, {"gpu_gib": 0}, {"context_tokens": GOLDEN.max_position_embeddings + 1}],
)
def test_senseless_loads_are_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        render_inventory(GOLDEN, **({"num_requests": 1, "context_tokens": 1, "gpu_gib": 80} | change))


def test_report_names_the_published_numbers():
    text = render_inventory(FULL, num_requests=256, context_tokens=131_072, gpu_gib=139)
    for number in (
        "551,880,835,184",
        "763,205,315,794",
        "510,286,023,000",
        "96,085",
        "890 bytes a token",
        "3,042,336",
        "28.54",
    ):
        assert number in text
    assert "Fits on a GPU with 139 GiB: EP8, EP16, EP32, EP64." in text


def test_report_says_when_nothing_fits():
    assert "none of these sizes" in render_inventory(FULL, num_requests=1, context_tokens=1000, gpu_gib=16)


def test_directory_is_verified_by_its_headers(tmp_path):
    model_dir = tmp_path / "golden"
    write_checkpoint(model_dir, GOLDEN, hashed_tensors(GOLDEN), shard_bytes=2 << 20, progress=False)
    report = verify_directory(model_dir)
    assert report.is_sound
    assert report.config == GOLDEN
    assert (report.num_tensors, report.num_bytes) == (report.expected_tensors, report.expected_bytes)
    assert report.num_shards == len(list(model_dir.glob("*.safetensors")))
    assert dict(report.dtype_counts).keys() == {"BF16", "F32", "F8_E4M3", "F8_E8M0", "I8"}
    assert "exactly what config.json promises" in render_directory(report)

    min(model_dir.glob("*.safetensors")).unlink()
    report = verify_directory(model_dir)
    assert not report.is_sound
    assert "missing shard (1)" in render_directory(report)
    assert "missing tensor" in render_directory(report)


def test_directory_without_files_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        verify_directory(tmp_path)
    write_checkpoint(tmp_path / "golden", GOLDEN, hashed_tensors(GOLDEN), progress=False)
    for shard in (tmp_path / "golden").glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(CheckpointError, match="holds no"):
        verify_directory(tmp_path / "golden")
