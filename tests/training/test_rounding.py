"""The cost of rounded weights, and the licences that packages name."""

import zipfile

import numpy as np
import torch

from deepinfer.bench.approximations import Sample
from deepinfer.config import named_config
from tests.model.tiny import weights
from training.licences import Found, in_copyright_file, in_wheel
from training.masters import TEXT_ROOTS, Masters, initial_values
from training.rounding import compare_weights
from training.twin import Twin

CONFIG = named_config("golden")
COMPRESSION = torch.arange(CONFIG.vocab_size) % CONFIG.engram_compressed_vocab_size


def sample(seed):
    ids = np.random.default_rng(seed).integers(0, CONFIG.image_token_id, 70).astype(np.int32)
    return Sample(ids=ids, num_bytes=np.full(70, 4))


def test_weights_that_lie_on_the_grid_cost_nothing_and_others_something(seed):
    masters = Masters(CONFIG, TEXT_ROOTS, initial_values(CONFIG, 0))
    assert compare_weights(Twin(masters, COMPRESSION, torch.float64), [sample(seed)]).cost != 0
    masters.read(weights("golden"))
    found = compare_weights(Twin(masters, COMPRESSION, torch.float64), [sample(seed)])
    assert found.cost == 0
    assert (found.fit.num_tokens, found.fit.num_bytes) == (69, 276)


def test_the_licence_of_all_files_is_found(tmp_path):
    folder = tmp_path / "usr" / "share" / "doc" / "thing"
    folder.mkdir(parents=True)
    assert in_copyright_file(tmp_path) is None
    (folder / "copyright").write_text("Ask the author.\n")
    assert in_copyright_file(tmp_path) == Found("free form (copyright file)")
    stanzas = [
        "Format: 1.0",
        "Files: a/*\nCopyright: B\nLicense: GPL-2",
        "Files: *\nCopyright: 2001 A\n 2002 C\nLicense: MIT\n Free.",
    ]
    (folder / "copyright").write_text("\n\n".join(stanzas))
    assert in_copyright_file(tmp_path) == Found("MIT (copyright file)", ("2001 A", "2002 C"))


def test_the_licence_of_a_wheel_is_found(tmp_path):
    assert in_wheel(tmp_path) is None
    with zipfile.ZipFile(tmp_path / "thing-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing-1.dist-info/METADATA", "Name: thing\nLicense-Expression: MIT\n\nLicense: of the text below\n")
        wheel.writestr("thing-1.dist-info/licenses/LICENSE", "MIT\n\nCopyright (c) 2001 A\n")
    assert in_wheel(tmp_path) == Found("MIT (wheel)", ("Copyright (c) 2001 A",))
