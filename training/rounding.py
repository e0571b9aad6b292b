"""What FP8 and FP4 weights cost: ``python -m training.rounding --state DIR --tokenizer DIR``.

A checkpoint has only rounded weights, so this needs the masters of a training.  ``deepinfer bench quality`` measures the other
approximations.  The twin computes the same held-out texts with rounded and with unrounded weights; all else is the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer.bench.approximations import Comparison, Fit, Sample
from deepinfer.bench.quality import sample_of
from deepinfer.bench.texts import held_out_texts
from deepinfer.tokenizer import Tokenizer
from training.export import masters_of
from training.masters import TEXT_ROOTS
from training.packing import PADDING, Packed
from training.shape import nano_config
from training.twin import LayerWeights, Twin


@torch.no_grad()
def compare_weights(twin: Twin, samples: Sequence[Sample]) -> Comparison:
    """Compare FP8 and FP4 weights with weights in the twin's dtype.

    Args:
        samples: texts, each a sequence of its own.
    """
    fits = []
    for is_quantised in (True, False):
        weights = twin.weights(is_quantised=is_quantised)
        likelihoods = [_log_likelihoods(twin, weights, each) for each in samples]
        fits.append(Fit.of(likelihoods, [each.num_bytes[1:] for each in samples]))
    fit, reference = fits
    return Comparison(name="FP8 and FP4 weights", against=f"weights in {twin.dtype}", fit=fit, reference=reference)


def _log_likelihoods(twin: Twin, weights: LayerWeights, sample: Sample) -> Tensor:
    """[num_tokens - 1] wide, of every token but the first."""
    count = len(sample.ids)
    length = count + -count % 128
    token_ids = torch.full((1, length), twin.config.pad_token_id)
    positions = torch.full((1, length), PADDING)
    token_ids[0, :count] = torch.from_numpy(sample.ids.astype(np.int64))
    positions[0, :count] = torch.arange(count)
    device = twin.masters.device
    hidden = twin.run(Packed(token_ids.to(device), positions.to(device)), weights).hidden[: count - 1]
    logprobs = torch.log_softmax(twin.logits(hidden, weights), dim=-1)
    return logprobs.gather(1, token_ids[0, 1:count].to(device).unsqueeze(1)).squeeze(1)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, help="state of the text model")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--length", type=int, default=1024, help="tokens of each text")
    parser.add_argument("--texts", type=int, default=8, help="texts of prose, and as many of code")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_dir(args.tokenizer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    masters = masters_of(nano_config(tokenizer), TEXT_ROOTS, args.state).to(device)
    compression = torch.from_numpy(tokenizer.compression_map().astype(np.int64)).to(device)
    samples = []
    for kind in ("prose", "code"):
        texts = [sample_of(tokenizer, each.segments) for each in held_out_texts() if each.kind == kind]
        samples += [each.cut(args.length) for each in texts if len(each.ids) >= args.length][: args.texts]
    found = compare_weights(Twin(masters, compression, torch.bfloat16), samples)
    print(  # noqa: T201
        f"{found.name} against {found.against}, {found.fit.num_tokens} tokens: {found.fit.bits_per_byte:.4f} and "
        f"{found.reference.bits_per_byte:.4f} bits per byte, cost {found.cost:+.4f}"
    )


if __name__ == "__main__":
    main()
